"""Judges the gap between two columns of log-probabilities: within limits, too large, or not comparable.

Each check prevents a false alarm of the next. First come fills for missing numbers and the declared sources, then the
alignment, the base of the logarithm, the tokens that carry the gap, the temperature, and last the size of the gap.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rljax.compare.patterns import Pattern, find_cut, find_patterns, missing_mass
from rljax.mismatch import framework_metrics
from rljax.mismatch.names import PUBLISHED_BARS
from rljax.mismatch.regions import LARGEST_LOGPROB
from rljax.mismatch.signs import FILL_SPREAD, FILL_TOKENS
from rljax.record.dump_facts import TokenPair
from rljax.record.token_dumps import ColumnSource

# The normalised gap is the mean |difference| per token (nats) over the mean of 1 - p. It is normalised because an error
# of the logits changes the log-probability of a likely token little. Measured between engines with equal weights: bf16
# 1.2e-2, fp16 1.6e-3, fp32 9e-7. Each range leaves room for other models.
GAP_RANGES = {"float32": (0.0, 1e-4), "float16": (1e-4, 8e-3), "bfloat16": (1e-3, 0.3)}
"""The expected range of the mean gap over the mean of 1 - p of two engines, by the coarser of their dtypes."""
USUAL_GAP, USUAL_MEAN = 0.1, 0.03
"""The normalised gap, and the mean gap (nats), that healthy engines in bfloat16 do not both exceed.

A real model of 0.1B to 8B parameters has a mean gap of 0.003 to 0.03. A model that is sure of its tokens may exceed the
first, and an unsure one the second: SmolLM2-135M has a mean gap of 0.047 and a normalised gap of 0.065.
"""
ROUNDED_GAP = 0.5
"""The highest expected normalised gap of an engine that declares that it rounds its weights or its cache to 8 bits."""

_FIT_GAIN = 0.25  # a shift by one, or another base of the logarithm, must reduce the mean gap to this share
_SCALE_GAIN = 0.1  # any other factor must reduce the mean gap to this share
_CLEAR_GAP = 1e-2  # nats; only larger gaps are checked for alignment and temperature
_SENTINEL = -1000.0  # nats; no softmax of a language model gives a sampled token less
_FILL_SHARE = 0.05  # the least share of a pair's tokens that shows a fill
_CHANCE = 0.05  # the probability that numbers of another row fit by chance
_GAP_SHARE = 0.5  # the least share of the gap that is in the rows that another row's numbers fit
_MOST_ROWS, _MOST_TOKENS = 1024, 64  # the most rows of a length, and the first tokens of each, that are compared so
_FEWEST = 16  # the fewest tokens that show a temperature
_LACK = 3.0  # a mean ratio below 1 by this many standard errors is no temperature's
_SLOPE, _CORRELATION = 1.06, 0.9  # the least slope and correlation that show a temperature and not other weights
_LEAST_CORRELATION = 0.8  # the least correlation where certain tokens show a temperature, which has 0.9 at 0.5 to 1
_CERTAIN, _UNCERTAIN = 0.1, 0.3  # the largest 1 - p of certain tokens, and the least of uncertain ones
_ONE_SIGN, _FALL = 0.8, 1.2  # abs(sum) over sum of abs of the certain tokens' differences, their gap over the others'

Bars = dict[str, tuple[float, float]]
"""The value of a metric for a pair and its published limit, by framework and metric."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a pair of columns.

    The cause is "none", "above_bar", "constant_fill", "no_tokens", "truncated_sampling", "temperature", "other_base",
    "other_weights", "off_by_one", "other_rows", "wrong_dtype", "left_out", or a cause of ``find_patterns``:
    "trainer_side", "engine_side", "some_responses", "first_token", "last_tokens", "after_environment", "one_token".
    Response tokens without a finite number in both columns are left out. The first token of a sequence may have NaN,
    because no token is before it. This does not count as left out if the sequence has other numbers.
    """

    status: str  # "pass", "fail" (comparable but too far apart) or "refused" (not comparable)
    cause: str  # one of the causes above
    reason: str  # one sentence for a reader
    bars: Bars
    left_out: int = 0  # the number of response tokens that are left out
    tokens: int = 0  # the number of response tokens


def judge(pair: TokenPair, *, same_weights: bool = False) -> Verdict:
    """Judges a pair of columns. The cause is inferred from numbers, and the reason says how certain it is.

    A pair with the sampler's column is refused if top_p, top_k or min_p cut its distribution and not the other's
    (``ColumnSource.cut``). If ``TokenDump.sampling`` names no sampler's column, each column of a rollout engine
    counts. With ``same_weights`` different hashes belong to the same weights in two forms, so hashes are ignored.
    """
    x, y, mask = pair.rows()
    x, y = x.astype(np.float64), y.astype(np.float64)
    valid = mask & (np.abs(x) <= LARGEST_LOGPROB) & (np.abs(y) <= LARGEST_LOGPROB)
    left_out = mask & ~valid
    left_out[:, :1] &= ~(np.isnan(x[:, :1] + y[:, :1]) & valid.any(1, keepdims=True))
    bars = {
        f"{peer} {name}": (framework_metrics(pair.statistics, peer)[name], bar)
        for (peer, name), bar in PUBLISHED_BARS.items()
    }
    over = [f"{name} = {value:.3g} (limit {bar:g})" for name, (value, bar) in bars.items() if not value <= bar]
    a, b = (pair.dump.sources[name] for name in (pair.trainer, pair.rollout))
    if same_weights:
        a, b = (dataclasses.replace(source, weights_hash="") for source in (a, b))
    findings = itertools.chain(
        _fill_findings(x, y, mask),
        _findings(x, y, valid, a, b, _cut_of(pair)),
        find_patterns(pair, x, y, mask, valid),
        _temperature_findings(pair),
        _gap_findings(pair, a, b),
        [("fail", "above_bar", f"above the published limit: {'; '.join(over)}")] if over else [],
        _left_out_findings(x, y, mask, left_out),
        [("pass", "none", "within every published limit")],
    )
    return Verdict(*next(findings), bars, int(left_out.sum()), int(mask.sum()))


def _findings(
    x: np.ndarray, y: np.ndarray, valid: np.ndarray, a: ColumnSource, b: ColumnSource, cut: str
) -> Iterator[Pattern]:
    """Yields the findings on a pair; only the first counts, because it may be the cause of the later ones."""
    if not valid.any():
        yield "refused", "no_tokens", "no response token has a finite log-probability in both columns"
    if cut:
        divided = "their distribution is the engine's divided by the mass that remains after the cut"
        reason = f"the tokens were sampled with {cut}: {divided}, so the ratio to it is not the mismatch of the engines"
        yield "refused", "truncated_sampling", reason
    if a.temperature is not None and b.temperature is not None and a.temperature != b.temperature:
        reason = f"log-probabilities at temperature {a.temperature:g} and {b.temperature:g}: different distributions"
        yield "refused", "temperature", reason
    names = a.weights_hash, b.weights_hash
    are_hashes = [name.startswith("sha256:") for name in names]
    if all(names) and are_hashes[0] == are_hashes[1] and names[0] != names[1]:
        yield "refused", "other_weights", f"the columns name different weights: {names[0]} and {names[1]}"
    gap = float(np.mean(np.abs(x[valid] - y[valid])))
    if gap > _CLEAR_GAP:
        if shift := _shift(x, y, valid):
            reason = f"the first column fits the second when moved by {shift:+d} position: one of them is off by one"
            yield "refused", "off_by_one", reason
        if rows := _other_rows(x, y, valid):
            carry = f"{rows} of {valid.any(1).sum()} rows carry the gap"
            reason = f"{carry}, and there the first column fits another row of the second"
            yield "refused", "other_rows", f"{reason}: the rows of one of them are permuted"
        yield from _base_findings(x[valid], y[valid], gap)


def _cut_of(pair: TokenPair) -> str:
    """Returns the settings that cut the distribution of one of two columns only; empty if they can be compared."""
    dump, names = pair.dump, (pair.trainer, pair.rollout)
    off = {"top_p": lambda value: value >= 1, "top_k": lambda value: value < 1, "min_p": lambda value: value <= 0}
    numbers = {name: dump.sampling[name] for name in off if isinstance(dump.sampling.get(name), (int, float))}
    sampler, are_cut = dump.sampling.get("column"), [dump.sources[name].cut for name in names]
    is_sampled = sampler in names if sampler else "rollout" in map(dump.role, names)
    cut = ", ".join(f"{name} = {value:g}" for name, value in numbers.items() if is_sampled and not off[name](value))
    return "" if all(are_cut) else cut or ("top_k, top_p or min_p" if any(are_cut) else "")


def _fill_findings(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> Iterator[Pattern]:
    """Yields a finding if a column holds a constant for missing numbers."""
    for name, values, others in (("first", x, y), ("second", y, x)):
        known = mask & np.isfinite(values)
        if (value := _fill(values, others, known)) is not None:
            at = known & (values == value)
            rest = known & np.isfinite(others) & ~at
            if value == 0.0 and any(find_cut(x[rest] - y[rest])):
                continue  # the cut left one token there
            tokens, rows = f"{at.sum()} of {mask.sum()}", f"{at.any(1).sum()} of {mask.any(1).sum()}"
            holds = f"the {name} column holds {value:g} at {tokens} response tokens ({rows} sequences)"
            fill = "a constant fill for missing numbers, such as SkyRL's -9999 or slime's 0, not log-probabilities"
            yield "refused", "constant_fill", f"{holds}: {fill} (processed numbers of greedy sampling are 0, too)"


def _fill(x: np.ndarray, y: np.ndarray, known: np.ndarray) -> float | None:
    """Returns the constant that stands for missing numbers in a column; None if there is none.

    A number is a fill if many tokens have it and the other column has other numbers there. Tokens of probability 1 have
    the number 0 in both columns, so at a fifth of the fills the other column must be far away. Responses to one prompt
    have equal first tokens and numbers in both columns, so the other column must vary at the fills.
    """
    if (low := known & (x <= _SENTINEL)).any():
        return float(np.min(x[low]))
    if known.sum() >= 2 * FILL_TOKENS and not x[known].any():
        return 0.0
    far = known & np.isfinite(y) & (np.abs(x - y) > _CLEAR_GAP)
    numbers, counts = np.unique(x[far], return_counts=True)
    if not len(counts) or counts.max() < FILL_TOKENS:
        return None
    value = numbers[counts.argmax()]
    same = known & (x == value)
    whole_rows = (same.sum(1) >= FILL_TOKENS) & (same.sum(1) == known.sum(1)) & far.any(1)
    is_fill = counts.max() >= _FILL_SHARE * known.sum() or whole_rows.any()
    varies = np.std(y[same & far]) > FILL_SPREAD
    return float(value) if is_fill and varies and counts.max() >= 0.2 * same.sum() else None


def _left_out_findings(x: np.ndarray, y: np.ndarray, mask: np.ndarray, left_out: np.ndarray) -> Iterator[Pattern]:
    """Yields a finding if some response tokens have no finite number in both columns."""
    if left_out.any():
        counts = (
            f"the {name} column has {np.isnan(gone).sum()} unknown and {np.isinf(gone).sum()} infinite ones"
            for name, gone in (("first", x[left_out]), ("second", y[left_out]))
        )
        lost = (left_out.sum(1) == mask.sum(1)) & mask.any(1)
        some = f"{left_out.sum()} of {mask.sum()} response tokens have no finite number in both columns"
        whole = f"{lost.sum()} of {mask.any(1).sum()} sequences have none at all"
        rest = "the rest is within every published limit, but it is not the whole"
        yield "refused", "left_out", f"{some} ({', '.join(counts)}), and {whole}: {rest}"


def _shift(x: np.ndarray, y: np.ndarray, valid: np.ndarray) -> int | None:
    """Returns the shift (+1: to later positions) that makes the first column fit the second; None if neither does.

    The shifted column must also fit better than a constant, which fits any column that is nearly constant.
    """
    for shift, (moved, kept) in {1: (np.s_[:, :-1], np.s_[:, 1:]), -1: (np.s_[:, 1:], np.s_[:, :-1])}.items():
        both = valid[moved] & valid[kept]
        if both.sum() < 8:
            continue
        ours, theirs = x[moved][both], y[kept][both]
        others = np.mean(np.abs(x[kept] - y[kept])[both]), np.mean(np.abs(theirs - np.median(theirs)))
        if np.mean(np.abs(ours - theirs)) < _FIT_GAIN * min(others):
            return shift
    return None


def _other_rows(x: np.ndarray, y: np.ndarray, valid: np.ndarray) -> int:
    """Returns how many rows of the first column fit another row of the second; 0 if they cause little of the gap.

    Only rows of equal length are compared. The fewer tokens they have, the closer they must be. The chance that one of
    k rows of n tokens is nearer than a share s of the usual distance is about k (2 s)^n.
    """
    lengths = valid.sum(1)
    found, carried, gap = 0, 0.0, 0.0
    for length in np.unique(lengths[lengths > 1]):
        rows = np.flatnonzero(lengths == length)[:_MOST_ROWS]
        ours, theirs = (each[rows][valid[rows]].reshape(len(rows), length)[:, :_MOST_TOKENS] for each in (x, y))
        gain = min(_FIT_GAIN, 0.5 * (_CHANCE / len(rows)) ** (1 / length))
        for i in range(len(rows) if len(rows) > 1 else 0):
            gaps = np.mean(np.abs(ours[i] - theirs), axis=1)
            fits = gaps[i] > _CLEAR_GAP and np.delete(gaps, i).min() < gain * gaps[i]
            found, carried, gap = found + int(fits), carried + fits * gaps[i], gap + gaps[i]
    return found if found > 1 and carried >= _GAP_SHARE * gap else 0


def _base_findings(x: np.ndarray, y: np.ndarray, gap: float) -> Iterator[Pattern]:
    """Yields a finding if one column has logarithms to another base, or is the other times another factor."""
    for name, values, others in (("first", x, y), ("second", y, x)):
        for base in (2, 10):
            if np.mean(np.abs(values * math.log(base) - others)) < _FIT_GAIN * gap:
                remedy = f"multiply it by ln {base} ({math.log(base):.4f})"
                yield "refused", "other_base", f"the {name} column has logarithms to base {base}: {remedy}"
    factor = float(x @ y) / max(float(x @ x), 1e-30)
    if np.mean(np.abs(factor * x - y)) < _SCALE_GAIN * min(gap, float(np.mean(np.abs(y - np.median(y))))):
        said = f"the first column times {factor:.3g} is the second, as if a temperature divided log-probabilities"
        yield "refused", "temperature", f"{said} instead of logits"


def _temperature_findings(pair: TokenPair) -> Iterator[Pattern]:
    """Yields a finding if one column is the other at a temperature T < 1.

    A temperature adds a term that depends on the context to log p / T, so no single factor fits. But the regression of
    the sharper column on the other has a slope near 1 / T. Relative to 1 - p certain tokens differ most, all in one
    direction; between different weights uncertain ones do.
    """
    x, y = pair.x[pair.valid], pair.y[pair.valid]
    lr, uncertainty = x - y, -np.expm1(np.minimum(np.minimum(x, y), 0.0))
    low, high = sorted((float(np.std(x)), float(np.std(y)))) if len(x) >= _FEWEST else (0.0, 0.0)
    if low == 0.0 or np.mean(np.abs(lr)) <= _CLEAR_GAP:
        return
    if missing_mass(pair.distinct_lr) > _LACK:  # rather a cut, in too few tokens to be called one
        return
    correlation = float(np.corrcoef(x, y)[0, 1])
    slope, is_sharper = correlation * high / low, False
    sides = uncertainty < _CERTAIN, uncertainty > _UNCERTAIN
    if min(map(np.sum, sides)) >= _FEWEST:
        sizes = [float(np.sum(np.abs(lr[side]))) for side in sides]
        certain, uncertain = (size / float(np.sum(uncertainty[side])) for size, side in zip(sizes, sides, strict=True))
        if certain < uncertain:
            return
        is_sharper = abs(float(np.sum(lr[sides[0]]))) > _ONE_SIGN * sizes[0] and certain > _FALL * uncertain
    if (is_sharper and correlation > _LEAST_CORRELATION) or (correlation > _CORRELATION and slope > _SLOPE):
        times = f", as if their temperatures were {1 / slope:.2g} to 1" if slope > _SLOPE else ""
        reason = f"one column is a sharpened form of the other{times}"
        yield "refused", "temperature", f"{reason}: temperature-processed against raw log-probabilities"


def is_beyond(pair: TokenPair) -> bool:
    """Returns whether the gap is beyond rounding in bfloat16, or in 8 bits if a column declares an 8-bit form."""
    gap = pair.normalised_gap
    if any(pair.dump.sources[name].form for name in (pair.trainer, pair.rollout)):
        return gap > ROUNDED_GAP
    is_unusual = gap > USUAL_GAP and float(np.mean(np.abs(pair.lr[pair.valid]))) > USUAL_MEAN
    return is_unusual or gap > GAP_RANGES["bfloat16"][1]


def _gap_findings(pair: TokenPair, a: ColumnSource, b: ColumnSource) -> Iterator[Pattern]:
    """Yields the findings from the normalised gap, and the 8-bit forms or else the coarser of the declared dtypes."""
    gap, forms = pair.normalised_gap, [source.form for source in (a, b) if source.form]
    if is_beyond(pair):
        usual = f"{USUAL_GAP:g} where the mean gap is above {USUAL_MEAN:g}"
        whose = f"beyond that of {' and '.join(forms)} ({ROUNDED_GAP:g})" if forms else f"beyond any dtype's ({usual})"
        reason = (
            f"a gap of {gap:.2g} nats over the mean of 1 - p is {whose}. The numbers do not say which of these it "
            "is: other weights, such as a stale server's; a missing adapter; quantised weights or an 8-bit cache; "
            "another temperature, or a penalty or cut of the logits; an output head in another dtype; other "
            "positions, a lost prompt or other tokens; a fault of a kernel"
        )
        yield "fail", "other_weights", reason
    if forms or a.dtype not in GAP_RANGES or b.dtype not in GAP_RANGES:
        return
    declared = max(a.dtype, b.dtype, key=lambda name: GAP_RANGES[name][1])
    low, high = GAP_RANGES[declared]
    same_program = len({(re.sub(" (decode|prefill)$", "", each.engine), each.dtype) for each in (a, b)}) == 1
    if gap > high or (gap < low and not same_program):
        fits = [name for name, (least, most) in GAP_RANGES.items() if least <= gap <= most]
        likely = " or ".join(fits) or "none of the dtypes"
        known_equal = a.weights_hash and a.weights_hash == b.weights_hash
        doubt = "" if known_equal or gap < low else ", or weights that differ a little"
        reason = f"a gap of {gap:.2g} nats is not {declared}'s ({low:g} to {high:g}): looks like {likely}{doubt}"
        yield "fail", "wrong_dtype", reason
