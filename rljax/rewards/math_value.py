"""Parses answers, and compares kinds that need more than an absolute tolerance: exact numbers, formulas, solutions."""

from __future__ import annotations

import functools
import re
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse

from rljax.rewards.math_text import braces_balance, rewrite_numbers

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
    """Parses the complete text with sympy; an empty tuple if any part of it cannot be parsed."""
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
