"""Rewards of reasoning-gym's tasks: a strict score, and the library's own.

The strict score is 1.0 if the library's score is exactly 1.0 and the answer says nothing else, else 0.0. For some
tasks the library gives 1.0 to more than right answers, and then a rule here is added.

A scorer of the library that calls ``sympy.parse_expr`` may execute a formula, and one that calls ``eval`` may execute a
literal. Formulas and literals do nothing but compute a number or make a list, and the numbers of a formula stay small.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from rljax.errors import install_words
from rljax.rewards.final_answer import last_boxes, last_tag

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError(f"it needs reasoning-gym ({error}): {install_words('gym')}") from error

FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""The tasks whose scorers execute an answer as a formula of sympy."""
LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""The tasks whose scorers execute an answer with Python's ``eval``, unless it is a right answer as it stands."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LONGEST = 4096  # characters of an answer
_DEEPEST = 500  # nodes on a path through the tree of a formula
_DIGITS = 1e5  # decimal digits of any number in the value of a formula
# ``sympy`` gives a meaning of its own to other characters, such as the factorial "!" and the repeated decimal "[".
_CHARACTERS = re.compile(r"[\w \t\n.+*/(),-]*")
# Python rounds 1e-99999 to 0, and ``sympy`` makes a number of 100,000 digits of it.
_LONG_EXPONENT = re.compile(r"[\d.]e[+-]?[\d_]{4}", re.IGNORECASE)
_FUNCTIONS = frozenset(
    {
        *("Abs", "abs", "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc"),
        *("asin", "acos", "atan", "acot", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    }
)
_POWERS = frozenset({"E", "exp"})  # The powers of Euler's number become powers of n in exp(log(n)).


def strict_reward(problem: Mapping[str, Any], response: str, truncated: bool) -> float:
    """Returns 1.0 if the answer in a response is right and complete, else 0.0 (the strict score).

    The response is decoded text without special tokens. A truncated one has no answer.

    Raises:
      ValueError: The problem does not belong to a reasoning-gym task.
    """
    name, entry = _task(problem)
    answer = stated_answer(response)
    if library_reward(problem, response, truncated) != 1.0 or not answer:
        return 0.0
    return float(name not in _RULES or _RULES[name](answer, entry))


def library_reward(problem: Mapping[str, Any], response: str, truncated: bool) -> float:
    """Returns the library's score of the answer in a response, from 0.0 to 1.0.

    Some scorers give a part of 1.0 to an answer that contains the right one. An answer that an executing scorer must
    not see gets 0.0. The arguments and errors are the same as for ``strict_reward``.
    """
    name, entry = _task(problem)
    answer = stated_answer(response)
    if truncated or not _is_harmless(name, answer, entry):
        return 0.0
    score = float(_dataset(name, problem["extra_info"]["options"]).score_answer(answer=answer, entry=entry))
    return min(max(score, 0.0), 1.0)


def stated_answer(response: str) -> str:
    r"""Returns the answer in a response, without white space around it.

    Only the text after the last ``</think>`` counts, if there is one. The answer is the last ``<answer>`` tag; without
    one, the last ``\boxed{}``; without both, the last line that is not empty. If a box is the whole content of a tag,
    the content of the box is the answer.
    """
    text = response.rsplit("</think>", 1)[-1]
    _, tag = last_tag(text)
    if tag is not None:
        _, opened = last_boxes(tag)
        return opened if opened is not None and tag == f"\\boxed{{{opened}}}" else tag
    _, box = last_boxes(text)
    return box if box is not None else text.strip().rsplit("\n", 1)[-1].strip()


def _is_harmless(name: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Returns whether the scorer of a task may see an answer.

    A scorer that executes answers sees only formulas or literals, and right answers. Other answers are wrong anyway.
    """
    if name in FORMULAS:
        return is_formula(answer)
    if name in LITERALS:
        return answer in entry["metadata"].get("valid_answers", [entry["answer"].strip()]) or is_literal(answer)
    return True


def is_formula(answer: str) -> bool:
    """Returns whether an answer is a formula of numbers, names, + - * / ** and calls of mathematical functions.

    A formula whose value could have numbers of more than 100,000 digits, such as ``9**9**8``, does not count as one.
    """
    answer = answer.strip()
    if len(answer) > _LONGEST or not _CHARACTERS.fullmatch(answer) or not unicodedata.is_normalized("NFKC", answer):
        return False
    if _LONG_EXPONENT.search(answer):
        return False
    try:
        return _digits(ast.parse(answer, mode="eval").body, 0) <= _DIGITS
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False


def is_literal(answer: str) -> bool:
    """Returns whether an answer is a Python literal, such as a list of lists of numbers or texts."""
    if len(answer) > _LONGEST:
        return False
    try:
        ast.literal_eval(answer)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _digits(node: ast.expr, depth: int) -> float:
    """Returns a bound on the decimal digits of the numbers in the exact value of a formula. Names count as one.

    Raises ValueError if the tree is not a formula, and OverflowError if the bound is beyond any float.
    """
    if depth > _DEEPEST:
        raise ValueError("the formula is too deep")
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("a truth value is no number")
        case ast.Constant(value=int() | float() as value):
            return abs(math.log10(abs(value))) if value else 0.0
        case ast.Name(id=name) if "__" not in name:
            return 0.5 if name in _POWERS else 0.0
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _digits(operand, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return max(_digits(left, depth + 1), math.log10(2)) * 10 ** _digits(right, depth + 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _digits(left, depth + 1) + _digits(right, depth + 1) + math.log10(2)
        case ast.Call(func=ast.Name(id=name), args=[first, *more], keywords=[]) if name in _FUNCTIONS:
            size = _digits(first, depth + 1)
            return sum(_digits(argument, depth + 1) for argument in more) + (10**size if name in _POWERS else size)
    raise ValueError(f"{type(node).__name__} is no part of a formula")


def _task(problem: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name of a problem's task, and its entry as the library made it."""
    facts = problem.get("extra_info") or {}
    if not {"task", "options", "entry"} <= set(facts):
        raise ValueError("the problem is none of a reasoning-gym task: set data.task = reasoning_gym:NAME")
    return facts["task"], facts["entry"]


@functools.lru_cache(maxsize=128)
def _dataset(name: str, options: str) -> Any:
    """Returns the task with its settings, which some scorers read."""
    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(options))


def _is_exact(answer: str, entry: Mapping[str, Any]) -> bool:
    return answer == entry["answer"].strip()


def _has_same_numbers(answer: str, entry: Mapping[str, Any]) -> bool:
    """Returns whether the answer has exactly the numbers of the right answer, in any notation."""
    return _NUMBER.findall(answer) == _NUMBER.findall(entry["answer"])


def _uses_given_numbers(answer: str, entry: Mapping[str, Any]) -> bool:
    return sorted(_NUMBER.findall(answer)) == sorted(map(str, entry["metadata"]["numbers"]))


# The comment on each rule names the wrong answers to which the library gives 1.0.
_RULES: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "coin_flip": _is_exact,  # a number whose digits begin the right one, such as 0
    "fraction_simplification": _has_same_numbers,  # a right fraction before other text
    "game_of_life_halting": _is_exact,  # everything
    "gsm_symbolic": _has_same_numbers,  # a right number before other numbers
    "letter_jumble": _is_exact,  # the right words before others
    "puzzle24": _uses_given_numbers,  # any four numbers that make 24
    "spell_backward": _is_exact,  # the right word with more letters behind it, in rare cases
    "time_intervals": _is_exact,  # a right number of days before other text
}
