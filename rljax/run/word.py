"""The word of a run: what ``rljax diagnose`` says of its last rows, while it runs."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable

from rljax.diagnose.causes import judge_cause
from rljax.diagnose.course import read_course
from rljax.diagnose.evidence import Declared, Facts
from rljax.diagnose.signals import read_signals
from rljax.diagnose.tables import cross
from rljax.record.rows import Row
from rljax.rollout.kinds import can
from rljax.run.config import Config

CAUSE, CONFIDENCE = "diagnosis/cause", "diagnosis/confidence"
"""The keys of a row: the cause, and how sure it is ("" for ``healthy`` and ``cannot_tell``)."""
EVERY = 25
"""The steps from one word to the next. A word about 200 rows of 164 columns takes 21 to 25 ms on a CPU."""
_ROWS = 200  # the most rows that a word is about


def declared_by(config: Config) -> Declared:
    """Returns the dtypes and forms of both sides that a configuration declares."""
    rollout = config.rollout
    return Declared(
        config.precision.compute_dtype,
        rollout.dtype,
        rollout.engine_form.label,
        can(rollout.engine, "is_exact"),
        ", ".join(f"{name} {value}" for name, value in rollout.inject.given.items() if name != "seed"),
    )


class Word:
    """The diagnosis of the last rows, which is recorded every ``EVERY`` steps and printed when it changes."""

    def __init__(self, declared: Declared) -> None:
        """Starts without rows. ``declared`` has the dtypes and forms of both sides."""
        self._declared, self._rows, self._said = declared, deque[Row](maxlen=_ROWS), ""

    def read(self, rows: Iterable[Row]) -> None:
        """Takes over the rows that the run has recorded before this process."""
        self._rows.extend(rows)
        self._said = next((row[CAUSE] for row in reversed(self._rows) if row.get(CAUSE)), "")

    def __call__(self, row: Row) -> Row:
        """Takes the row of a step, and returns the keys ``CAUSE`` and ``CONFIDENCE`` for it if a word is due."""
        self._rows.append(row)  # one that could not be written comes again, and counts once by its step
        if row["step"] % EVERY:
            return {}
        log = read_signals(list(self._rows), ["rljax"])
        cause, findings = judge_cause(Facts(read_course(log), None, cross(log.signals, log.steps), self._declared))
        named = [finding for finding in findings if finding.cause == cause]
        sure, why = (named[0].confidence, f": {named[0].evidence}") if named else ("", "")
        if cause != self._said:
            print(f"\ndiagnosis: step {row['step']}: {cause}{f' ({sure})' if sure else ''}{why}", file=sys.stderr)
        self._said = cause
        return {CAUSE: cause, CONFIDENCE: sure}
