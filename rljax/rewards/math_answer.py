"""The reward of DAPO-style mathematics: 1 if math-verify judges the final answer right, else 0.

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

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from rljax.rewards.final_answer import final_answer
from rljax.rewards.math_text import (
    braces_balance,
    option_letter,
    rewrite_numbers,
    tidy,
    without_label,
    without_money,
)
from rljax.rewards.units import split_unit, units_agree

# This module removes units itself: the library also treats single letters as units, so 5t would become 5.
_EXTRACTION = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
    ),
)
_WORDS = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z][A-Za-z' \-]*")
_NUMERIC = re.compile(r"[^A-Za-z]*")
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_TWO_NUMBERS = re.compile(r"(?<![\d_])\d+\s+\d")  # the library reads 4 2 as a binomial coefficient
_INTEGER = re.compile(r"[+-]?\d{1,1000}")
_PERCENT = re.compile(r"\s*(?:\\?%|\bper ?cent\b|\bpct\b)$", re.IGNORECASE)
_SIGNIFICANT_DIGITS = 6
_LONGEST = 2000  # characters; a longer text is not an answer and would take long to parse

# Without a time limit the library logs a warning in each process.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_reward(problem: Mapping[str, Any], response: str, truncated: bool) -> float:
    """Scores one response.

    Args:
      problem: The problem with the right ``"answer"``, as LaTeX or plain text.
      response: The decoded text, without special tokens; ``final_answer`` finds the answer in it.
      truncated: Whether the length limit cut the response off; then it has no final answer.

    Returns:
      The reward, 1.0 or 0.0.

    Raises:
      ValueError: The problem has no right answer.
    """
    truth = str(problem["answer"]).strip()
    if not truth:
        raise ValueError("the problem's answer is empty")
    stated = None if truncated else final_answer(response)
    return 0.0 if stated is None else float(same_answer(truth, stated))


def same_answer(truth: str, stated: str) -> bool:
    """Whether a stated answer is right; ``truth`` determines the form (an interval, a set, a word, a choice)."""
    if len(stated) > _LONGEST:
        return False
    right, answer = tidy(truth), tidy(stated)
    if not right or not answer:
        return False
    if _SPACES.sub("", right) == _SPACES.sub("", answer):
        return True
    if _WORDS.fullmatch(right):
        return right.casefold() == answer.casefold()
    if len(letter := right.strip("() ")) == 1 and "A" <= letter <= "J":
        return option_letter(answer) == letter
    if {right[0], answer[0]} == {"(", "\\"} and "\\{" in (right[:2], answer[:2]):
        return False  # a pair or an open interval is not a set, although the library accepts it
    return _same_quantity(right, without_label(answer))


def _same_quantity(right: str, answer: str) -> bool:
    """Whether two answers are equal; units, currency and percent signs are removed if the right one is a number."""
    right, answer = without_money(right), without_money(answer)
    right_value, right_share = _without_percent(right)
    value, share = _without_percent(answer)
    number, unit = split_unit(right_value)
    if _NUMERIC.fullmatch(re.sub(r"\\[A-Za-z]+", "", number)):
        right_value, (value, stated_unit) = number, split_unit(value)
        if not units_agree(unit, stated_unit):
            return False
    if right_share == share:
        return _equal(right_value, value)
    # A percent sign on only one side is a unit (50 for 50%) or a factor (0.5 for 50%).
    factor = (_hundredth(right_value), value) if right_share else (right_value, _hundredth(value))
    return _equal(right_value, value) or _equal(*factor)


def _hundredth(text: str) -> str:
    return rf"\frac{{{rewrite_numbers(text)}}}{{100}}"


def _without_percent(text: str) -> tuple[str, bool]:
    bare = _PERCENT.sub("", text)
    return bare, bare != text


def _equal(right: str, answer: str) -> bool:
    if _INTEGER.fullmatch(right) and _INTEGER.fullmatch(answer):
        return int(right) == int(answer)
    expected, stated = _parsed(right), _parsed(answer)
    if not expected or not stated:
        return False
    return bool(
        verify(
            list(expected),
            list(stated),
            float_rounding=_decimals(expected[0]),
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    """Parses the complete text with sympy; an empty tuple if any part of it cannot be parsed."""
    text = rewrite_numbers(text)
    if not braces_balance(text) or _TWO_NUMBERS.search(text):
        return ()
    boxed = rf"\boxed{{{text}}}"
    config = [_EXTRACTION]
    return tuple(parse(boxed, config, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None))


def _decimals(expected: Any) -> int:
    """Returns the decimals that must agree: those of six significant digits, and at least six."""
    try:
        exponent = math.floor(math.log10(abs(float(expected))))
    except (TypeError, ValueError, OverflowError):  # 0, infinite, or not a number
        return _SIGNIFICANT_DIGITS
    return _SIGNIFICANT_DIGITS - 1 - min(exponent, -1)
