"""Reads the facts of a token dump: few tokens or all, growth along the response, and the grid of the logits."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rljax.compare.report import check_logprobs
from rljax.compare.verdict import Verdict, judge, normalised_gap
from rljax.diagnose.course import effect
from rljax.mismatch import mismatch_metrics
from rljax.mismatch.diagnosis import bucket_labels
from rljax.mismatch.signs import find_repeats, is_no_chance
from rljax.record.token_arrays import to_rows
from rljax.record.token_dumps import SECOND_RUN, TokenDump

POSITION_EDGES = (4, 8, 16, 64, 256, 1024, 4096)
"""First positions of the buckets after the first."""
UNCERTAINTY_EDGES = (0.03, 0.1, 0.3, 0.6)
"""Lowest uncertainties of the buckets after the first; the uncertainty of a token is 1 - p."""
FEWEST_TOKENS = 60
"""A bucket with fewer tokens is not shown."""
GRIDS = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""The spacing of logits of size 0.25 to 0.5 in each dtype. Larger logits and their differences are multiples of it."""
_ON_GRID = 1e-5  # nats; log-probabilities in float32 are exact to about a tenth of it
_GRID_SHARE, _FEWEST_PAIRS = 0.8, 12  # the least share of pairs on a grid, and the fewest pairs, that show a grid
_SHARED_TOKENS = 16  # the first response tokens of a sequence, which are searched for shared contexts
_OUTLIER = 8.0  # the least error of an outlier, as a multiple of the 90% quantile of all errors
_SMALLEST_OUTLIER = 0.5  # the least abs(lr) of an outlier (nats)
_VERSION = re.compile(r"version (\d+)$")  # the end of the name of the trainer's weights in a dump of a run


@dataclass(frozen=True)
class TokenFacts:
    """The facts of a dump with two columns of log-probabilities."""

    trainer: str  # the column in the trainer's place
    rollout: str  # the column in the rollout engine's place
    roles_known: bool
    metrics: Mapping[str, float]  # the metrics of ``mismatch_metrics``
    verdict: Verdict  # the verdict of ``compare`` on the two columns
    normalised_gap: float  # the mean of abs(lr) over the mean uncertainty, as ``compare`` uses it
    outliers: int  # the number of tokens whose error is far beyond all others
    outlier_share: float  # the share of k3_kl that the outliers carry
    effect_without: float  # the error of the logits of all tokens that are not outliers
    by_position: Mapping[str, float]  # the gap per uncertainty by position
    by_uncertainty: Mapping[str, float]  # the gap per uncertainty by uncertainty
    effects: Mapping[str, float]  # the error of the logits by position
    grids: Mapping[str, str]  # the 16-bit dtype of the logits by column, for columns that show a grid
    floors: Mapping[str, float]  # the mean of abs(lr) between two runs of a scorer, by column
    staleness: float = math.nan  # the mean number of versions between sampling and training; NaN if it is unknown
    by_staleness: Mapping[str, float] = field(default_factory=dict)  # the gap per uncertainty, fresh and stale tokens
    repeated: int = 0  # the number of responses that repeat one to another prompt, to the bit and not by chance


def read_facts(dump: TokenDump, temperature: float = 1.0) -> TokenFacts:
    """Reads the facts of a dump.

    The columns are the one with the role "trainer" and the one with the role "rollout", or the first two in the order
    of the file. ``temperature`` is the temperature of the sampling if the dump does not name it.

    Raises ValueError if there are fewer than two columns, or a number is above 0.
    """
    names = dump.first_runs
    if len(names) < 2:
        raise ValueError(f"a diagnosis needs two columns of log-probabilities, got {names}: add one with rljax compare")
    roles = {dump.role(name): name for name in reversed(names)}
    trainer = roles.get("trainer") or next(name for name in names if name != roles.get("rollout"))
    rollout = roles.get("rollout") or next(name for name in names if name != trainer)
    check_logprobs(dump, [trainer, rollout])
    x, y = (_rows(dump, name) for name in (trainer, rollout))
    mask = to_rows(dump.response_mask, False)
    valid = mask & np.isfinite(x) & np.isfinite(y)
    verdict = judge(x, y, mask, dump.sources[trainer], dump.sources[rollout])
    position = np.cumsum(valid, axis=1)[valid]
    lr, uncertainty = (x - y)[valid], -np.expm1(np.minimum(x, y))[valid]
    far = outliers(lr, uncertainty)
    k3 = np.expm1(lr) - lr
    own = {trainer: dump.sources[trainer].temperature, rollout: dump.sources[rollout].temperature}
    sampled = dump.sampling.get("temperature")
    given = float(sampled) if isinstance(sampled, (int, float)) and sampled > 0 else temperature
    behind = _behind(dump, trainer)[valid]
    stale = behind >= 1
    seconds = {name: name + SECOND_RUN for name in (trainer, rollout) if name + SECOND_RUN in dump.logprobs}
    return TokenFacts(
        trainer=trainer,
        rollout=rollout,
        roles_known={"trainer", "rollout"} <= set(roles),
        metrics=mismatch_metrics(x, y, mask),
        verdict=verdict,
        normalised_gap=normalised_gap(x[valid], y[valid]) if len(lr) else math.nan,
        outliers=int(far.sum()),
        outlier_share=float(k3[far].sum() / k3.sum()) if k3.sum() > 0 else 0.0,
        effect_without=_effect(lr[~far]),
        by_position=_by_bucket(lr[~far], uncertainty[~far], position[~far], POSITION_EDGES),
        by_uncertainty=_by_bucket(lr[~far], uncertainty[~far], uncertainty[~far], UNCERTAINTY_EDGES),
        effects=_effects(lr[~far], position[~far]),
        grids={name: grid for name in (trainer, rollout) if (grid := logit_grid(dump, name, own[name] or given))},
        floors={
            name: mismatch_metrics(_rows(dump, name), _rows(dump, second), mask)["logprob_abs_diff_mean"]
            for name, second in seconds.items()
        },
        staleness=float(behind.mean()) if len(behind) else math.nan,
        by_staleness=_fresh_and_stale(lr[~far], uncertainty[~far], stale[~far]),
        repeated=_repeated(dump, rollout),
    )


def _repeated(dump: TokenDump, rollout: str) -> int:
    """Returns how many responses repeat the tokens and the numbers in column ``rollout`` of one to another prompt."""
    masks = dump.response_mask
    prompts = [ids[: int(np.argmax(mask))] for ids, mask in zip(dump.token_ids, masks, strict=True)]
    tokens = [ids[mask] for ids, mask in zip(dump.token_ids, masks, strict=True)]
    logprobs = [values[mask] for values, mask in zip(dump.logprobs[rollout], masks, strict=True)]
    sets = find_repeats(prompts, tokens, logprobs)
    return sum(len(numbers) for numbers in sets if is_no_chance(logprobs[numbers[0]]))


def _behind(dump: TokenDump, trainer: str) -> np.ndarray:
    """Returns by how many versions the weights that sampled each token were behind the trainer's, float64 [n, t].

    It is NaN if the dump has no values ``version``, or the name of the trainer's weights does not end in a version.
    """
    named = _VERSION.search(dump.sources[trainer].weights_hash)
    if named is None or "version" not in dump.values:
        return to_rows([np.full(len(ids), np.nan) for ids in dump.token_ids], np.nan)
    return float(named[1]) - to_rows(dump.values["version"], np.nan).astype(np.float64)


def _fresh_and_stale(lr: np.ndarray, uncertainty: np.ndarray, stale: np.ndarray) -> dict[str, float]:
    """Returns the gap per uncertainty of the fresh and of the stale tokens. Groups with too few tokens are left out."""
    groups = {"fresh": ~stale, "stale": stale}
    return {
        name: float(np.abs(lr[of]).mean() / max(uncertainty[of].mean(), 1e-12))
        for name, of in groups.items()
        if of.sum() >= FEWEST_TOKENS
    }


def outliers(lr: np.ndarray, uncertainty: np.ndarray) -> np.ndarray:
    """Marks the tokens whose error is far beyond all others, bool [n].

    An error of the logits changes the log-probability of a token by about the error times the token's uncertainty. So
    the log-ratio is divided by the uncertainty before tokens are compared.
    """
    if not len(lr):
        return np.zeros(0, bool)
    error = np.abs(lr) / np.maximum(uncertainty, 0.02)
    usual = float(np.quantile(error, 0.9))
    return (np.abs(lr) > _SMALLEST_OUTLIER) & (error > _OUTLIER * max(usual, 1e-6))


def logit_grid(dump: TokenDump, column: str, temperature: float) -> str:
    """Returns the 16-bit dtype to which a column's logits were rounded, or an empty string if they show no grid.

    Two tokens with the same tokens before them share a normalisation, so their log-probabilities differ by as much as
    their logits. Such pairs are in the responses to one prompt, and among the likeliest tokens of one place.
    """
    pairs = np.fromiter(_same_context(dump, column), float) * temperature
    if column == dump.sampling.get("column", "rollout") and dump.columns.get("top_logprobs"):
        pairs = np.concatenate([pairs, *(_neighbours(values) for values in dump.columns["top_logprobs"][:64])])
    pairs = pairs[np.isfinite(pairs) & (np.abs(pairs) > 1e-4)][:20_000]
    if len(pairs) < _FEWEST_PAIRS:
        return ""
    for name, step in GRIDS.items():
        off = np.abs(pairs / step - np.round(pairs / step)) * step
        if np.mean(off < _ON_GRID) >= _GRID_SHARE:
            return name
    return ""


def _neighbours(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.diff(np.asarray(values, float), axis=1).ravel()


def _same_context(dump: TokenDump, column: str) -> Iterator[float]:
    """Yields differences of a column's numbers between two tokens that follow the same tokens."""
    seen: dict[bytes, dict[int, float]] = {}
    for tokens, mask, values in zip(dump.token_ids, dump.response_mask, dump.logprobs[column], strict=True):
        for at in np.flatnonzero(mask)[:_SHARED_TOKENS]:
            if np.isfinite(values[at]):
                seen.setdefault(tokens[:at].tobytes(), {}).setdefault(int(tokens[at]), float(values[at]))
    for found in seen.values():
        yield from (b - a for a, b in itertools.pairwise(found.values()))


def _effect(lr: np.ndarray) -> float:
    return effect(float(np.mean(np.expm1(lr) - lr)), float(np.mean(np.abs(lr)))) if len(lr) else math.nan


def _effects(lr: np.ndarray, position: np.ndarray) -> dict[str, float]:
    index = np.digitize(position, POSITION_EDGES)
    parts = ((label, lr[index == i]) for i, label in enumerate(bucket_labels(POSITION_EDGES)))
    return {label: _effect(part) for label, part in parts if len(part) >= FEWEST_TOKENS}


def _by_bucket(lr: np.ndarray, uncertainty: np.ndarray, values: np.ndarray, edges: Sequence[float]) -> dict[str, float]:
    """Returns the mean of abs(lr) over the mean uncertainty of the tokens in each bucket with enough of them."""
    index = np.digitize(values, edges)
    parts = ((label, index == i) for i, label in enumerate(bucket_labels(edges)))
    return {
        label: float(np.abs(lr[inside]).sum() / max(uncertainty[inside].sum(), 1e-9))
        for label, inside in parts
        if inside.sum() >= FEWEST_TOKENS
    }


def _rows(dump: TokenDump, column: str) -> np.ndarray:
    return to_rows(dump.logprobs[column], np.nan).astype(np.float64)
