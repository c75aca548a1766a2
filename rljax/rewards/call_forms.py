"""The forms of reward functions in rljax and in other frameworks, told apart by the parameters' names.

Each framework calls its rewards in its own way: verl's ``NaiveRewardManager`` and ``BatchRewardManager`` with keywords,
TRL's ``GRPOTrainer`` with keywords and lists, OpenRLHF's executor with three lists. A reward of such a form is called
in the same way here, with one response at a time. SkyRL's functions are verl's, with other names for the response.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from rljax import user_code

FormName = Literal["rljax", "verl", "verl_batch", "trl", "openrlhf"]
FORMS = (
    "(problem, response, truncated), verl's (data_source, solution_str, ground_truth, extra_info) or TRL's "
    "(prompts, completions, **columns)"
)
"""The forms of a reward, for messages."""

_ANSWERS = (
    *("answer", "ground_truth", "solution", "label", "target"),
    *("expected_answer", "final_answer", "reference_answer"),
)
_VERL = {"data_source", "solution_str", "ground_truth", "extra_info"}
_VERL_BATCH = {f"{name}s" for name in _VERL}
_OPENRLHF = {"queries", "prompts", "labels"}
_KNOWN = {"verl": _VERL, "verl_batch": _VERL_BATCH, "openrlhf": _OPENRLHF}
# Other names of the response in functions of verl and SkyRL.
_RESPONSES = {"predict_str", "model_output", "model_response", "output", "response", "response_str", "prediction"}
# Objects of a framework that do not exist here.
_OBJECTS = {
    *("args", "sample", "samples", "state", "states", "parser", "trainer_state", "log_extra", "log_metric"),
    *("environments", "prompt_ids", "completion_ids", "reward_router_address", "reward_model_tokenizer"),
}

_OWN_KEYS = ("templated", "alternatives", "truth", "columns", "chat_tools")  # keys of a problem that are no columns
_CUT = re.compile(r"trunc|(^|_)cut|clip|overlong|incomplete|unfinished")


class NamedReward:
    """A user's reward function, which is called in the way of its framework."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Finds the form of ``function`` by the names of its parameters.

        A function whose signature Python does not know has rljax's form.

        Raises:
          ValueError: The form is unknown, or needs objects of its framework. The message follows the function's name.
        """
        self._function = function
        try:
            self._parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
            self._form = _form_of(self._parameters)
        except ValueError:  # some builtins have no signature; the first call shows whether it fits
            self._parameters, self._form = {}, "rljax"
        lacking = _lacking(self._parameters, self._form)
        if self._form is None or lacking:
            plain = [one.replace(annotation=one.empty) for one in self._parameters.values()]
            shown = str(inspect.Signature(plain))
            why = f", but {', '.join(sorted(lacking))} cannot be given" if lacking else ""
            raise ValueError(f"takes {shown}{why}; a reward takes {FORMS}")

    def __call__(self, problem: Mapping[str, Any], response: str, truncated: bool) -> float:
        """Returns the reward. Raises the function's errors, and ValueError or TypeError if its result is no number."""
        if self._form is None or self._form == "rljax":
            return self._number(self._function(problem, response, truncated))
        values = _VALUES[self._form](problem, response)
        values |= dict.fromkeys(_response_names(self._parameters), response) if self._form == "verl" else {}
        listed: list[Any] = []
        named: dict[str, Any] = {}
        for name, one in self._parameters.items():
            if one.kind is one.VAR_KEYWORD:
                named |= {key: value for key, value in values.items() if key not in self._parameters}
            elif name in values and one.kind is one.POSITIONAL_ONLY:
                listed.append(values[name])
            elif name in values:
                named[name] = values[name]
            elif _is_required(one):
                raise ValueError(f"it needs the column {name!r}, but the row has only {', '.join(values)}")
        return self._number(self._function(*listed, **named))

    def _number(self, value: Any) -> float:
        if inspect.isawaitable(value):
            value = user_code.run_async(_result(value))
        value = self._score(value)
        if self._form in ("verl_batch", "trl", "openrlhf"):
            rewards = list(value)
            if len(rewards) != 1:
                raise ValueError(f"it returned {len(rewards)} rewards for a list of one response")
            value = self._score(rewards[0])
        elif self._form == "verl" and isinstance(value, tuple) and value:
            value = value[0]
        if value is None:
            raise ValueError("it returned None, so it does not apply to this row")
        return float(value)

    def _score(self, value: Any) -> Any:
        """Returns the reward in a dict; any other value is returned as it is."""
        if not isinstance(value, Mapping):
            return value
        key = "rewards" if self._form == "openrlhf" else "score"
        if key not in value:
            raise ValueError(f"it returned a dict without {key!r}, with {', '.join(map(str, value)) or 'nothing'}")
        return value[key]


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def _right_answers(problem: Mapping[str, Any]) -> Any:
    """Returns the right answer of a row unchanged, or the list of all of them if the row has several."""
    return problem.get("truth", problem.get("alternatives") or problem["answer"])


def _of_verl(problem: Mapping[str, Any], response: str) -> dict[str, Any]:
    extra = problem.get("extra_info") or {}
    return {
        "data_source": problem.get("data_source", ""),
        "solution_str": response,
        "ground_truth": _right_answers(problem),
        "extra_info": dict(extra) if isinstance(extra, Mapping) else extra,
    }


def _of_verl_batch(problem: Mapping[str, Any], response: str) -> dict[str, Any]:
    return {f"{name}s": [value] for name, value in _of_verl(problem, response).items()}


def _of_openrlhf(problem: Mapping[str, Any], response: str) -> dict[str, Any]:
    prompt = problem["prompt"]
    return {"queries": [prompt + response], "prompts": [prompt], "labels": [_right_answers(problem)]}


def _of_trl(problem: Mapping[str, Any], response: str) -> dict[str, Any]:
    """Returns TRL's arguments, lists of length 1. Prompt and completion are messages if the data's prompt is a chat."""
    extra = problem.get("extra_info") or {}
    columns = dict.fromkeys(_ANSWERS, _right_answers(problem))
    columns |= dict(extra) if isinstance(extra, Mapping) else {}
    columns |= problem.get("columns", {})
    columns |= {name: value for name, value in problem.items() if name not in _OWN_KEYS}
    columns["answer"] = _right_answers(problem)
    prompt = columns.pop("raw_prompt", columns.pop("prompt"))
    is_chat = not isinstance(prompt, str)
    columns["prompts"] = [dict(message) for message in prompt] if is_chat else prompt
    columns["completions"] = [{"role": "assistant", "content": response}] if is_chat else response
    return {name: [value] for name, value in columns.items() if name != "prompt"}


_VALUES: Mapping[FormName, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "verl": _of_verl,
    "verl_batch": _of_verl_batch,
    "openrlhf": _of_openrlhf,
    "trl": _of_trl,
}


def _form_of(parameters: Mapping[str, inspect.Parameter]) -> FormName | None:
    names = set(parameters)
    places = [one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    is_cut = len(places) > 2 and bool(_CUT.search(places[2].name))
    marks = _VERL | _VERL_BATCH | _OPENRLHF | {"completions"}
    takes_three = not any(map(_is_required, [*parameters.values()][3:]))
    if is_cut and takes_three and not marks & {one.name for one in places[:2]}:
        return "rljax"
    if "queries" in names:
        return "openrlhf"
    if "completions" in names:
        return None if "prompt" in names else "trl"  # AReaL's functions take one prompt
    if names & _VERL_BATCH:
        return "verl_batch"
    return "verl" if names & (_VERL - {"extra_info"}) else None


def _lacking(parameters: Mapping[str, inspect.Parameter], form: FormName | None) -> set[str]:
    """Returns the required parameters that get no value, and the response's names if several parameters mean it."""
    required = {name for name, one in parameters.items() if _is_required(one)}
    if form == "rljax":
        return set()
    if form not in _KNOWN:
        return required & _OBJECTS
    responses = _response_names(parameters) if form == "verl" else set()
    return required - _KNOWN[form] - (responses if len(responses) == 1 else set())


def _response_names(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """Returns the required parameters that mean the response, of a function without ``solution_str``."""
    if "solution_str" in parameters:
        return set()
    return {name for name in parameters if name in _RESPONSES and _is_required(parameters[name])}


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return named and parameter.default is parameter.empty
