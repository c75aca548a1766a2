"""The grammars of the answers that a scorer of reasoning-gym executes as Python.

A scorer that calls ``sympy.parse_expr`` may execute a formula, and a scorer that calls ``eval`` may execute a literal.
Formulas and literals do nothing but compute a number or make a list, and the numbers of a formula stay small.
"""

from __future__ import annotations

import ast
import math
import re
import unicodedata

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
