"""Splits an answer into its parts: a set, a tuple, a list without brackets, or one value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_BRACKETS = {"(": ")", "[": "]", r"\{": r"\}"}
_BRACES = {"{": "}"}  # group symbols in LaTeX; nothing is written for them
_TOKEN = re.compile(r"\s(?:and|or)\s|\\\\|\\[{}]|\\[a-zA-Z]+|\\\S|.", re.DOTALL)
_SEPARATORS = {",", ";", r"\\", "and", "or"}
_PLUS_MINUS, _MINUS_PLUS = re.compile(r"\\pm(?![a-zA-Z])"), re.compile(r"\\mp(?![a-zA-Z])")
_LABEL = re.compile(r"^([A-Za-z](?:_\{?\w+\}?|'|\([a-z]\))?)\s*=(?!=)\s*(?=\S)")
_SYSTEM = re.compile(r"^\\begin\s*\{(cases|aligned|array|gathered)\}(?:\s*\{[lcr|]*\})?(.*)\\end\s*\{\1\}$", re.DOTALL)
_DIGIT_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_TIGHT_COMMA = re.compile(r"(?<=\d)(?:,|\{,\})\\!\s*(?=\d{3}(?!\d))")  # 10,\!080 is one number, as MATH writes it
_SPACED_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|\\[,;:! ]|~| )\d{3})+(?![\d,])")


class AnswerForm(NamedTuple):
    """The outer form of an answer."""

    kind: str  # "set", "tuple" (an interval, too), "list" for parts without brackets, or "one" for a single value
    brackets: str  # the opening and the closing bracket of a tuple, such as ``"[)"``; empty for other kinds
    items: tuple[str, ...]  # the parts as text; parts with names stand in the order of the names
    names: tuple[str, ...] = ()  # the letter in front of each part (x = 1), if every part has a letter of its own


def form_of(text: str) -> AnswerForm:
    """Returns the outer form of an answer that ``math_text.tidy`` has cleaned."""
    system = _SYSTEM.match(text)
    if system is not None:
        return _labelled("list", split(system[2].replace("&", "")))
    opening = next((each for each in (r"\{", "(", "[") if text.startswith(each)), "")
    if opening and (end := _closing(text)) is not None:
        inside, closing = text[len(opening) : end], text[end:]
        items = split(inside)
        if opening == r"\{" and closing == r"\}":
            return _labelled("set", items)
        if len(items) > 1 and closing in (")", "]") and opening != r"\{":
            return AnswerForm("tuple", opening + closing, tuple(items))
        return AnswerForm("one", "", (text,))
    return _labelled("list", expanded(split(text)))


def expanded(items: Sequence[str]) -> list[str]:
    """Returns the parts with each ``\\pm`` written out as two parts, the upper signs first."""
    written: list[str] = []
    for item in items:
        if _PLUS_MINUS.search(item) is None:
            written.append(item)
            continue
        for plus, minus in (("+", "-"), ("-", "+")):
            signed = _MINUS_PLUS.sub(minus, _PLUS_MINUS.sub(plus, item))
            written.append(signed.strip().removeprefix("+").strip())
    return written


def split(text: str) -> list[str]:
    """Splits at commas, semicolons, line ends, "and" and "or" that are outside all brackets."""
    pieces, start = [], 0
    for at, token, depth in _tokens(text):
        if depth == 0 and token.strip() in _SEPARATORS:
            pieces.append(text[start:at])
            start = at + len(token)
    pieces.append(text[start:])
    return [part for piece in pieces if (part := piece.strip())]


def join_digit_groups(text: str) -> str:
    """Writes 1,000 as 1000. Inside brackets a comma separates two numbers, unless a group begins with 0."""
    text = _SPACED_GROUPS.sub(lambda found: re.sub(r"\D", "", found[0]), _TIGHT_COMMA.sub("", text))
    depths = {at: depth for at, _, depth in _tokens(text, _BRACKETS)}

    def joined(found: re.Match[str]) -> str:
        inside = depths.get(found.start(), 0) > 0
        if inside and not any(group.startswith("0") for group in found[0].split(",")[1:]):
            return found[0]
        return found[0].replace(",", "")

    return _DIGIT_GROUPS.sub(joined, text)


def matches(right: Sequence[str], stated: Sequence[str], *, in_order: bool, equal: Callable[[str, str], bool]) -> bool:
    """Returns whether the parts of two answers agree one to one, by ``equal(right, stated)``."""
    if len(right) != len(stated):
        return False
    if in_order:
        return all(map(equal, right, stated))
    left = list(stated)
    for part in right:
        if (found := next((each for each in left if equal(part, each)), None)) is None:
            return False
        left.remove(found)
    return True


def without_label(text: str) -> tuple[str, str]:
    """Returns (the name in front of a value, the value): ``x = 3`` gives ("x", "3")."""
    found = _LABEL.match(text)
    if found is None or "=" in text[found.end() :]:
        return "", text
    return found[1], text[found.end() :]


def _labelled(kind: str, items: Sequence[str]) -> AnswerForm:
    """Returns the form of a set or a list. The names in front of its parts are taken off if all parts have one."""
    if kind == "list" and len(items) < 2:
        return AnswerForm("one", "", tuple(items) or ("",))
    pairs = [without_label(item) for item in items]
    if not all(label for label, _ in pairs):
        return AnswerForm(kind, "", tuple(items))
    pairs.sort(key=lambda pair: pair[0])
    letters = tuple(label.partition("_")[0] for label, _ in pairs)  # x_1 and x_2 are two values of one letter
    return AnswerForm(
        kind, "", tuple(value for _, value in pairs), letters if len(set(letters)) == len(letters) else ()
    )


def _tokens(text: str, pairs: Mapping[str, str] = _BRACKETS | _BRACES) -> list[tuple[int, str, int]]:
    """Returns (position, token, depth of brackets) of each token. An opening bracket has the depth outside of it."""
    tokens, depth, closers = [], 0, set(pairs.values())
    for found in _TOKEN.finditer(text):
        token = found[0]
        if (token in closers or token == r"\end") and depth:
            depth -= 1
        tokens.append((found.start(), token, depth))
        if token in pairs or token == r"\begin":
            depth += 1
    return tokens


def _closing(text: str) -> int | None:
    """Returns the position of the bracket that closes the first one if it ends the text, else None."""
    tokens = _tokens(text)
    end = next((at for at, token, depth in tokens[1:] if depth == 0 and token in (")", "]", r"\}")), None)
    return end if end == tokens[-1][0] else None
