"""Finds the final answer in a response: an ``Answer:`` line, a box, a ``####`` line or an ``<answer>`` tag."""

from __future__ import annotations

import re

_ANSWER_LINE = re.compile(
    r"(?:\banswer|答案|(?:答|解)(?=[:：]))(?:[ \t]+is|[是为])?[ \t*_`]*[:：][*_`]*", re.IGNORECASE
)
_ANSWER_IS = re.compile(r"(?:\banswer[ \t]+(?:is|=)|答案[是为])[ \t*_`]*", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]*####[ \t]*(?=\S.*\s*\Z)", re.MULTILINE)  # the last line of GSM8K's answers
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=\\[a-zA-Z]|[^\s{}$\\]))")
_LABEL_IN_BOX = re.compile(
    rf"(\\text[a-z]*\s*\{{\s*)?(?:\b(?:the|final)\s+){{0,2}}{_ANSWER_LINE.pattern}\s*(?(1)\}})", re.IGNORECASE
)
# The text that may stand between boxes of one answer: x = \boxed{1} or x = \boxed{2}.
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;.]|\\[,;! ()\[\]]|\\quad|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\b[a-zA-Z]\s*=)*"
)
_ESCAPED_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WORD = re.compile(r"(?:\\[a-zA-Z]+|[^\s$\\])+")
_LAST_BOXES = 50  # a response may open thousands of boxes, and the end of each must be found
_DISPLAYS = (("$$", "$$"), ("\\[", "\\]"))
_ONLY_DELIMITERS = re.compile(r"(?:\$\$?|\\\]|\\\)|\\end\{(?:equation|align|gather)\*?\}|[.*\s])*")
_SENTENCE_END = re.compile(r"[.。](?=\s+[A-Z\\$]|\s*$)")
_PROSE = re.compile(r"(?<![\\a-zA-Z])(?!(?:pi|sqrt|sin|cos|tan|log|ln)\b)[a-zA-Z]{2,}")


def final_answer(response: str) -> str | None:
    """Returns the text of the final answer as written, or None when none is stated.

    Only the text after the last ``</think>`` counts, if there is one. Of these four the last one in the text is taken:

    - the last ``Answer:`` line (its rest, or the next line when that is empty);
    - the last ``\\boxed{}`` that is not empty; boxes with only "and", "or", "x =" and punctuation between them are one
      answer;
    - a last line with ``####``;
    - the last ``<answer>`` tag.

    A box that says "Answer: 42" holds 42. A response whose last box is never closed was cut off and states nothing. A
    response with none of the four may state its answer as "the answer is ...", or as a last line that is only a
    formula. Numbers in other text do not count.
    """
    text = _without_labels(response.rsplit("</think>", 1)[-1])
    tag_at, tag = last_tag(text)
    stated = [_statement_after(_ANSWER_LINE, text), _statement_after(_HASHES, text), (tag_at, tag), last_boxes(text)]
    place, answer = max((each for each in stated if each[1] is not None), default=(-1, None), key=lambda each: each[0])
    box = next(reversed(list(_BOX.finditer(text))), None)
    is_open = box is not None and box[0].endswith("{") and closing_brace(text, box.end()) is None
    if box is not None and is_open and box.start() > place:
        return None
    if answer is None:
        return _statement_after(_ANSWER_IS, text)[1] or _bare_last_line(text)
    if place == tag_at:
        return final_answer(answer) or answer
    return answer


def _without_labels(text: str) -> str:
    """Removes ``Answer:`` and ``\\text{Answer: }`` in boxes."""
    for _, start, end in reversed(_closed_boxes(text)):
        text = text[:start] + _LABEL_IN_BOX.sub("", text[start:end]) + text[end:]
    return text


def last_tag(text: str) -> tuple[int, str | None]:
    """Returns (start of the last ``<answer>`` tag that is not empty, its content); (-1, None) without one."""
    tags = [each for each in _TAG.finditer(text) if each[1].strip()]
    return (tags[-1].start(), tags[-1][1].strip()) if tags else (-1, None)


def _statement_after(opening: re.Pattern[str], text: str) -> tuple[int, str | None]:
    """Returns (start of the last match of ``opening``, the statement after it); (-1, None) without one."""
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


def last_boxes(text: str) -> tuple[int, str | None]:
    """Returns (start of the last box, contents of this box and of the boxes joined to it); (-1, None) without one."""
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
        if match[0].endswith("{"):
            end = closing_brace(text, match.end())
        else:  # \boxed 42: one word
            end = match.end() + len(_WORD.match(text, match.end())[0])  # type: ignore[index]
        if end is not None:
            boxes.append((match.start(), match.end(), end))
    return boxes


def closing_brace(text: str, start: int) -> int | None:
    """Returns the position of the brace that closes the one just before ``start``, or None; skips escaped braces."""
    depth = 1
    for match in _ESCAPED_OR_BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def _bare_last_line(text: str) -> str | None:
    lines = [line for line in text.splitlines() if not _ONLY_DELIMITERS.fullmatch(line)]
    if not lines or _PROSE.search(lines[-1]):
        return None
    return lines[-1].strip()
