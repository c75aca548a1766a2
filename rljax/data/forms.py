"""The forms of published data sets: which keys of a row hold the prompt and the right answer."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rljax.errors import naming

FormName = Literal[
    "plain",
    "verl",
    "gsm8k",
    "math-500",
    "aime-2024",
    "aime-2025",
    "dapo-math-17k",
    "numinamath",
    "deepscaler",
    "big-math",
    "openr1-math",
]

_PROMPTS = ("prompt", "problem", "question", "messages")
_ANSWERS = ("reward_model", "answer", "solution")
# The keys of the prompt and of the answer; the first of them that a row has counts. Case does not matter.
FORMS: Mapping[FormName, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": (("prompt",), ("answer",)),
    "verl": (("prompt",), ("reward_model",)),
    "gsm8k": (("question",), ("answer",)),
    "math-500": (("problem",), ("answer",)),
    "aime-2024": (("problem",), ("answer", "solution")),
    "aime-2025": (("problem", "question"), ("answer",)),
    "dapo-math-17k": (("prompt",), ("reward_model",)),
    "numinamath": (("problem",), ("answer", "solution")),
    "deepscaler": (("problem",), ("answer",)),
    "big-math": (("problem", "prompt"), ("answer", "solution")),
    "openr1-math": (("problem",), ("answer",)),
}

_LAST_LINE = re.compile(r"^[ \t]*####[ \t]*(\S.*?)\s*\Z", re.MULTILINE)
_NO_ANSWERS = ("proof", "notfound")  # NuminaMath's marks for a problem without a short answer
_READ = ("data_source", "extra_info")


class NoAnswerError(ValueError):
    """An error of a row whose right answer is empty. The message names the row."""


class Keys(NamedTuple):
    """The keys of a row that are read."""

    prompt: str  # the key of the prompt; "" if there is none
    answer: str  # the key of the right answer; "" if there is none
    unread: tuple[str, ...]  # the keys that nothing reads


@functools.lru_cache(maxsize=256)
def find_keys(keys: tuple[str, ...], form: FormName | None = None) -> Keys:
    """Finds the keys of a row that hold prompt and answer. ``form`` None: the keys themselves tell the form.

    Raises:
      ValueError: The keys do not fit the form, or do not tell it.
    """
    prompts, answers = (_PROMPTS, _ANSWERS) if form is None else FORMS[form]
    found = [_named(keys, name) for name in prompts]
    if form is None and not found[0] and found[1] and found[2]:
        raise ValueError(f"both {found[1]} and {found[2]} may be the prompt: name a form; the keys are {_list(keys)}")
    prompt = next(filter(None, found), "")
    answer = next(filter(None, (_named(keys, name) for name in answers)), "")
    if form is not None and not (prompt and answer):
        wanted = f"{' or '.join(prompts)}, and {' or '.join(answers)}"
        raise ValueError(f"a row of the form {form} has {wanted}; the keys are {_list(keys)}")
    return Keys(prompt, answer, tuple(key for key in keys if key not in (prompt, answer, *_READ)))


def take(row: Mapping[str, Any], form: FormName | None, where: str) -> tuple[Any, Any]:
    """Returns (prompt, right answer) of a row as they are written there. ``form`` None: the row's keys tell its form.

    Raises:
      NoAnswerError: The right answer is empty.
      ValueError: The row has no prompt or no key for the answer, or its keys do not fit. ``where`` begins the message.
    """
    with naming(where):
        keys = find_keys(tuple(row), form)
    prompt = _from_json(row.get(keys.prompt), "[")
    if keys.prompt.lower() == "messages" and isinstance(prompt, list):
        while prompt and isinstance(prompt[-1], Mapping) and prompt[-1].get("role") == "assistant":
            prompt = prompt[:-1]
    if not prompt:
        raise ValueError(
            f"{where}: the prompt is empty ({', '.join(_PROMPTS[:3])}, or messages); the keys are {_list(row)}"
        )
    answer = _answer(row, keys.answer, form)
    if answer is None or answer != answer or not str(answer).strip():  # a table may have NaN for a missing value
        raise (NoAnswerError if keys.answer else ValueError)(
            f"{where}: no right answer (reward_model.ground_truth, or answer); the keys are {_list(row)}"
        )
    return prompt, answer


def last_box(text: str) -> str | None:
    r"""Returns the stripped content of the last ``\boxed{}`` of a text; None if there is none or it is not closed."""
    start = text.rfind("\\boxed{")
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text[start + len("\\boxed") :] if start >= 0 else "", re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            begin = start + len("\\boxed{")
            return text[begin : begin + match.start() - 1].strip()
    return None


def _answer(row: Mapping[str, Any], key: str, form: FormName | None) -> Any:
    """Returns the right answer under ``key``, without the text that surrounds it in some forms."""
    value = row.get(key)
    if key.lower() == "reward_model":
        nested = _from_json(value, "{")
        truth = nested.get("ground_truth") if isinstance(nested, Mapping) else None
        return row.get("answer") if truth is None else truth
    if not isinstance(value, str):
        return value
    if key.lower() == "solution":
        is_answer = "llama8b_solve_rate" in row or form == "big-math"
        boxed = last_box(value)
        return value if boxed is None and is_answer else boxed
    if form == "gsm8k" or (form is None and _named(tuple(row), "question")):
        ending = _LAST_LINE.search(value)
        return ending[1] if ending else value
    if form == "numinamath" or "question_type" in row:
        return None if value.strip().lower() in _NO_ANSWERS else value
    return value


def _named(keys: Sequence[str], name: str) -> str:
    """Returns the key with this name, in any case; an empty string if there is none."""
    return name if name in keys else next((key for key in keys if key.lower() == name), "")


def _from_json(value: Any, opening: str) -> Any:
    """Returns the JSON value in a text that begins with ``opening``; any other value is returned as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(opening):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_chat = isinstance(parsed, list) and all(isinstance(one, dict) and "role" in one for one in parsed)
    return parsed if is_chat or isinstance(parsed, dict) else value


def _list(keys: Sequence[str] | Mapping[str, Any]) -> str:
    """Returns the names of keys for a message, at most twelve of them."""
    names = [str(key) for key in keys]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "none"
