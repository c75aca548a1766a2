"""Finds the final answer in a response: DAPO's ``Answer:`` line or LaTeX's box, whichever comes later."""

from __future__ import annotations

import re

_ANSWER_LINE = re.compile(r"(?:\banswer|答案)(?:[ \t]+is)?[ \t*_`]*[:：][*_`]*", re.IGNORECASE)
_ANSWER_IS = re.compile(r"(?:\banswer[ \t]+(?:is|=)|答案[是为])[ \t*_`]*", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# The text that may stand between boxes of one answer: x = \boxed{1} or x = \boxed{2}.
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;.]|\\[,;! ()\[\]]|\\quad|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\b[a-zA-Z]\s*=)*"
)
_LAST_BOXES = 50  # a response may open thousands of boxes, and the end of each must be found
_DISPLAYS = (("$$", "$$"), ("\\[", "\\]"))
_ONLY_DELIMITERS = re.compile(r"(?:\$\$?|\\\]|\\\)|\\end\{(?:equation|align|gather)\*?\}|[.*\s])*")
_SENTENCE_END = re.compile(r"[.。](?=\s+[A-Z\\$]|\s*$)")
_PROSE = re.compile(r"(?<![\\a-zA-Z])(?!(?:pi|sqrt|sin|cos|tan|log|ln)\b)[a-zA-Z]{2,}")


def final_answer(response: str) -> str | None:
    """Returns the text of the final answer as written, or None without one.

    Only the text after the last ``</think>`` counts, if there is one. The answer is the later of two statements: the
    last ``Answer:`` line (its rest, or the next line if that is empty) and the last closed, non-empty ``\\boxed{}``.
    Boxes with only "and", "or", "x =" and punctuation between them are one answer. Without either statement, the answer
    may be in "the answer is ...", or in a last line that is only a formula. Numbers in other text do not count.
    """
    text = response.rsplit("</think>", 1)[-1]
    line_at, line = _statement_after(_ANSWER_LINE, text)
    box_at, box = _last_boxes(text)
    if line is not None or box is not None:
        return box if box is not None and box_at > line_at else line
    return _statement_after(_ANSWER_IS, text)[1] or _bare_last_line(text)


def _statement_after(opening: re.Pattern[str], text: str) -> tuple[int, str | None]:
    """Returns (start of the last opening, the statement after it)."""
    matches = list(opening.finditer(text))
    return (matches[-1].start(), _first_statement(text[matches[-1].end() :])) if matches else (-1, None)


def _first_statement(rest: str) -> str | None:
    """Returns a displayed formula, or the first line up to the end of its sentence."""
    rest = rest.lstrip(" \t\n*_`")
    for opening, closing in _DISPLAYS:
        if rest.startswith(opening) and (end := rest.find(closing, len(opening))) >= 0:
            return rest[len(opening) : end]
    line = rest.split("\n", 1)[0]
    full_stop = _SENTENCE_END.search(line)
    return (line[: full_stop.start()] if full_stop else line).strip() or None


def _last_boxes(text: str) -> tuple[int, str | None]:
    """Returns (start of the last box, contents of this box and of the boxes joined to it)."""
    boxes = [box for box in _closed_boxes(text) if text[box[1] : box[2]].strip()]
    if not boxes:
        return -1, None
    first = len(boxes) - 1
    while first and _BETWEEN_BOXES.fullmatch(text, boxes[first - 1][2] + 1, boxes[first][0]):
        first -= 1
    contents = list(dict.fromkeys(text[start:end].strip() for _, start, end in boxes[first:]))
    return boxes[-1][0], ", ".join(contents)


def _closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """Returns (start, start of the content, end of the content) of each outermost box, in order."""
    boxes: list[tuple[int, int, int]] = []
    for match in list(_BOX.finditer(text))[-_LAST_BOXES:]:
        if boxes and match.start() < boxes[-1][2]:
            continue
        end = closing_brace(text, match.end())
        if end is not None:
            boxes.append((match.start(), match.end(), end))
    return boxes


def closing_brace(text: str, start: int) -> int | None:
    """Returns the position of the brace that closes the one just before ``start``; escaped braces do not count."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
        at += 1
    return None


def _bare_last_line(text: str) -> str | None:
    lines = [line for line in text.splitlines() if not _ONLY_DELIMITERS.fullmatch(line)]
    if not lines or _PROSE.search(lines[-1]):
        return None
    return lines[-1].strip()
