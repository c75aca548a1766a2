"""Reads the metrics in console output of verl, TRL, slime or Miles, and joins the lines that a terminal has wrapped.

verl writes ``step:1 - name:1.5 - name:2.0``. The others write a dictionary without inner ones, ``{'name': 1.5}``; slime
and Miles put ``rollout 3:`` or ``perf 3:`` in front of it. A copy of a terminal may break such a record anywhere, also
inside a number, and may lose the spaces there. So records are joined and compared without any spaces.
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
_VALUE = re.compile(r"""(?: - |['"])([\w./@-]+)['"]?: ?['"]?(?:[\w.]+\()?(-?\d[\d.]*(?:e[+-]?\d+)?|nan)\b""")

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_OPENING = re.compile(r"""\{(?=['"]|\s*$)""")
_NUMBER = r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)"
# The records without spaces: what is whole of them, and then the end of the record, or what is begun.
_ITEM = re.compile(rf"-([^:]+):((?:{_NUMBER}|[\w.]+\({_NUMBER}\)|None|True|False)(?=-|$))")
_ITEMS = re.compile(rf"(?P<whole>step:\d+(?:{_ITEM.pattern})*+)(?P<begun>-[^:]*(?::[-+.\w]*(?:\([-+.\w]*\)?)?)?)?$")
_QUOTED, _OPEN = r"""(?:'[^']*+'|"[^"]*+")""", r"""(?:'[^']*+|"[^"]*+)"""
_PAIR = rf"{_QUOTED}:(?:{_QUOTED}|[-+.\w]++(?:\([^(){{}}]*+\))?)"
_BEGUN = rf"(?:{_OPEN}|{_QUOTED}(?::(?:{_QUOTED}|{_OPEN}|[-+.\w]*+(?:\([^(){{}}]*+\)?)?)?)?)"
_DICTIONARY = re.compile(rf"(?P<whole>\{{(?:{_PAIR},)*+)(?:(?P<end>(?:{_PAIR})?\}})|(?:{_BEGUN})?$)")
_LONGEST_VALUE = 4  # the most lines of a name with its number
_MOST_LINES = 500  # the most lines of a record
_LOST_SPACES = 2  # the most spaces that a copy of a line may lack at its ends


class _Record(NamedTuple):
    """A record in the text up to some position."""

    text: str  # what is whole of it, in a form that ``_VALUE`` reads
    values: int  # the values before the last one
    is_whole: bool  # whether the text may end here
    is_closed: bool  # whether it must end here


def console_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the metrics of console output: one row for each line that has any.

    Raises ConfigError, which names the line, if a line seems to be wrapped and its parts cannot be joined for certain.
    """
    lines = _COLOUR.sub("", path.read_text("utf-8", errors="replace")).splitlines()
    rows: list[dict[str, Any]] = []
    longest, place = max(map(len, lines), default=0), 0
    while place < len(lines):
        text, last = _with_step(lines, place)
        text, last = _joined(path, lines, last, text, longest)
        step = _STEP.search(text)
        if values := dict(_VALUE.findall(text)):
            rows.append(values | ({"step": step[1] or step[2]} if step else {}))
        place = last + 1
    return rows


def _with_step(lines: Sequence[str], place: int) -> tuple[str, int]:
    """Returns a line and its index, or the line and the next one as one text if the mark of a step is cut there."""
    line, after = lines[place], "".join(lines[place + 1 : place + 2])
    for text in () if _STEP.search(line) else (line + after, f"{line} {after}"):
        if (mark := _STEP.search(text)) and mark.start() < len(line) < mark.end():
            return text, place + 1
    return line, place


def _joined(path: Path, lines: Sequence[str], place: int, line: str, longest: int) -> tuple[str, int]:
    """Returns the whole text of the record that begins in ``line``, and the index of its last line.

    ``line`` ends with the line at index ``place``, and the file's longest line has the length ``longest``. A line
    without a record is returned as it is. Raises ConfigError if a record is cut and its next line does not fit. It is
    raised, too, if the record may end in a number that the next line may continue, and the line may be a wrapped one.
    """
    if (start := _start(line)) is None or (record := _record(text := _squeezed(line[start:]))) is None:
        return line, place
    found, last = line if record.is_whole else line[:start] + record.text, place
    for at in range(place, len(lines) - 1):
        after = lines[at + 1]
        is_end_of_name = text.endswith(("_", "/")) and after.startswith("step:")  # of training/global_step, for example
        is_other = not after.strip() or (_start(after) is not None and not is_end_of_name)
        if is_other or record.is_closed or at >= min(last + _LONGEST_VALUE, place + _MOST_LINES):
            break
        longer = _record(text + _squeezed(after))
        is_more = longer is not None and (longer.is_whole or longer.values > record.values)
        is_wrapped = longer is None and _VALUE.search(after) is not None and not text.endswith(",")
        if record.is_whole:
            is_wrapped = longer is not None and longer.values == record.values
            is_short = last == place and len(lines[at]) + _LOST_SPACES < longest
            if not is_more or len(lines[at]) + _LOST_SPACES < len(after) or (is_wrapped and is_short):
                break
        if is_wrapped:
            said = f"{path}: lines {at + 1} and {at + 2} seem to be one line that was wrapped inside a number or a name"
            raise ConfigError(f"{said}: copy the log from its file, or from a wider terminal")
        if longer is None:
            break
        text, record = text + _squeezed(after), longer
        if is_more:
            found, last = line[:start] + record.text, at + 1
    return found, last


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _start(text: str) -> int | None:
    """Returns the start of a record: of verl's ``step:``, or else of the first dictionary that is not closed."""
    mark = _STEP.search(text)
    if mark is not None and mark[1]:
        return mark.start()
    openings = [opening.start() for opening in _OPENING.finditer(text)]
    records = ((at, _record(_squeezed(text[at:]))) for at in openings)
    is_open = (at for at, record in records if record is None or not record.is_closed)
    return next(is_open, next(iter(openings), None))


def _record(text: str) -> _Record | None:
    """Returns the record at the start of a text without spaces; None if it has none of the forms of this module."""
    if found := _ITEMS.match(text):
        is_begun, items = found["begun"] is not None, _ITEM.findall(found["whole"])
        spaced = _ITEM.sub(r" - \1:\2", found["whole"])
        return _Record(spaced, len(items) + is_begun - 1, not is_begun, False)
    if found := _DICTIONARY.match(text):
        is_closed = found["end"] is not None
        return _Record(text if is_closed else found["whole"], found["whole"].count(","), is_closed, is_closed)
    return None
