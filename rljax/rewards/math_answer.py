"""The reward of DAPO-style mathematics: 1 if the final answer is right, else 0.

math-verify limits its time with signals, which work only in a main thread. This module switches the limit off, because
the reward pool has one of its own. A direct call of ``math_reward`` may take as long as sympy takes.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from rljax.rewards.final_answer import final_answer
from rljax.rewards.math_text import (
    braces_balance,
    form_of,
    matches,
    option_letter,
    option_letters,
    rewrite_numbers,
    split_base,
    split_label,
    split_unit,
    tidy,
    without_label,
    without_money,
    without_words,
)

_DIGITS = 60
# Positive and negative points without a pattern, at which two formulas are compared.
_POINTS = (("7/5", "11/3", "23/7"), ("-13/6", "-5/7", "-29/9"), ("19/4", "-8/3", "17/5"), ("2/9", "31/8", "-6/5"))
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-zA-Z])|\\in(?![a-zA-Z])")
_BUILDER = re.compile(r"^\\\{\s*\(?([A-Za-z])\)?\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|\\vert|\||:)\s*(.*)\\\}$")
_MEMBER = re.compile(r"^[A-Za-z]\s*\\in(?![a-zA-Z])\s*")
# This module removes units itself: the library also treats single letters as units, so 5t would become 5.
_EXTRACTION = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
    ),
)
_TWO_NUMBERS = re.compile(r"(?<![\d_])\d+\s+\d")  # the library reads 4 2 as a binomial coefficient


@functools.lru_cache(maxsize=1024)
def parsed(text: str) -> tuple[Any, ...]:
    """Returns the values that math-verify reads in a text; an empty tuple if any part of it cannot be parsed."""
    text = rewrite_numbers(text)
    if not braces_balance(text) or _TWO_NUMBERS.search(text):
        return ()
    boxed = rf"\boxed{{{text}}}"
    return tuple(parse(boxed, [_EXTRACTION], fallback_mode="no_fallback", parsing_timeout=None))


def same_value(right: Any, stated: Any) -> bool | None:
    """Returns whether two exact numbers are equal; None unless both are finite numbers without letters.

    Rational numbers are compared exactly, however small they are. Others must agree to 50 significant digits.
    """
    right, stated = (_number(value) for value in (right, stated))
    if right is None or stated is None:
        return None
    if right.is_Rational and stated.is_Rational:
        return bool(right == stated)
    one, other = (sympy.N(value, _DIGITS) for value in (right, stated))
    if not (one.is_finite and other.is_finite):
        return None
    return bool(abs(one - other) <= sympy.Float(10) ** (10 - _DIGITS) * max(abs(one), abs(other)))


def _number(value: Any) -> Any:
    if not isinstance(value, sympy.Expr):
        return None
    value = value.subs({letter: sympy.I for letter in value.free_symbols if letter.name == "i"})
    if value.free_symbols:
        return None
    try:
        value = value.doit()
        return value if value.is_number and value.is_finite is not False else None
    except Exception:  # sympy raises many kinds
        return None


def same_formula(right: Any, stated: Any) -> bool:
    """Returns whether two formulas of the same letters agree at several points where the right one is real.

    This finds sqrt(1/n) = 1/sqrt(n), which sympy does not simplify because it fails for negative n.
    """
    if not (isinstance(right, sympy.Expr) and isinstance(stated, sympy.Expr)):
        return False
    letters = sorted(right.free_symbols, key=str)
    if not letters or len(letters) > len(_POINTS[0]) or set(letters) != stated.free_symbols:
        return False
    seen = 0
    for point in _POINTS:
        values = dict(zip(letters, map(sympy.Rational, point), strict=False))
        try:
            one, other = (sympy.N(formula.doit().subs(values), 30) for formula in (right, stated))
            if not one.is_real:
                continue
            if not abs(one - other) <= sympy.Float("1e-20") * max(abs(one), abs(other)):
                return False
        except Exception:  # sympy raises many kinds, and some formulas have no value there
            return False
        seen += 1
    return seen >= 2


def same_solutions(right: str, stated: str) -> bool:
    """Returns whether two texts describe the same set of real numbers, and one of them does so by inequalities."""
    if not (_RELATION.search(right) or _RELATION.search(stated)):
        return False
    one, other = _solutions(right), _solutions(stated)
    return one is not None and other is not None and one == other


def _solutions(text: str) -> Any:
    """Returns the set of real numbers that an inequality, a set or an interval describes; None for another text."""
    if (built := _BUILDER.match(text)) is not None:
        text = built[2]
    text = _MEMBER.sub("", text.strip())
    sets = []
    for part in re.split(r"\s+or\s+|\\lor(?![a-zA-Z])", text):
        found = parsed(part)
        if not found:
            return None
        try:
            value = found[0]
            sets.append(value if isinstance(value, sympy.Set) else value.as_set())
        except Exception:  # sympy raises many kinds
            return None
    return sympy.Union(*sets)


_WORDS = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z][A-Za-z' \-]*")
_NUMERIC = re.compile(r"[^A-Za-z]*")
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_SEVERAL_CHOICES = re.compile(r"(?=([A-J]))[A-J]{2,5}")
_RATIO = re.compile(r"[^:<>=\\]+(?::[^:<>=\\]+){2,}")
_DECIMAL = re.compile(r"\d\.\d|(?<!\d)\.\d")
_INTEGER = re.compile(r"[+-]?\d{1,1000}")
_PERCENT = re.compile(r"\s*(?:\\?%|\bper ?cent\b|\bpct\b)$", re.IGNORECASE)
_SIGNIFICANT_DIGITS = 6
_LONGEST = 2000  # characters; a longer text is not an answer and would take long to parse

# Without a time limit the library logs a warning in each process.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_reward(problem: Mapping[str, Any], response: str, truncated: bool) -> float:
    """Returns 1.0 if the final answer of a response is right, else 0.0.

    The right ``"answer"`` of the problem is LaTeX or plain text. If the problem has ``"alternatives"``, any of them is
    right. The response is decoded text without special tokens. A truncated one has no final answer.

    Raises:
      ValueError: The problem has no right answer.
    """
    truths = [str(truth).strip() for truth in problem.get("alternatives") or [problem["answer"]]]
    if not all(truths):
        raise ValueError("the problem's answer is empty")
    stated = None if truncated else final_answer(response)
    return 0.0 if stated is None else float(any(same_answer(truth, stated) for truth in truths))


def same_answer(truth: str, stated: str) -> bool:
    """Returns whether a stated answer, from ``final_answer``, equals the right answer ``truth``.

    The form of ``truth`` decides how the two are compared.
    """
    if len(stated) > _LONGEST:
        return False
    truth = truth.rsplit("####", 1)[-1]  # GSM8K's answers end with it
    right, answer = tidy(truth), tidy(stated)
    if not right or not answer:
        return False
    if _squeezed(right) == _squeezed(answer):
        return True
    if _WORDS.fullmatch(right):
        return right.casefold() == answer.casefold()
    if len(letter := right.strip("() ")) == 1 and "A" <= letter <= "J":
        return option_letter(answer) == letter
    if _SEVERAL_CHOICES.fullmatch(right):
        return option_letters(answer) == option_letters(right)
    letter, right = split_label(right)
    stated_letter, answer = split_label(answer)
    if letter and (stated_letter or option_letter(answer)):
        return letter == (stated_letter or option_letter(answer)) and (not stated_letter or _same_form(right, answer))
    try:
        value = tidy(without_words(answer))
        return _same_form(right, answer) or (value != answer and _same_form(right, value))
    except RecursionError:  # nested deeper than any answer
        return False


def _squeezed(text: str) -> str:
    return _SPACES.sub("", text)


def _same_form(right: str, answer: str) -> bool:
    """Returns whether two answers are equal. Sets, tuples and lists are compared by part, each by its own rule."""
    if same_solutions(right, answer):
        return True
    one, other = form_of(right), form_of(answer)
    kinds = {one.kind, other.kind}
    if kinds == {"one"}:
        return _same_quantity(right, answer)
    if kinds <= {"set", "list"}:
        return matches(one.items, other.items, in_order=one.names == other.names != (), equal=_same_part)
    if kinds <= {"tuple", "list"}:
        same_brackets = (one.brackets or "()") == (other.brackets or "()")
        return same_brackets and matches(one.items, other.items, in_order=True, equal=_same_part)
    if kinds == {"tuple", "one"}:
        return _equal(right, answer)  # an interval may be written as a union or a difference
    # A set of one element stands for the element.
    if one.kind == "set":
        return len(one.items) == 1 and _same_part(one.items[0], answer)
    return other.kind == "set" and len(other.items) == 1 and _same_part(right, other.items[0])


def _same_part(right: str, answer: str) -> bool:
    """Returns whether two parts of answers, which may have parts themselves, are equal."""
    if _squeezed(right) == _squeezed(answer):
        return True
    if "one" == form_of(right).kind == form_of(answer).kind:
        return _same_quantity(right, answer)
    return _same_form(right, answer)


def _same_quantity(right: str, answer: str) -> bool:
    """Returns whether two answers without parts are equal.

    Currency and percent signs are removed, and so are units if the right answer is a number.
    """
    right, answer = without_money(right), without_money(answer)
    if _RATIO.fullmatch(right) and _RATIO.fullmatch(answer):
        parts, others = right.split(":"), answer.split(":")  # 3:4:5 is 6:8:10: each part by the first one
        return len(parts) == len(others) and all(
            _equal(rf"({part})\cdot({others[0]})", rf"({other})\cdot({parts[0]})")
            for part, other in zip(parts[1:], others[1:], strict=True)
        )
    right_digits, base = split_base(right)
    digits, stated_base = split_base(answer)
    if base or stated_base:
        return right_digits == digits and (base == stated_base or not base or not stated_base)
    right_value, value = (_PERCENT.sub("", text) for text in (right, answer))
    right_share, share = right_value != right, value != answer
    number, unit = split_unit(right_value)
    if _NUMERIC.fullmatch(re.sub(r"\\[A-Za-z]+", "", number)):
        right_value, (value, stated_unit) = number, split_unit(value)
        if unit and stated_unit and unit != stated_unit:  # None is none, and "" is a noun; nothing is converted
            return False
    if right_share == share:
        return _equal(right_value, value)
    # A percent sign on only one side is a unit (50 for 50%) or a factor (0.5 for 50%).
    whole = rewrite_numbers(right_value if right_share else value)
    hundredth = rf"\frac{{{whole}}}{{100}}"
    factor = (hundredth, value) if right_share else (right_value, hundredth)
    return _equal(right_value, value) or _equal(*factor)


def _equal(right: str, answer: str) -> bool:
    """Returns whether two values are equal: exactly if neither has a decimal point, else to six significant digits."""
    (label, value), (stated_label, stated_value) = without_label(right), without_label(answer)
    if label == stated_label or not ("=" in right and "=" in answer):
        right, answer = value, stated_value
    if _INTEGER.fullmatch(right) and _INTEGER.fullmatch(answer):
        return int(right) == int(answer)
    expected, stated = parsed(right), parsed(answer)
    if not expected or not stated:
        return False
    if not (_DECIMAL.search(right) or _DECIMAL.search(answer)):
        exact = same_value(expected[0], stated[0])
        if exact is not None:
            return exact
    try:
        exponent = math.floor(math.log10(abs(float(expected[0]))))
    except (TypeError, ValueError, OverflowError):  # 0, infinite, or not a number
        exponent = -1
    decimals = _SIGNIFICANT_DIGITS - 1 - min(exponent, -1)  # at least six
    lists, more = (list(expected), list(stated)), {"allow_set_relation_comp": True, "timeout_seconds": None}
    return bool(verify(*lists, float_rounding=decimals, **more)) or same_formula(expected[0], stated[0])
