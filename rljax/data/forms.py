"""The forms of published data sets: which keys of a row hold the prompt and the right answer."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from rljax.errors import naming

_PROMPTS = ("prompt", "responses_create_params", "problem", "question", "messages", "instruction")
# The keys of right answers without their working. A row may have several of them if they agree.
_SHORT = (
    *("reward_model", "reward_spec", "answer", "ground_truth", "label"),
    *("expected_answer", "final_answer", "verification_info"),
)
_WORKED = ("solution", "solutions")  # the keys of worked answers, which count where no short answer is
_NESTED = ("reward_model", "reward_spec", "verification_info")  # the records whose ``ground_truth`` is the answer
_LISTED = ("answer", "ground_truth", "label", "expected_answer")  # the keys under which a list holds alternatives
# The keys of the prompt and of the answer; the first of them that a row has counts. Case does not matter.
FORMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
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

if TYPE_CHECKING:
    DataForm: TypeAlias = str
else:
    DataForm = Literal[tuple(FORMS)]  # the choices of a key that names a form

_BRACED = re.compile(r"\\boxed\s*\{")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=\\[a-zA-Z]|[^\s{}$\\]))")
_BOXED_WORD = re.compile(r"(?:\\[a-zA-Z]+|[^\s$\\])+")  # of a box without braces
_LAST_LINE = re.compile(r"^[ \t]*####[ \t]*(\S.*?)\s*\Z", re.MULTILINE)
_FORMULA = re.compile(r"\$[^$]+\$|\$\$[^$]+\$\$|\\\[.+\\\]|\\\(.+\\\)", re.DOTALL)
_WORDS = re.compile(r"(?<!\\)\b[^\W\d_]{2,}[,;:]?\s+[^\W\d_]{2,}")  # two words side by side: a sentence
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:.*\}\s*\]\s*""", re.DOTALL)  # a chat as a text
_NO_ANSWERS = ("proof", "notfound")  # NuminaMath's marks for a problem without a short answer
_READ = ("data_source", "extra_info", "tools")


class NoAnswerError(ValueError):
    """An error of a row whose right answer is empty. The message names the row."""


class OwnKeys(NamedTuple):
    """The keys of a row that the user names. A dot leads into a nested record: ``extra_info.answer``."""

    prompt: str = ""  # the key of the prompt; "": the row's keys tell it
    answer: str = ""  # the key of the right answer; "": the row's keys tell it
    optional: bool = False  # whether a key that a row lacks is ignored in that row


Form = DataForm | OwnKeys | None  # None: the row's keys tell the form


class Alternatives(NamedTuple):
    """Several right answers, each of which is enough."""

    answers: tuple[str, ...]
    is_list: bool = False  # whether the data has a list, not the JSON text of a list


class Keys(NamedTuple):
    """The keys of a row, by what is read from them."""

    prompt: str  # the key of the prompt; "" if there is none
    answers: tuple[str, ...]  # the keys of the right answer; the answers under them must agree
    unread: tuple[str, ...]  # the keys that nothing reads


@functools.lru_cache(maxsize=256)
def find_keys(keys: tuple[str, ...], form: Form = None) -> Keys:
    """Finds the keys of a row that hold prompt and answer. ``form`` None: it is found from the keys.

    Raises:
      ValueError: The keys do not fit the form.
    """
    own = form if isinstance(form, OwnKeys) else OwnKeys()
    if isinstance(form, str):
        prompt = next(iter(_present(keys, FORMS[form][0])), "")
        answers = _present(keys, FORMS[form][1])[:1]
        if not (prompt and answers):
            wanted = f"{' or '.join(FORMS[form][0])}, and {' or '.join(FORMS[form][1])}"
            raise ValueError(f"a row of the form {form} has {wanted}; the keys are {_list(keys)}")
    else:
        prompt = own.prompt or next(iter(_present(keys, _PROMPTS)), "")
        answers = (own.answer,) if own.answer else _answer_keys(keys, prompt)
    input_key = _named(keys, "input") if _leaf(prompt) == "instruction" else ""
    read = {*(_top(keys, path) for path in (prompt, *answers)), input_key, *_READ}
    return Keys(prompt, answers, tuple(key for key in keys if key not in read))


def unread_keys(row: Mapping[str, Any], form: Form) -> tuple[str, ...]:
    """Returns the keys of a row that are not read. Raises the errors of ``find_keys``."""
    return find_keys(tuple(row), _in_row(form, row)).unread


def take(row: Mapping[str, Any], form: Form, where: str, *, whole: bool = False) -> tuple[Any, Any]:
    """Returns (prompt, right answer) of a row, the answer without its working. ``form`` None: the row's keys tell it.

    Several right answers are ``Alternatives``. With ``whole`` a row without a key for the answer, or with a record that
    holds none, has the answer "".

    Raises:
      NoAnswerError: The right answer is empty.
      ValueError: The row has no prompt or no key for the answer, its keys do not fit, or two keys hold different
        prompts or right answers. ``where`` begins the message.
    """
    with naming(where):
        form = _in_row(form, row)
        keys = find_keys(tuple(row), form)
        prompt = _prompt(row, keys.prompt)
        other = "" if isinstance(form, str) or (form and form.prompt) else _named(tuple(row), "question")
        if keys.prompt.lower() == "problem" and other and row[other] != row[keys.prompt]:
            raise ValueError(
                f"both {keys.prompt} and {other} may be the prompt: name one as prompt_key; the keys are {_list(row)}"
            )
        if not prompt:
            named = f"under {keys.prompt}" if keys.prompt else f"({', '.join(_PROMPTS[:-1])} or {_PROMPTS[-1]})"
            raise ValueError(f"the prompt is empty {named}; the keys are {_list(row)}; prompt_key names another")
        if isinstance(prompt, str) and _MESSAGES.fullmatch(prompt):
            raise ValueError("the prompt is a list of messages that was written as a text, and the text is not JSON")
        found = {key: answer for key in keys.answers if not _is_empty(answer := _answer(row, key, form))}
        _check_agree(found)
    if not found and whole and all(_leaf(key) in _NESTED and _truth(row, key) is None for key in keys.answers):
        return prompt, ""
    if not found:
        raise (NoAnswerError if keys.answers else ValueError)(
            f"{where}: no right answer (reward_model.ground_truth, or answer); the keys are {_list(row)}; "
            "answer_key names another"
        )
    return prompt, next(iter(found.values()))


def as_alternatives(value: Any) -> Alternatives | None:
    """Returns the right answers in a list of texts, or in its JSON text; None for any other value."""
    parsed = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return None
    is_texts = isinstance(parsed, list) and all(isinstance(one, str) for one in parsed)
    if not is_texts or (not parsed and parsed is not value):
        return None
    return Alternatives(tuple(one for one in parsed if one.strip()), is_list=parsed is value)


def last_box(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{}``, ``\fbox{}`` or ``\boxed 7``; None without one that is closed."""
    boxes = list(_BRACED.finditer(text)) or list(_BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    if not boxes[-1][0].endswith("{"):
        return _BOXED_WORD.match(rest)[0].rstrip(".,;")  # type: ignore[index]
    depth = 1
    for match in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return rest[: match.start()].strip()
    return None


def _prompt(row: Mapping[str, Any], path: str) -> Any:
    """Returns the prompt under a key or path: a chat without answers at its end, an instruction with its input."""
    if _leaf(path) == "responses_create_params":
        path += ".input"
    prompt = _from_json(_value(row, path), "[") if path else None
    if _leaf(path) == "messages" and isinstance(prompt, list):
        while prompt and isinstance(prompt[-1], Mapping) and prompt[-1].get("role") == "assistant":
            prompt = prompt[:-1]
    given = row.get(_named(tuple(row), "input")) if _leaf(path) == "instruction" else None
    return f"{prompt}\n\n{given}" if prompt and isinstance(given, str) and given.strip() else prompt


def _answer(row: Mapping[str, Any], path: str, form: Form) -> Any:
    """Returns the right answer under a key or path, without the text that surrounds it in some forms."""
    value, key = _value(row, path), _leaf(path)
    if key in _NESTED:
        truth = _truth(row, path)
        if truth is None and key == "reward_model" and "answer" in row:
            return _answer(row, "answer", form)
        return truth if key == "verification_info" else as_alternatives(truth) or truth
    if path.lower() in ("reward_model.ground_truth", "reward_spec.ground_truth"):
        return as_alternatives(value) or value
    if key in _LISTED and isinstance(value, list) and len(value) > 1:
        return as_alternatives(value) or value
    if key == "solutions" or (key == "solution" and isinstance(value, list)):
        several = as_alternatives(value)
        if several is not None:
            return Alternatives(tuple(answer for one in several.answers if (answer := _without_working(one))))
    if not isinstance(value, str):
        return value
    if key in _WORKED:
        is_answer = "llama8b_solve_rate" in row or form == "big-math"
        found = last_box(value) if is_answer else _without_working(value)
        return value if found is None and is_answer else found
    if key == "output":
        return last_box(value) or value
    if form == "gsm8k" or (not isinstance(form, str) and _named(tuple(row), "question")):
        ending = _LAST_LINE.search(value)
        return ending[1] if ending else value
    if form == "numinamath" or "question_type" in row:
        return None if value.strip().lower() in _NO_ANSWERS else value
    return value


def _truth(row: Mapping[str, Any], path: str) -> Any:
    """Returns the ``ground_truth`` of the record under a key or path; None if there is none."""
    nested = _record(_value(row, path))
    return nested.get("ground_truth") if isinstance(nested, Mapping) else None


def _without_working(text: str) -> str | None:
    """Returns the last box, or the text behind ``####``, or else a text that is one formula; None for other texts."""
    boxed, ending = last_box(text), _LAST_LINE.search(text)
    if boxed is not None or ending:
        return boxed if boxed is not None else ending[1]  # type: ignore[index]
    stripped = text.strip()
    is_formula = _FORMULA.fullmatch(stripped) or ("\n" not in stripped and not _WORDS.search(stripped))
    return stripped if is_formula else None


def _is_empty(answer: Any) -> bool:
    """Returns whether there is no right answer; a table may have NaN for a missing value."""
    if isinstance(answer, Alternatives):
        return not answer.answers
    return answer is None or answer != answer or not str(answer).strip()


def _check_agree(found: Mapping[str, Any]) -> None:
    """Raises ValueError if two keys of a row hold different right answers.

    An answer with its working may have another spelling, so it is compared only with a label (which may be a class).
    """
    short = [key for key in found if _leaf(key) not in _WORKED]
    for first, other in itertools.pairwise(found if [*map(_leaf, short)] == ["label"] else short):
        if not _agree(found[first], found[other]):
            raise ValueError(
                f"{first} and {other} hold different right answers, {_shown(found[first])} and "
                f"{_shown(found[other])}: name one of the keys as answer_key"
            )


def _shown(answer: Any) -> str:
    return f"{list(answer.answers) if isinstance(answer, Alternatives) else answer!r:.60}"


def _agree(one: Any, other: Any) -> bool:
    """Returns whether two right answers are the same text or number, or share an alternative."""
    return any(a == b or _number(a) == _number(b) for a in _texts(one) for b in _texts(other))


def _texts(answer: Any) -> list[str]:
    several = answer.answers if isinstance(answer, Alternatives) else answer
    return [str(each).strip() for each in (several if isinstance(several, list | tuple) else [several])]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _answer_keys(keys: tuple[str, ...], prompt: str) -> tuple[str, ...]:
    """Returns the keys of a row that hold its right answer."""
    short, worked = _present(keys, _SHORT), _present(keys, _WORKED)[:1]
    if short:
        return short if _leaf(short[0]) in ("reward_model", "reward_spec", "answer") else short + worked
    return worked or (_present(keys, ("output",)) if _leaf(prompt) == "instruction" else ())


def _in_row(form: Form, row: Mapping[str, Any]) -> Form:
    """Returns ``form``, without the optional keys that a row lacks."""
    if not isinstance(form, OwnKeys) or not form.optional:
        return form
    prompt, answer = (path if path and _found(row, path)[0] else "" for path in (form.prompt, form.answer))
    return OwnKeys(prompt, answer)


def _value(row: Mapping[str, Any], path: str) -> Any:
    """Returns the value under a key or path. Raises ValueError if the row lacks it."""
    is_there, value = _found(row, path)
    if not is_there:
        raise ValueError(f"there is no {path}; the keys are {_list(row)}")
    return value


def _found(row: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Returns whether a row has a key or path, and its value."""
    if key := _named(tuple(row), path):
        return True, row[key]
    value: Any = row
    for part in path.split("."):
        value = _record(value)
        key = _named(tuple(value), part) if isinstance(value, Mapping) else ""
        if not key:
            return False, None
        value = value[key]
    return True, value


def _record(value: Any) -> Any:
    """Returns a record that is written as the text of JSON, or as a Parquet map; any other value as it is."""
    if isinstance(value, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return dict(value)
    return _from_json(value, "{")


def _leaf(path: str) -> str:
    """Returns the last name of a path, in lower case."""
    return path.rpartition(".")[2].lower()


def _top(keys: Sequence[str], path: str) -> str:
    """Returns the key of a row in which a path begins."""
    return _named(keys, path) or _named(keys, path.partition(".")[0])


def _present(keys: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Returns the keys with these names, in the order of ``names``."""
    return tuple(filter(None, (_named(keys, name) for name in names)))


def _named(keys: Sequence[str], name: str) -> str:
    """Returns the key with this name, in any case; an empty string if there is none."""
    return name if name in keys else next((key for key in keys if key.lower() == name.lower()), "")


def _from_json(value: Any, opening: str) -> Any:
    """Returns the chat or record in a text that begins with ``opening``; any other value is returned as it is.

    The text is JSON, or Python's form of the value, which tables of pandas have in CSV.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(opening):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings(action="ignore"):
                parsed = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return value
    is_chat = isinstance(parsed, list) and all(isinstance(one, dict) and "role" in one for one in parsed)
    return parsed if is_chat or isinstance(parsed, dict) else value


def _list(keys: Sequence[str] | Mapping[str, Any]) -> str:
    """Returns the names of keys for a message, at most twelve of them."""
    names = [str(key) for key in keys]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "none"
