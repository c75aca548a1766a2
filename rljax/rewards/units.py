"""Splits units and nouns off a number: ``15 cm``, ``12 apples``, ``3\\,\\text{m}^2``."""

from __future__ import annotations

import re

# One name for each spelling of a unit. Other words are nouns, which any response may add.
_UNITS = {
    name: names.split()[0]
    for names in (
        "m meter metre", "cm centimeter centimetre", "mm millimeter millimetre", "km kilometer kilometre",
        "in inch inche", "ft foot feet", "yd yard", "mi mile", "g gram", "kg kilogram", "mg milligram",
        "lb pound", "oz ounce", "l liter litre", "ml milliliter millilitre", "gal gallon", "s sec second",
        "min minute", "h hr hour", "day", "week", "month", "year yr", "degree deg", "radian rad", "dollar usd",
        "cent", "euro", "rupee", "mph", "kmh kmph", "hz hertz", "n newton", "j joule", "w watt", "v volt",
        "a ampere amp", "ohm", "pa pascal", "k kelvin", "c celsius", "f fahrenheit", "unit",
    )
    for name in names.split()
}  # fmt: skip
# Words that are not units, because they change the number or begin a second statement.
_NO_UNIT = {
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "halves", "third", "thirds",
    "quarter", "quarters", "percent", "pi", "squared", "cubed", "sqrt", "root", "factorial", "mod", "modulo",
    "and", "or", "not", "but", "nor", "than", "more", "less", "fewer", "least", "most", "about",
    "approximately", "plus", "minus", "times", "over", "divided", "power", "if", "when", "where", "for", "with",
    "without", "is", "are", "was", "be", "then", "maybe", "perhaps", "either", "sin", "cos", "tan", "log", "ln",
    "exp", "infinity", "infty", "none", "wrong", "incorrect", "unless", "except", "the", "answer",
}  # fmt: skip
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_POWER = re.compile(r"\s*\^\s*(?:\{([23])\}|([23]))")
_WORD = r"[A-Za-z]+(?:\s*\^\s*(?:\{[23]\}|[23]))?"
_TAIL = re.compile(rf"(?:(?<=[\d)}}!])|(?<=\\pi))\s*({_WORD}(?:[\s/.]+{_WORD}){{0,3}}\s*)$")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*([CFK]?)$")


def split_unit(text: str) -> tuple[str, str | None]:
    """Returns the text before a unit or noun, and the unit in one spelling: "" for a noun, None without either."""
    if (match := _DEGREES.search(text)) is not None and match.start() > 0:
        return text[: match.start()], {"C": "c", "F": "f", "K": "k"}.get(match[1], "degree")
    match = _TAIL.search(text)
    if match is None:
        return text, None
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", match[1])]
    if any(word in _NO_UNIT for word in words):
        return text, None
    names = [_UNITS.get(word) or _UNITS.get(word.removesuffix("s")) for word in words]
    short = {word for name, word in zip(names, words, strict=True) if name is None and len(word) < 3}
    if short - _POWERS.keys():
        return text, None
    return text[: match.start()].strip(), _spelling(match[1], words, names)


def units_agree(one: str | None, other: str | None) -> bool:
    """Returns whether two units may be the same: one is missing or a noun, or both are equal. Nothing is converted."""
    return not one or not other or one == other


def _spelling(tail: str, words: list[str], names: list[str | None]) -> str:
    """Returns a unit in one spelling: ``m2`` for "square meters" or "m^2", ``mi/h`` for "miles per hour"."""
    power = _POWERS.get(words[0], "")
    parts = [name for word, name in zip(words, names, strict=True) if word != "per"][bool(power) :]
    if not parts or None in parts:
        return ""
    raised = _POWER.search(tail)
    power = power or (raised and (raised[1] or raised[2])) or ""
    return "/".join(part for part in parts if part) + power
