"""Watches the responses of each step, and says in one line if they do not belong to their prompts or tokens.

There are three signs. Responses to different prompts are equal to the bit. Responses have one log-probability at all
their tokens. The mean of abs(log-ratio) jumps. A step reads the sampler's numbers, which are on the host. The trainer's
are fetched only at a jump, or for the second sign. A line has the cause that ``rljax diagnose`` names.

The *word* of a run is what ``rljax diagnose`` says of its last rows, while it runs.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rljax.compare.verdict import judge
from rljax.diagnose.causes import OF_VERDICTS, judge_cause
from rljax.diagnose.course import read_course
from rljax.diagnose.evidence import Declared, Facts, cross
from rljax.diagnose.signals import read_signals
from rljax.mismatch.signs import FILL_SPREAD, find_constants, find_repeats, is_no_chance
from rljax.record.dump_facts import pair_of
from rljax.record.rows import Row
from rljax.rollout.kinds import can
from rljax.run.config import Config
from rljax.trainer.packing import TrainSequence
from rljax.trainer.update import TrainerValues

REPEATED, CONSTANT, JUMP = "rollout/repeated_responses", "rollout/constant_responses", "mismatch/jump"
"""The keys of a row: the numbers of responses with the first and the second sign, and 1 for a jump, else 0."""
_GAPS = ("mismatch_numerics/logprob_abs_diff_mean", "mismatch/logprob_abs_diff_mean")  # the first has no drift in it
_SMALLEST, _TIMES = 0.02, 20.0  # a jump is above the first (nats), and above so many times the median of earlier rows
_ALWAYS = 0.5  # nats; without earlier rows this is a jump, if no drift of the policy can be in it
_SHARE = 0.25  # the least share of the responses that is a fault, where a few may have a sign in a healthy run
_SIGNATURES = {
    "constant_fill": "a constant in the place of log-probabilities",
    "off_by_one": "log-probabilities shifted by one token",
    "other_rows": "log-probabilities permuted between responses",
    "other_base": "scaled log-probabilities, as logarithms to another base",
    "temperature": "scaled log-probabilities, as at another temperature",
}
_LARGE = 8  # the fewest equal responses that are a sign at a jump, even if they are short
_LIKE_REPEATS = ("", "constant_fill", "temperature")  # the signatures that equal short responses may have
_LIKE_DRIFT = ("", "temperature")  # the signatures that older weights may have, too
_NO_SIGNATURE = "neither constant, shifted by one, scaled nor permuted; replies of other prompts or weights look so"


class Watch:
    """The watch over the responses of a run. It knows the mean of abs(log-ratio) of the earlier rows without a sign."""

    def __init__(self) -> None:
        """Starts without earlier rows."""
        self._earlier: defaultdict[int, list[float]] = defaultdict(list)  # by the rounded staleness
        self._fault, self._steps = "", 0  # the kind of the last step's fault, and how many steps in a row have had it

    def read(self, rows: Iterable[Mapping[str, Any]], after: int = 0) -> None:
        """Takes over the rows after the step ``after`` that the run recorded before this process."""
        for row in rows:
            if row["step"] > after and None not in (row.get("rollout/staleness"), row.get(_GAPS[1])):
                self._keep(row)

    def __call__(
        self, row: Mapping[str, Any], sequences: Sequence[TrainSequence], trainer: Callable[[], TrainerValues]
    ) -> Row:
        """Checks a step, and returns new keys for its row. It prints a line about a fault.

        Args:
          row: The row of the step, with the mismatch of its update.
          sequences: The responses of the step.
          trainer: A function that fetches the trainer's numbers of the responses' tokens.
        """
        count, rollout = len(sequences), _sampled(sequences, [s["rollout_logprobs"] for s in sequences])
        tokens = _sampled(sequences, [s.response for s in sequences])
        sets = find_repeats([s.prompt for s in sequences], tokens, rollout)
        repeated = sum(len(equal) for equal in sets if is_no_chance(rollout[equal[0]]))
        flat, jump = find_constants(rollout), self._jump(row)
        constant, signature = 0, ""
        if jump or (len(flat) and len(flat) >= _SHARE * count):
            own = _sampled(sequences, trainer().logprobs)
            constant = sum(float(np.std(own[i])) > FILL_SPREAD for i in flat)
            signature = _signature(own, rollout) if jump else ""
        constant = constant if constant >= _SHARE * count else 0
        if jump and signature in _LIKE_REPEATS:  # Short responses are no sign without a jump.
            large = [equal for equal in sets if len(equal) >= _LARGE and np.ptp(rollout[equal[0]])]
            short = sum(map(len, large))
            repeated = max(repeated, short if short >= _SHARE * count else 0)
        if jump and not (repeated or _has_no_drift(row)) and signature in _LIKE_DRIFT:
            jump = ""
        kind, said = "", ""
        if repeated:
            kind = REPEATED
            said = f"not_comparable: {repeated} of {count} responses have the tokens and, to the bit, the "
            said += "log-probabilities of a response to another prompt"
        elif constant:
            kind = CONSTANT
            said = f"not_comparable: {constant} of {count} responses have one log-probability at all their tokens "
            said += f"({rollout[flat[0]][0]:g} in the first), where the trainer's vary"
        elif jump:
            zeros = "" if any(map(np.any, rollout)) else ", 0 everywhere"
            kind, said = signature or JUMP, f"{_named(signature)}{zeros} ({jump})"
        self._say(row["step"], kind, said)
        added = {REPEATED: repeated, CONSTANT: constant, JUMP: int(bool(jump))}
        self._keep({**row, **added})
        return added

    def _jump(self, row: Mapping[str, Any]) -> str:
        """Returns the numbers of a jump of the mean of abs(log-ratio), or an empty string if there is none."""
        name, value = _gap(row)
        earlier = self._earlier[_age(row)]
        usual = float(np.median(earlier)) if earlier else 0.0
        if earlier and value > max(_SMALLEST, _TIMES * usual):
            return f"{name} is {value:.3g}, the median of {len(earlier)} earlier rows is {usual:.3g}"
        return f"{name} is {value:.3g}" if value > _ALWAYS and _has_no_drift(row) else ""

    def _keep(self, row: Mapping[str, Any]) -> None:
        """Keeps the mean of abs(log-ratio) of a row without any of the signs. An older record lacks their keys."""
        if row.get("mismatch/token_count") and not any(row.get(key) for key in (REPEATED, CONSTANT, JUMP)):
            self._earlier[_age(row)].append(_gap(row)[1])

    def _say(self, step: int, kind: str, said: str) -> None:
        """Prints a line at the first, second, fourth, eighth, ... step in a row with a fault of this ``kind``."""
        self._steps = self._steps + 1 if kind == self._fault else 1
        self._fault = kind
        if kind and self._steps.bit_count() == 1:
            print(f"\nwarning: step {step}: {said}", file=sys.stderr)


def _gap(row: Mapping[str, Any]) -> tuple[str, float]:
    """Returns the key and the value of the mean of abs(log-ratio), without the drift of the policy if that is known."""
    name = next(name for name in _GAPS if row.get(name) is not None)
    return name, row[name]


def _has_no_drift(row: Mapping[str, Any]) -> bool:
    return row["rollout/staleness"] == 0 or row.get(_GAPS[0]) is not None


def _age(row: Mapping[str, Any]) -> int:
    return round(row["rollout/staleness"])


def _sampled(sequences: Sequence[TrainSequence], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the values [r] of each response without the tokens that an environment wrote."""
    return [each[s.sampled] for s, each in zip(sequences, values, strict=True)]


def _signature(trainer: Sequence[np.ndarray], rollout: Sequence[np.ndarray]) -> str:
    """Returns the cause that the verdict of ``rljax compare`` finds in the numbers, if it is one of ``_SIGNATURES``."""
    cause = judge(pair_of(trainer, rollout)).cause
    return cause if cause in _SIGNATURES else ""


def _named(signature: str) -> str:
    """Returns the cause that ``rljax diagnose`` names for a signature, and the signature in words."""
    if not signature:
        return f"cannot_tell: {_NO_SIGNATURE}"
    return f"{OF_VERDICTS[signature]}: {_SIGNATURES[signature]}"


CAUSE, CONFIDENCE = "diagnosis/cause", "diagnosis/confidence"
"""The keys of a row: the cause, and how sure it is ("" for ``healthy`` and ``cannot_tell``)."""
EVERY = 25
"""The steps from one word to the next. A word about 200 rows of 164 columns takes 21 to 25 ms on a CPU."""
_ROWS = 200  # the most rows that a word is about


def declared_by(config: Config) -> Declared:
    """Returns what a configuration declares of trainer and engine: dtypes, 8-bit forms and injected mismatch."""
    rollout = config.rollout
    return Declared(
        config.precision.compute_dtype,
        rollout.dtype,
        rollout.engine_form.label,
        can(rollout.engine, "is_exact"),
        ", ".join(f"{name} {value}" for name, value in rollout.inject.given.items()),
    )


class Word:
    """The diagnosis of the last rows, which is recorded every ``EVERY`` steps and printed when it changes."""

    def __init__(self, declared: Declared) -> None:
        """Starts without rows. ``declared`` has the dtypes and forms of trainer and engine."""
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
