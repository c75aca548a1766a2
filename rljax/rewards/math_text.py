"""Rewrites a mathematical answer so that math-verify reads it as a person does, and splits it into its parts.

A set, a tuple and a list without brackets have several parts. Units and nouns follow a number: ``15 cm``,
``12 apples``, ``3\\,\\text{m}^2``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from rljax.rewards.final_answer import closing_brace

_SYMBOLS = str.maketrans(
    {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}  # full-width forms
    | {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
        "÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
        "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "ℝ": r"\mathbb{R}", "√": r"\sqrt",
        "⟨": "(", "⟩": ")", "٫": ".", "٬": ",", "、": ",", "。": ".",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}", "\u200b": "", "\u2009": " ", "\u202f": " ",
        "\u00a0": " ", "\u3000": " ",
    }
)  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_DROPPED = re.compile(r"(?<!\\)\\(?:(?:displaystyle|limits|[bB]igg?|left|right|boldsymbol)(?![a-zA-Z])|!)")
_SPACES = re.compile(r"(?<!\\)\\(?:(?:q?quad)(?![a-zA-Z])|[,;: >])|~")
_FONTS = re.compile(r"\\(?:text(?:rm|bf|it|normal|sf)?|math(?:rm|bf|it|sf|normal)|mbox|operatorname|boxed|fbox)\s*\{")
_ROOT = re.compile(r"(\\sqrt\s*(?:\[[^\]]*\])?)\s*([0-9a-zA-Z])")
_BASE = re.compile(r"\(?([0-9A-Fa-f]*\d[0-9A-Fa-f]*)\)?\s*_\s*\{?\s*(\d+|[a-z]{3,})\s*\}?")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)")
_PERIOD = re.compile(r"(\d*)\.(\d*)\((\d+)\)")
_GOES_ON = re.compile(r"(\d{0,20})\.(\d{0,12}?)(\d{1,12}?)\3{1,12}(\d{0,12})\s*(?:\\ldots|\.\.\.|…)")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)")
_MIXED = re.compile(r"(?<![\d.^_{/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
_PLAIN_NAMES = re.compile(r"(?<![a-zA-Z\\])(pi|infinity|infty|sin|cos|tan|log|ln)(?![a-zA-Z])")
_SQRT = re.compile(r"\\?(?<![a-zA-Z])sqrt\s*\(([^()]*)\)")
_MONEY = re.compile(r"^(?:-?)(?:(?:US)?\\?\$|[€£¥₹]|Rs\.?|USD)\s*(?=[\d.])|(?<=^-)(?:\\?\$|[€£¥₹])|(?<=\d)\s*[€£¥₹]$")
_LABEL = re.compile(r"^(?:\(([A-Ja-j])\)[:.]?\s*|([A-J])[).:]\s+)(?=\S)")
_ASIDE = re.compile(
    r"(?<=\S)\s*\((?:(?<=\s\()[A-Za-z][A-Za-z ,'\-]{2,}|(?:since|because|as|where|for|when|if|note)\b.*)\)$"
)
# A condition on the letters behind a value: 2n + 1 for all n >= 1; 2 k pi, k in Z.
_CONDITION = re.compile(
    r"(?<=\S)(?:\s*,?\s+(?:for (?:all|any|every|each|some)|where|whenever)\s.*"
    r"|\s*,\s*[A-Za-z]\s*(?:\\in(?![a-z])|∈|is an? )\s*(?:\\math(?:bb|bf)\s*\{?\s*[ZN]\s*\}?|[ZNℤℕ]|integer).*)$"
)
_OPTION = re.compile(r"^(?:(?:option|choice|answer)\s+)?\(?([A-Ja-j])(?:[).:](?:\s.*)?|\s+[-–—]\s.*)?$", re.IGNORECASE)
_OPTIONS = re.compile(r"^\(?[A-J]\)?(?:(?:\s*(?:,|;|&|\\&)\s*|\s+and\s+|\s+|)\(?[A-J]\)?)+$")
_APPROXIMATELY = re.compile(r"^(?:\\approx|\\simeq|\\sim|≈|~|about\b|approximately\b|roughly\b)\s*", re.IGNORECASE)
_SAID = re.compile(r"^[A-Za-z][A-Za-z' ]*\b(?:is|are|equals|be)\s*:?\s+(?=\S*[\d\\$])")
_ALL_REALS = re.compile(
    r"^(?:all|the set of(?: all)?|set of(?: all)?) real numbers?$|^\\mathbb\s*\{?R\}?$|^all reals$", re.IGNORECASE
)
_CLOCK = re.compile(r"(?<=\d)\s*\b([ap])\.?\s?m\b\.?(?=\s|$)", re.IGNORECASE)
_ONE_NAME = {
    r"\varnothing": r"\emptyset", r"\langle": "(", r"\rangle": ")", r"\lbrace": r"\{", r"\rbrace": r"\}",
    r"\lbrack": "[", r"\rbrack": "]", r"\dots": r"\ldots", r"\cdots": r"\ldots", r"\dotsc": r"\ldots",
    r"\leq": r"\le", r"\geq": r"\ge", r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\lt": "<", r"\gt": ">",
}  # fmt: skip
_NAMES = re.compile(r"\\(?:" + "|".join(name[1:] for name in sorted(_ONE_NAME, reverse=True)) + r")(?![a-zA-Z])")


def tidy(answer: str) -> str:
    """Rewrites digits, signs and fractions in one spelling. Removes delimiters, fonts, spacing and the full stop."""
    text = "".join(str(unicodedata.decimal(c)) if unicodedata.category(c) == "Nd" else c for c in answer)
    text = re.sub(r"[⁰¹²³⁴-⁹⁻⁺]+", lambda found: "^{" + found[0].translate(_RAISED) + "}", text)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text)
    text = text.translate(_SYMBOLS).replace("\n", " ").strip().strip("*`").strip()
    text = _without_math_delimiters(text)
    text = join_digit_groups(re.sub(r"(?:\\\\\s*)+$", "", text).strip())
    text = _without_fonts(_SPACES.sub(" ", _DROPPED.sub("", text)))
    text = re.sub(r"\\{\s*\\}", r"\\emptyset", _NAMES.sub(lambda found: _ONE_NAME[found[0]], text))
    text = re.sub(r"\\\\\s*(?=\\end(?![a-zA-Z]))", "", text)  # an empty last row
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?<=\S)\s*[.,;:]+$", "", text) if not text.endswith("...") else text
    text = _CLOCK.sub(lambda found: f" {found[1].upper()}M", _ALL_REALS.sub(r"(-\\infty,\\infty)", text))
    text = _CONDITION.sub("", _ASIDE.sub("", text)).strip()
    is_set = re.fullmatch(r"\{[^()\[\]]*,[^()\[\]]*\}", text) and closing_brace(text, 1) == len(text) - 1
    return rf"\{{{text[1:-1]}\}}" if is_set else text


def rewrite_numbers(text: str) -> str:
    """Rewrites mixed numbers with a slash, repeating decimals and powers of ten as fractions and products.

    ``\\frac 1 2``, plain ``pi`` and ``sqrt(2)`` become LaTeX that the library reads.
    """
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _ROOT.sub(r"\1{\2}", _TIMES_TEN.sub(r" \\times ", text))
    text = _GOES_ON.sub(_going_on, _PERIOD.sub(_repeating, _REPEATING.sub(_repeating, text)))
    text = _MIXED.sub(_mixed, text)
    text = _SQRT.sub(r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*([+-]\d+(?:\.\d+)?)", r"^{\1}", text)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    return _PLAIN_NAMES.sub(lambda m: "\\" + {"infinity": "infty"}.get(m[1], m[1]), text)


def without_money(text: str) -> str:
    """Removes a currency sign before or after a number."""
    return _MONEY.sub(lambda m: "-" if m[0].startswith("-") else "", text)


def split_label(text: str) -> tuple[str, str]:
    """Returns (the letter of a choice, its value): ``(C) 42`` gives ("C", "42"); the letter is "" without one."""
    found = _LABEL.match(text)
    return ("", text) if found is None else ((found[1] or found[2]).upper(), text[found.end() :])


def option_letter(text: str) -> str | None:
    """Returns the letter of a multiple-choice answer in upper case; None for anything else.

    ``C``, ``(C)``, ``C. 42``, ``C - 42`` and ``option C`` are such answers.
    """
    match = _OPTION.match(text)
    return match[1].upper() if match else None


def option_letters(text: str) -> set[str] | None:
    """Returns the letters of an answer with several choices, such as ``B, D`` or ``BD``; None for anything else."""
    return set(re.findall("[A-J]", text)) if _OPTIONS.match(text) else None


def split_base(text: str) -> tuple[str, str]:
    """Returns (the digits, the base) of a number such as ``204_5``; the base is "" where none is written."""
    found = _BASE.fullmatch(text)
    return (text, "") if found is None else (found[1], found[2])


def without_words(text: str) -> str:
    """Removes the words and signs in front of a value, as in "The value is 42"."""
    return _APPROXIMATELY.sub("", _SAID.sub("", text))


def braces_balance(text: str) -> bool:
    """Returns whether the braces of a text are balanced."""
    return closing_brace(text + "}", 0) == len(text)


def _without_math_delimiters(text: str) -> str:
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    # One dollar sign is money; a pair delimits mathematics.
    bare = re.sub(r"(?<!\\)\$", "", text)
    return bare if (len(text) - len(bare)) % 2 == 0 else text


def _without_fonts(text: str) -> str:
    while (match := _FONTS.search(text)) is not None:
        end = closing_brace(text, match.end())
        if end is None:
            return text
        text = f"{text[: match.start()]} {text[match.end() : end].strip()} {text[end + 1 :]}"
    return text


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = (int(part) for part in match.groups())
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match[1] or "0", match[2], match[3]
    value = Fraction(int(whole + fixed + period) - int(whole + fixed), 10 ** len(fixed) * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _going_on(match: re.Match[str]) -> str:
    """Rewrites 0.1666... as a fraction by its repeating digits. A match without a repetition stays as it is."""
    whole, fixed, period, rest = match[1], match[2], match[3], match[4]
    if not period.startswith(rest):
        return match[0]
    return _REPEATING.sub(_repeating, rf"{whole or 0}.{fixed}\overline{{{period}}}")


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


def _spelling(tail: str, words: list[str], names: list[str | None]) -> str:
    """Returns a unit in one spelling: ``m2`` for "square meters" or "m^2", ``mi/h`` for "miles per hour"."""
    power = _POWERS.get(words[0], "")
    parts = [name for word, name in zip(words, names, strict=True) if word != "per"][bool(power) :]
    if not parts or None in parts:
        return ""
    raised = _POWER.search(tail)
    power = power or (raised and (raised[1] or raised[2])) or ""
    return "/".join(part for part in parts if part) + power


_BRACKETS = {"(": ")", "[": "]", r"\{": r"\}"}
_BRACES = {"{": "}"}  # group symbols in LaTeX; nothing is written for them
_TOKEN = re.compile(r"\s(?:and|or)\s|\\\\|\\[{}]|\\[a-zA-Z]+|\\\S|.", re.DOTALL)
_SEPARATORS = {",", ";", r"\\", "and", "or"}
_PLUS_MINUS, _MINUS_PLUS = re.compile(r"\\pm(?![a-zA-Z])"), re.compile(r"\\mp(?![a-zA-Z])")
_VARIABLE = re.compile(r"^([A-Za-z](?:_\{?\w+\}?|'|\([a-z]\))?)\s*=(?!=)\s*(?=\S)")
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
    """Returns the outer form of an answer that ``tidy`` has cleaned."""
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
    found = _VARIABLE.match(text)
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
