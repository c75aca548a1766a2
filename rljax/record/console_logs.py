"""Reads the metrics in console output of other projects, and joins the lines that a terminal has wrapped.

verl writes ``step:1 - name:1.5 - name:2.0``. The others write a dictionary without inner ones, ``{'name': 1.5}``; slime
and Miles put ``rollout 3:`` or ``perf 3:`` in front of it, and SkyRL gives each pair a line. A copy of a terminal may
break such a line anywhere, also inside a number. The text alone decides what is one line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rljax.errors import ConfigError

# The step in a line of console output: ``step:3 - `` of verl, ``rollout 3: {`` and ``perf 3: {`` of slime and Miles.
_STEP = re.compile(r"\bstep:(\d+) - |\b(?:rollout|perf) (\d+): \{")
# A name and its number: ``- name:1.5``, ``'name': 1.5``, ``'name': '1.5'``, ``'name': np.float64(1.5)``.
_VALUE = re.compile(r"""(?: - |['"])([\w./@-]+)['"]?: ?['"]?(?:[\w.]+\()?(-?(?:\d[\d.]*(?:e[+-]?\d+)?|inf|nan))\b""")

# A learning rate that four digits after the point cannot hold.
_LOST_RATE = re.compile(r"(?:^|[/_])(?:lr|learning_rate) -?0\.0{2,}$")
# What Ray writes in front of each line, here before a pair of a dictionary that has a line for each pair.
_RAY = re.compile(r"^(?:\x1b\[\d+m)?\(\w+ pid=\d+[^)]*\)(?:\x1b\[0m)? (?=\s*['\"])")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)"
# One of verl's items, which " - " separates, and the beginning of one.
_ITEM = re.compile(rf"[^\s:][^:]*: ?(?:{_NUMBER}|[\w.]+\({_NUMBER}\)|None|True|False)\s*")
_BEGUN_ITEM = re.compile(r"[^:]*+(?:: ?[-+.\w]*+(?:\([-+.\w]*+\)?)?(?: -)?\s*)?")
_QUOTED = r"""(?:'[^']*+'|"[^"]*+")"""
_PAIR = rf"\s*+{_QUOTED}\s*+:\s*+(?:{_QUOTED}|[-+.\w]++(?:\([^(){{}}]*+\))?)\s*+"
_BEGUN = r"""(?:'[^']*+|"[^"]*+)"""
_BEGUN_PAIR = rf"(?:{_BEGUN}|{_QUOTED}\s*+(?::\s*+(?:{_QUOTED}|{_BEGUN}|[-+.\w]*+(?:\([^(){{}}]*+\)?)?)\s*+)?)"
_OPENING = re.compile(r"""\{(?=['"]|\s*$)""")
_LONGEST_VALUE = 4  # the most lines of a name with its number
_MOST_LINES = 500  # the most lines of a record
_LOST_SPACES = 2  # the most spaces that a copy of a line may lack at its ends
_DICTIONARY = re.compile(rf"\{{(?P<pairs>(?:{_PAIR},)*)(?:{_PAIR})?\}}")
_UNCLOSED = re.compile(rf"\{{(?P<pairs>(?:{_PAIR},)*)\s*(?:{_BEGUN_PAIR})?$")


class _Progress(NamedTuple):
    """The values of a record in the text up to some position."""

    values: int  # the values before the last one
    is_whole: bool  # whether the text may end here
    is_closed: bool  # whether it must end here


_NOTHING = _Progress(-1, False, False)


class _Joined(NamedTuple):
    """The lines of a log, after the lines of each record were joined."""

    lines: list[str]
    widths: set[int]  # the lengths of lines that were certainly wrapped
    doubtful: list[int]  # the places of lines that end in a number which the next line may continue


def console_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the metrics of console output, as texts by name: one row for each line that has any.

    Raises ConfigError, which names the line, if a line seems to be wrapped and its parts cannot be joined for certain.
    """
    rows: list[dict[str, Any]] = []
    for line in _whole_lines(path):
        step = _STEP.search(line)
        found = _VALUE.findall(_without_cut_number(line))
        if values := {name: text for name, text in found if not _LOST_RATE.search(f"{name} {text}")}:
            rows.append(values | ({"step": step[1] or step[2]} if step else {}))
    return rows


def _without_cut_number(line: str) -> str:
    """Returns a line without a number at its end if its dictionary is not closed. Digits of the number may be lost."""
    start = _start(line)
    is_cut = start is not None and line[start] == "{" and not _DICTIONARY.match(line, start)
    return line.rstrip("0123456789.e+-") if is_cut else line


def _whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file as they were before a terminal wrapped them. Raises ConfigError if they are unsure.

    A line may end in a whole number before a line of digits. It is joined if other lines were wrapped at its length. It
    is unsure if they were wrapped at another length, or if no line is longer.
    """
    lines = [_RAY.sub("", line) for line in path.read_text("utf-8", errors="replace").splitlines()]
    joined = _join(path, lines, set())
    widths, longest = joined.widths, max(map(len, lines), default=0)
    if widths and joined.doubtful:
        joined = _join(path, lines, widths)
    for place in joined.doubtful:
        if widths or len(lines[place]) == longest:
            raise _wrapped(path, place)
    return joined.lines


def _wrapped(path: Path, place: int) -> ConfigError:
    return ConfigError(
        f"{path}: lines {place + 1} and {place + 2} seem to be one line that was wrapped inside a number or a name: "
        "copy the log from its file, or from a wider terminal"
    )


def _join(path: Path, lines: Sequence[str], widths: set[int]) -> _Joined:
    """Joins the lines of each record. ``widths`` are the lengths at which lines are known to be wrapped."""
    joined = _Joined([], set(), [])
    place = 0
    while place < len(lines):
        text, last = lines[place], place
        if (whole := _with_step(lines, place)) is not None:
            joined.widths.add(len(text))
            text, last = whole, place + 1
        text, last = _record(path, lines, last, text, widths, joined)
        joined.lines.append(text)
        place = last + 1
    return joined


def _with_step(lines: Sequence[str], place: int) -> str | None:
    """Returns a line and the next one as one text if the mark of a step is cut between them; None otherwise."""
    line, after = lines[place], "".join(lines[place + 1 : place + 2])
    if _STEP.search(line):
        return None
    for text in (line + after, f"{line} {after}"):
        if (mark := _STEP.search(text)) and mark.start() < len(line) < mark.end():
            return text
    return None


def _record(
    path: Path, lines: Sequence[str], place: int, line: str, widths: set[int], joined: _Joined
) -> tuple[str, int]:
    """Returns the whole text of the record that begins in ``line``, and the index of its last line.

    ``line`` ends with the line at index ``place``. A line without a record is returned as it is. The lengths of wrapped
    lines are added to ``joined``, and so are doubtful places. Raises ConfigError if a record is cut and its next line
    does not fit.
    """
    text, last = _COLOUR.sub("", line), place
    if (start := _start(text)) is None or (progress := _progress(text, start)) is None:
        return line, last
    for at in range(place, len(lines) - 1):
        after = _COLOUR.sub("", lines[at + 1])
        is_end_of_name = text.endswith(("_", "/")) and after.startswith("step:")  # of training/global_step, for example
        is_other = not after.strip() or (_start(after) is not None and not is_end_of_name)
        if is_other or progress.is_closed or at >= min(last + _LONGEST_VALUE, place + _MOST_LINES):
            break
        is_separator = after.strip() == "-"  # of verl's items
        joined_texts = [f"{text} {after}"] if is_separator else [text + after, f"{text} {after}"]
        longer = max(joined_texts, key=lambda option: _progress(option, start) or _NOTHING)
        found = _progress(longer, start)
        is_more = found is not None and (found.is_whole or found.values > progress.values or is_separator)
        if progress.is_whole and (not is_more or len(lines[at]) + _LOST_SPACES < len(after)):
            break
        if found is None:
            if _VALUE.search(after) and not text.rstrip().endswith(","):
                raise _wrapped(path, at)
            break
        is_unsure = progress.is_whole and found.values == progress.values and not is_separator
        if is_unsure and len(lines[at]) not in widths:
            joined.doubtful.append(at)
            break
        text, progress = longer, found
        if is_more:
            joined.widths.update(map(len, lines[last : at + 1]))
            line, last = text, at + 1
    return line, last


def _start(text: str) -> int | None:
    """Returns the start of a record: of verl's ``step:``, or else of the first dictionary that is not closed."""
    mark = _STEP.search(text)
    if mark is not None and mark[1]:
        return mark.start()
    openings = [opening.start() for opening in _OPENING.finditer(text)]
    return next((at for at in openings if not _DICTIONARY.match(text, at)), openings[0] if openings else None)


def _progress(text: str, start: int) -> _Progress | None:
    """Returns the values of the record that begins at ``start``; None if it has none of the forms of this module."""
    if text[start] == "{":
        closed = _DICTIONARY.match(text, start)
        found = closed or _UNCLOSED.match(text, start)
        return found and _Progress(found["pairs"].count(","), closed is not None, closed is not None)
    _, *items, last = text[start:].split(" - ")
    if not all(map(_ITEM.fullmatch, items)) or not _BEGUN_ITEM.fullmatch(last):
        return None
    return _Progress(len(items), _ITEM.fullmatch(last) is not None, False)
