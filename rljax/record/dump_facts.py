"""Facts of a token dump for several commands (compare, diagnose, view): pairs of columns, and turns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from rljax.errors import ConfigError
from rljax.mismatch import Statistics, merge, mismatch_statistics, read_tokens
from rljax.mismatch.accurate import exp_minus_one_minus_x
from rljax.mismatch.diagnosis import turns_of_mask
from rljax.mismatch.metrics import finalize_mismatch
from rljax.mismatch.regions import LARGEST_LOGPROB
from rljax.record.token_arrays import to_rows
from rljax.record.token_dumps import ABOVE_ZERO, TokenDump, make_dump

_CHUNK = 2**19  # the most padded tokens that are measured together


def choose_pair(dump: TokenDump, trainer: str | None = None, rollout: str | None = None) -> tuple[str, str]:
    """Returns the name of the column to use as the trainer's, and of the one to use as the rollout engine's.

    Without a given name a column is chosen by its role: the first with the wanted role, or else the first without the
    other role, or else the first that is left. Raises ValueError if a named column is missing, both names are equal,
    or there are fewer than two columns.
    """
    names = dump.first_runs
    for name in (trainer, rollout):
        if name is not None and name not in dump.logprobs:
            raise ValueError(f"no column {name!r} in the dump, which has {sorted(dump.logprobs)}")
    if trainer is not None and trainer == rollout:
        raise ValueError(f"expected two different columns, got {trainer!r} twice")
    if len(set(names) - {trainer, rollout}) < (trainer, rollout).count(None):
        raise ValueError(f"this needs two columns of log-probabilities, got {names}: rljax compare --scorer adds one")
    roles = {dump.role(name): name for name in reversed(names) if name not in (trainer, rollout)}
    if trainer is None:
        left = [name for name in names if name != (rollout or roles.get("rollout"))]
        trainer = roles.get("trainer") or min(left, key=lambda name: dump.role(name) == "rollout")
    if rollout is None:
        left = [name for name in names if name != trainer]
        rollout = roles.get("rollout") or min(left, key=lambda name: dump.role(name) == "trainer")
    return trainer, rollout


def named_roles(columns: Collection[str], trainer: Collection[str], rollout: Collection[str]) -> dict[str, str]:
    """Returns the roles that the options --trainer and --rollout give to some of ``columns``, by column name.

    Raises ConfigError if a column has both roles, or is not in ``columns``.
    """
    roles = dict.fromkeys(trainer, "trainer") | dict.fromkeys(rollout, "rollout")
    if len(roles) < len(set(trainer)) + len(set(rollout)):
        raise ConfigError("a column cannot be both --trainer and --rollout")
    unknown = sorted(set(roles) - set(columns))
    if unknown:
        raise ConfigError(f"--trainer and --rollout: no column {unknown[0]!r}, but {', '.join(sorted(columns))}")
    return roles


class TokenPair:
    """Two columns of a dump at its r response tokens, one sequence after the other."""

    def __init__(self, dump: TokenDump, trainer: str, rollout: str) -> None:
        self.dump, self.trainer, self.rollout = dump, trainer, rollout
        self._sides = dump.logprobs[trainer], dump.logprobs[rollout]
        counts = [mask.sum() for mask in dump.response_mask]
        self.sequence = np.repeat(np.arange(len(counts)), np.asarray(counts, int))  # the index of the sequence, [r]
        self.x, self.y = (self.of_tokens(side).astype(np.float64) for side in self._sides)  # nats; NaN if unknown
        self.valid = (np.abs(self.x) <= LARGEST_LOGPROB) & (np.abs(self.y) <= LARGEST_LOGPROB)  # finite on both sides
        self.lr = np.subtract(self.x, self.y, out=np.zeros(len(self.x)), where=self.valid)  # 0 if not valid
        self.k3: np.ndarray = exp_minus_one_minus_x(np, self.lr)

    def of_tokens(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the entries of the response tokens, [r], from a vector [t] for each sequence."""
        found = [vector[mask] for vector, mask in zip(vectors, self.dump.response_mask, strict=True)]
        return np.concatenate(found or [np.zeros(0)])

    def places(self, counted: np.ndarray) -> np.ndarray:
        """Returns the position of each token in its sequence, from 1, int64 [r]. Only ``counted`` tokens count."""
        counts = np.bincount(self.sequence[counted], minlength=len(self.dump.sequence_ids))
        return np.cumsum(counted) - (np.cumsum(counts) - counts)[self.sequence]

    def chunks(self) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Yields sequences of similar length: their indices, and (trainer, rollout, mask) as rows [b, t]."""
        lengths = [len(ids) for ids in self.dump.token_ids]
        waiting: list[int] = []
        for index in np.argsort(lengths, kind="stable").tolist():
            if waiting and (len(waiting) + 1) * lengths[index] > _CHUNK:
                yield np.asarray(waiting), self.rows(waiting)
                waiting = []
            waiting.append(index)
        yield np.asarray(waiting, int), self.rows(waiting)

    def rows(self, chosen: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (trainer, rollout, mask) of some sequences as rows [b, t]; None means all of them, in their order."""
        rows = range(len(self.dump.token_ids)) if chosen is None else chosen
        x, y = (to_rows([side[row] for row in rows], np.nan) for side in self._sides)
        return x, y, to_rows([self.dump.response_mask[row] for row in rows], False)

    def measured(self, of: Callable[[Any], Any]) -> Any:
        """Returns the statistics that the function ``of`` computes from tokens, merged over all sequences."""
        total = None
        for _, sides in self.chunks():
            found = of(read_tokens(*sides))
            total = found if total is None else merge(total, found)
        return total

    @functools.cached_property
    def statistics(self) -> Statistics:
        """The mismatch statistics of all tokens."""
        found: Statistics = self.measured(mismatch_statistics)
        return found

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics of ``mismatch_metrics``, with exact quantiles."""
        metrics = finalize_mismatch(self.statistics)
        if self.valid.any():
            exact = np.quantile(np.abs(self.lr[self.valid]), [0.99, 0.999])
            metrics["logprob_abs_diff_p99"], metrics["logprob_abs_diff_p999"] = map(float, exact)
        return metrics

    @functools.cached_property
    def distinct_lr(self) -> np.ndarray:
        """The log-ratios of valid tokens. Equal pairs of numbers, as in responses that begin alike, count once."""
        pairs = np.unique(np.stack([self.x, self.y], axis=1)[self.valid], axis=0)
        found: np.ndarray = pairs[:, 0] - pairs[:, 1]
        return found

    @property
    def uncertainty(self) -> np.ndarray:
        """The uncertainty 1 - p of each valid token, float64, where p is the smaller one of its two probabilities."""
        return -np.expm1(np.minimum(self.x, self.y)[self.valid])

    @property
    def normalised_gap(self) -> float:
        """The mean of abs(lr), divided by the mean uncertainty (at least 0.001); NaN without a valid token."""
        gaps = np.abs(self.lr[self.valid])
        return float(np.mean(gaps)) / max(float(np.mean(self.uncertainty)), 1e-3) if len(gaps) else math.nan


def pair_of(trainer: Sequence[np.ndarray], rollout: Sequence[np.ndarray]) -> TokenPair:
    """Returns a pair made of arrays instead of a dump: ``trainer`` and ``rollout``, float [t] for each sequence.

    All tokens are response tokens. Sequences without a token are left out.
    """
    rows = [row for row in zip(trainer, rollout, strict=True) if len(row[0])]
    x, y = zip(*rows, strict=True) if rows else ((), ())
    masks = [np.ones(len(each), bool) for each in x]
    names, ids = [str(number) for number in range(len(rows))], [np.zeros(len(each), np.int32) for each in x]
    return TokenPair(make_dump(names, ids, masks, {"trainer": x, "rollout": y}), "trainer", "rollout")


def check_logprobs(dump: TokenDump, columns: Collection[str]) -> None:
    """Raises ValueError if a column has a number above ``ABOVE_ZERO`` (no log-probability) at a response token."""
    for name in columns:
        pair = TokenPair(dump, name, name)
        values, is_above = pair.x, pair.x > ABOVE_ZERO
        above = values[is_above]
        if not len(above):
            continue
        counted = f"{len(above)} of {len(values)} response tokens have"
        hint = f"{counted} such a number"
        if (values[~np.isnan(values)] >= 0).all():
            hint = "none is below 0: they look like log-probabilities with the sign turned"
            if not (values > 1 + ABOVE_ZERO).any():
                hint = "all lie between 0 and 1: they look like probabilities, so write their logarithms"
        if len(above) > 1 and len(set(above)) == 1:
            hint = f"{counted} this same number: a fill for missing ones"
        sequence = dump.sequence_ids[pair.sequence[is_above][0]]
        said = f"column {name!r:.60} has {above[0]:g} in sequence {sequence!r:.60}"
        raise ValueError(f"{said}, but a log-probability is never above 0; {hint}")


def turns_of(dump: TokenDump) -> list[np.ndarray]:
    """Returns the number of the turn that sampled each token, int64 [t] for each sequence.

    The number is 0 at tokens outside the mask. If the dump has no values ``turn``, each contiguous stretch of sampled
    tokens is a turn. The list is empty if no response has several turns.
    """
    if "turn" in dump.values:
        pairs = zip(dump.values["turn"], dump.response_mask, strict=True)
        turns = [np.where(mask & (values > 0), values, 0).astype(np.int64) for values, mask in pairs]
    else:
        turns = [turns_of_mask(mask) for mask in dump.response_mask]
    return turns if any(each.max(initial=0) > 1 for each in turns) else []
