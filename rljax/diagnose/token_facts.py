"""Reads from a token dump which tokens differ, how this grows along the response, and how logits were rounded."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rljax.compare.patterns import LEAST_UNCERTAINTY, ratio_bias
from rljax.compare.verdict import Verdict, is_beyond, judge
from rljax.diagnose.causes import DECISIVE
from rljax.diagnose.evidence import EFFECTS, Size
from rljax.mismatch.diagnosis import bucket_labels
from rljax.mismatch.signs import find_repeats, is_no_chance
from rljax.record.dump_facts import TokenPair, check_logprobs, choose_pair
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
_OF_MEDIAN = 0.93  # k3_kl / logprob_abs_diff_mean of a normal error over the median of abs(lr) / uncertainty
_LARGEST_ROUNDING = 0.35  # the largest error of the logits of an engine in 8 bits; an fp8_e5m2 cache has 0.16
_FEW = 0.05  # with a smaller share of uncertain tokens, nearly all are certain
_OUTLIER = 8.0  # the least error of an outlier, as a multiple of the 90% quantile of all errors
_FAR = 8.0  # a token is far if its error is this multiple of the median; of rounding and drift at most 1% are
_MOST_OUTLIERS = 0.02  # the largest share of far tokens that are a few
_SMALLEST_OUTLIER = 1.0  # the least abs(lr) of an outlier (nats)
_VERSION = re.compile(r"version (\d+)$")  # the end of the name of the trainer's weights in a dump of a run


@dataclass(frozen=True)
class TokenFacts:
    """The facts of a dump with two columns of log-probabilities.

    If the cause of the verdict is one of ``DECISIVE``, there are no facts after ``repeated``.
    """

    trainer: str  # the column in the trainer's place
    rollout: str  # the column in the rollout engine's place
    roles_known: bool  # whether the dump has a column with the role of a trainer, and one of a rollout engine
    metrics: Mapping[str, float]  # the metrics of ``mismatch_metrics``
    verdict: Verdict  # the verdict of ``compare`` on the two columns
    normalised_gap: float  # the mean of abs(lr) over the mean uncertainty, as ``compare`` uses it
    is_beyond: bool  # whether ``compare`` calls the gap beyond rounding
    floors: Mapping[str, float]  # the mean of abs(lr) between two runs of a scorer, by column
    repeated: int  # the number of responses that equal one to another prompt, to the bit and not by chance
    outliers: int = 0  # the number of tokens whose error is far beyond all others
    outlier_share: float = 0.0  # the share of k3_kl that the outliers carry
    effect_without: float = math.nan  # the error of the logits of most tokens: outliers hardly change it
    far_share: float = math.nan  # the share of the tokens whose error is far above the median
    ratio_bias: float = math.nan  # the mean ratio minus 1, in standard errors: near 0 without a fault
    by_position: Mapping[str, float] = field(default_factory=dict)  # the gap per uncertainty by position
    by_uncertainty: Mapping[str, float] = field(default_factory=dict)  # the gap per uncertainty by uncertainty
    effects: Mapping[str, float] = field(default_factory=dict)  # the error of the logits by position
    grids: Mapping[str, str] = field(default_factory=dict)  # the 16-bit dtype of the logits of columns with a grid
    staleness: float = math.nan  # the mean number of versions between sampling and training; NaN if it is unknown
    by_staleness: Mapping[str, float] = field(default_factory=dict)  # the gap per uncertainty, fresh and stale tokens

    @property
    def is_of_few(self) -> bool:
        """Whether a few tokens carry most of k3_kl."""
        is_usual = self.effect_without < 1.5 * EFFECTS["bfloat16"]
        is_rare = self.far_share <= _MOST_OUTLIERS
        return self.outliers > 0 and is_rare and self.outlier_share > (0.5 if is_usual else 0.9)

    def size(self, has_forms: bool) -> Size:
        """Returns the size of the mismatch.

        ``has_forms`` says whether an engine declares 8-bit weights or an 8-bit cache. If none does, a gap that
        ``compare`` calls usual is rounding in 16 bits at most.
        """
        is_usual = not self.is_beyond and not has_forms
        limits = EFFECTS | {"8 bits": _LARGEST_ROUNDING} | ({"bfloat16": math.inf} if is_usual else {})
        return Size(self.effect_without, limits, "an error of the logits")


def read_facts(
    dump: TokenDump, temperature: float = 1.0, trainer: str | None = None, rollout: str | None = None
) -> TokenFacts:
    """Reads the facts of a dump. ``choose_pair`` chooses the columns that are not named.

    ``temperature`` is the temperature of the sampling if the dump does not name it.

    Raises ValueError if a named column is missing, there are fewer than two columns, or a number is above 0.
    """
    sides = choose_pair(dump, trainer, rollout)
    if trainer is not None or rollout is not None:
        dump = dump.with_roles({sides[0]: "trainer", sides[1]: "rollout"})
    check_logprobs(dump, sides)
    pair = TokenPair(dump, *sides)
    roles_known = {"trainer", "rollout"} <= {dump.role(name) for name in dump.first_runs}
    again = [TokenPair(dump, name, name + SECOND_RUN) for name in sides if name + SECOND_RUN in dump.logprobs]
    floors = {both.trainer: both.metrics["logprob_abs_diff_mean"] for both in again}
    verdict, repeated = judge(pair), _repeated(dump, sides[1])
    known = (*sides, roles_known, pair.metrics, verdict, pair.normalised_gap, is_beyond(pair), floors, repeated)
    if verdict.cause in DECISIVE:
        return TokenFacts(*known)
    lr, k3, position = pair.lr[pair.valid], pair.k3[pair.valid], pair.places(pair.valid)[pair.valid]
    uncertainty = pair.uncertainty
    far, behind, size = outliers(lr, uncertainty), _behind(pair)[pair.valid], np.abs(lr)
    usual = {"gap": size, "doubt": uncertainty, "k3": k3, "at": position, "stale": behind >= 1}
    of = {name: values[~far] for name, values in usual.items()}
    sampled = dump.sampling.get("temperature")
    given = float(sampled) if isinstance(sampled, (int, float)) and sampled > 0 else temperature
    grids = {name: logit_grid(dump, name, dump.sources[name].temperature or given) for name in sides}
    median = _error_of_most(lr, uncertainty)
    return TokenFacts(
        *known,
        outliers=int(far.sum()),
        outlier_share=float(k3[far].sum() / k3.sum()) if k3.sum() > 0 else 0.0,
        effect_without=_OF_MEDIAN * median,
        far_share=float(np.mean(size > _FAR * median * np.maximum(uncertainty, LEAST_UNCERTAINTY))),
        ratio_bias=ratio_bias(pair.distinct_lr) if len(lr) else math.nan,
        by_position=ratios(of["gap"], of["doubt"], of["at"], POSITION_EDGES),
        by_uncertainty=ratios(of["gap"], of["doubt"], of["doubt"], UNCERTAINTY_EDGES),
        effects=ratios(of["k3"], of["gap"], of["at"], POSITION_EDGES),
        grids={name: grid for name, grid in grids.items() if grid},
        staleness=float(behind.mean()) if len(behind) else math.nan,
        by_staleness=ratios(of["gap"], of["doubt"], of["stale"], (1,), ("fresh", "stale")),
    )


def _behind(pair: TokenPair) -> np.ndarray:
    """Returns by how many versions the weights that sampled each token were behind the trainer's, float64 [r].

    It is NaN if the dump has no values ``version``, or the name of the trainer's weights does not end in a version.
    """
    named = _VERSION.search(pair.dump.sources[pair.trainer].weights_hash)
    if named is None or "version" not in pair.dump.values:
        return np.full(len(pair.lr), np.nan)
    return float(named[1]) - pair.of_tokens(pair.dump.values["version"]).astype(np.float64)


def _repeated(dump: TokenDump, rollout: str) -> int:
    """Returns how many responses have the tokens and the ``rollout`` numbers of a response to another prompt."""
    masks = dump.response_mask
    prompts = [ids[: int(np.argmax(mask))] for ids, mask in zip(dump.token_ids, masks, strict=True)]
    tokens = [ids[mask] for ids, mask in zip(dump.token_ids, masks, strict=True)]
    logprobs = [values[mask] for values, mask in zip(dump.logprobs[rollout], masks, strict=True)]
    sets = find_repeats(prompts, tokens, logprobs)
    return sum(len(numbers) for numbers in sets if is_no_chance(logprobs[numbers[0]]))


def _error_of_most(lr: np.ndarray, uncertainty: np.ndarray) -> float:
    """Returns the median of abs(lr) over the uncertainty, of uncertain tokens if there are any.

    It is NaN if nearly all tokens are certain. They differ by nearly 0, whatever the error of the logits is.
    """
    uncertain = uncertainty > UNCERTAINTY_EDGES[1]
    if uncertain.sum() < min(FEWEST_TOKENS, _FEW * len(lr)):
        return math.nan
    chosen = uncertain if uncertain.sum() >= FEWEST_TOKENS else np.ones(len(lr), bool)
    error = np.abs(lr[chosen]) / np.maximum(uncertainty[chosen], LEAST_UNCERTAINTY)
    return float(np.median(error)) if len(error) else math.nan


def outliers(lr: np.ndarray, uncertainty: np.ndarray) -> np.ndarray:
    """Marks the tokens whose error is far beyond all others, bool [n].

    An error of the logits changes the log-probability of a token by about the error times the token's uncertainty. So
    the log-ratio is divided by the uncertainty before tokens are compared.
    """
    error = np.abs(lr) / np.maximum(uncertainty, LEAST_UNCERTAINTY)
    usual = float(np.quantile(error, 0.9)) if len(lr) else 0.0
    return (np.abs(lr) > _SMALLEST_OUTLIER) & (error > _OUTLIER * max(usual, 1e-6))


def ratios(
    top: np.ndarray, bottom: np.ndarray, values: np.ndarray, edges: Sequence[float], labels: Sequence[str] = ()
) -> dict[str, float]:
    """Returns the sum of ``top`` over the sum of ``bottom`` in each bucket of ``values`` with enough tokens, [n] each.

    The labels are by default those of ``bucket_labels``.
    """
    index = np.digitize(values, edges)
    sums = (np.bincount(index, weights, len(edges) + 1) for weights in (top, bottom, None))
    buckets = zip(labels or bucket_labels(edges), *sums, strict=True)
    return {label: float(a / max(b, 1e-9)) for label, a, b, count in buckets if count >= FEWEST_TOKENS}


def logit_grid(dump: TokenDump, column: str, temperature: float) -> str:
    """Returns the 16-bit dtype to which a column's logits were rounded, or an empty string if they show no grid.

    Two tokens with the same tokens before them share a normalisation, so their log-probabilities differ by as much as
    their logits. Such pairs are in the responses to one prompt, and among the likeliest tokens of one position.
    """
    pairs = np.fromiter(_same_context(dump, column), float)
    if column == dump.sampling.get("column", "rollout") and dump.columns.get("top_logprobs"):
        with np.errstate(invalid="ignore"):
            tops = [np.diff(np.asarray(values, float)).ravel() for values in dump.columns["top_logprobs"][:64]]
        pairs = np.concatenate([pairs, *tops])
    pairs = pairs[np.isfinite(pairs) & (np.abs(pairs) > 1e-4)][:20_000] * temperature
    off = {name: np.abs(pairs - np.round(pairs / step) * step) for name, step in GRIDS.items()}
    found = [name for name in off if len(pairs) >= _FEWEST_PAIRS and np.mean(off[name] < _ON_GRID) >= _GRID_SHARE]
    return found[0] if found else ""


def _same_context(dump: TokenDump, column: str) -> Iterator[float]:
    """Yields differences of a column's numbers between two tokens that follow the same tokens."""
    seen: dict[bytes, dict[int, float]] = {}
    for tokens, mask, values in zip(dump.token_ids, dump.response_mask, dump.logprobs[column], strict=True):
        for at in np.flatnonzero(mask)[:_SHARED_TOKENS]:
            if np.isfinite(values[at]):
                seen.setdefault(tokens[:at].tobytes(), {}).setdefault(int(tokens[at]), float(values[at]))
    for found in seen.values():
        yield from (b - a for a, b in itertools.pairwise(found.values()))
