"""Rewrites a mathematical answer so that math-verify reads it as a person does."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from rljax.rewards.final_answer import closing_brace

_SYMBOLS = str.maketrans(
    {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}  # full-width forms
    | {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
        "÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
        "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "ℝ": r"\mathbb{R}", "√": r"\sqrt",
        "⟨": "(", "⟩": ")", "٫": ".", "٬": ",", "、": ",", "。": ".",
        "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}", "\u200b": "", "\u2009": " ", "\u202f": " ",
        "\u00a0": " ", "\u3000": " ",
    }
)  # fmt: skip
_DROPPED = re.compile(r"(?<!\\)\\(?:(?:displaystyle|limits|[bB]igg?|left|right|boldsymbol)(?![a-zA-Z])|!)")
_SPACES = re.compile(r"(?<!\\)\\(?:(?:q?quad)(?![a-zA-Z])|[,;: >])|~")
_FONTS = re.compile(r"\\(?:text(?:rm|bf|it|normal|sf)?|math(?:rm|bf|it|sf|normal)|mbox|operatorname|boxed|fbox)\s*\{")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)")
_MIXED = re.compile(r"(?<![\d.^_{/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_THOUSANDS = re.compile(r"(?<![\d.,(\[{])\d{1,3}(?:(?:,|\{,\}|\\,| )\d{3})+(?![\d,])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
_PLAIN_NAMES = re.compile(r"(?<![a-zA-Z\\])(pi|infinity|infty|sin|cos|tan|log|ln)(?![a-zA-Z])")
_SQRT = re.compile(r"\\?(?<![a-zA-Z])sqrt\s*\(([^()]*)\)")
_MONEY = re.compile(r"^(?:-?)(?:\\?\$|[€£¥₹])\s*(?=[\d.])|(?<=^-)(?:\\?\$|[€£¥₹])")
_LABEL = re.compile(r"^\(([A-Ja-j])\)[:.]?\s*(?=\S)")
_ASIDE = re.compile(r"(?<=\S)\s+\([A-Za-z][A-Za-z ,'\-]{2,}\)$")
_OPTION = re.compile(r"^\(?([A-Ja-j])(?:[).:](?:\s.*)?)?$")


def tidy(answer: str) -> str:
    """Rewrites digits, signs and fractions in one spelling; removes delimiters, fonts, spacing and full stop."""
    text = "".join(str(unicodedata.decimal(c)) if unicodedata.category(c) == "Nd" else c for c in answer)
    text = text.translate(_SYMBOLS).replace("\n", " ").strip().strip("*`").strip()
    text = _without_math_delimiters(text)
    text = _THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    text = _without_fonts(_SPACES.sub(" ", _DROPPED.sub("", text)))
    text = text.replace(r"\varnothing", r"\emptyset").replace(r"\langle", "(").replace(r"\rangle", ")")
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?<=\S)\s*[.,;:]+$", "", text) if not text.endswith("...") else text
    return _ASIDE.sub("", text).strip()


def rewrite_numbers(text: str) -> str:
    """Rewrites mixed numbers with a slash, repeating decimals and powers of ten as fractions and products.

    ``\\frac 1 2``, plain ``pi`` and ``sqrt(2)`` become LaTeX that the library reads.
    """
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _REPEATING.sub(_repeating, text)
    text = _MIXED.sub(_mixed, text)
    text = _SQRT.sub(r"\\sqrt{\1}", text)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    return _PLAIN_NAMES.sub(lambda m: "\\" + {"infinity": "infty"}.get(m[1], m[1]), text)


def without_money(text: str) -> str:
    """Removes a leading currency sign."""
    return _MONEY.sub(lambda m: "-" if m[0].startswith("-") else "", text)


def without_label(text: str) -> str:
    """Removes the letter of a choice before its value, as in ``(C) 42``."""
    return _LABEL.sub("", text)


def option_letter(text: str) -> str | None:
    """Returns the letter of a multiple-choice answer, ``C``, ``(C)`` or ``C. 42``, in upper case; otherwise None."""
    match = _OPTION.match(text)
    return match[1].upper() if match else None


def braces_balance(text: str) -> bool:
    """Whether every brace of the text is closed."""
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
