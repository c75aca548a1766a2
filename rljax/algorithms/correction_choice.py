"""The configured correction for mismatch, its named combinations, and its use on a micro-batch.

The weights and rejections are computed by ``rljax.mismatch.correction``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rljax.errors import check_at_least, check_choices
from rljax.mismatch import Statistics, read_tokens
from rljax.mismatch.correction import BANDS, correct_tokens, finalize_correction
from rljax.mismatch.regions import Region

UNCAPPED = 1e9
"""A threshold above every importance ratio, because the exponent of a ratio is clipped at 20."""

_TRUNCATE = {"level": "token", "mode": "truncate"}
_MASK = {"level": "token", "mode": "mask"}
_BAND = {"level": "token", "mode": "band"}
_ONE_SIDED = _TRUNCATE | {"threshold": 20.0, "region_sides": "away"}
_MOMENT = _TRUNCATE | {"threshold": UNCAPPED, "region": "moment", "region_threshold": 0.04}

PRESETS: dict[str, dict[str, Any]] = {
    # Equations 4-6 of arXiv 2602.01826.
    "token_tis": _TRUNCATE | {"threshold": 2.0},
    "token_mis": _MASK | {"threshold": 2.0},
    "sequence_tis": {"level": "sequence", "mode": "truncate", "threshold": 2.0},
    "sequence_mis": {"level": "sequence", "mode": "mask", "threshold": 2.0},
    "geometric_band": {"level": "geometric", "mode": "band", "threshold_low": 0.99, "threshold": 1.01},
    # ``seq-mask-tis`` of NeMo-RL, with its bounds.
    "sequence_band": {"level": "geometric", "mode": "gate", "threshold_low": 0.999, "threshold": 1.002},
    # IcePop, arXiv 2510.18855, with the bounds of AReaL. The wide band is prime-rl's, the narrow one vime's.
    "icepop": _BAND | {"threshold_low": 0.5, "threshold": 5.0},
    "icepop_wide": _BAND | {"threshold_low": 0.2, "threshold": 5.0},
    "icepop_narrow": _BAND | {"threshold_low": 0.5, "threshold": 2.0},
    # The best remedy of arXiv 2605.14220.
    "vexact": _TRUNCATE | {"threshold": 2.0, "reject_k3": 1e-3},
    # DPPO, arXiv 2602.04879. Ratios are at most 20, as in verl and TRL.
    "one_sided_tv": _ONE_SIDED | {"region": "tv", "region_threshold": 0.15},
    "one_sided_kl": _ONE_SIDED | {"region": "kl", "region_threshold": 0.05},
    "one_sided_tops_tv": _ONE_SIDED | {"region": "tv", "region_threshold": 0.15, "region_over": "tops"},
    "one_sided_tops_kl": _ONE_SIDED | {"region": "kl", "region_threshold": 0.05, "region_over": "tops"},
    # The loss "ipo" of prime-rl, with its cap of the ratio.
    "two_sided_tv": _TRUNCATE | {"threshold": 1e4, "region": "tv", "region_threshold": 0.3},
    # KPop, https://ringtech.notion.site/kpop.
    "two_sided_kl": _TRUNCATE | {"threshold": UNCAPPED, "region": "kpop", "region_threshold": 0.1},
    # DRPO, arXiv 2606.09821.
    "smooth_tv": _TRUNCATE | {"threshold": UNCAPPED, "region": "smooth", "region_threshold": 12.5},
    # M2PO, arXiv 2510.01161: Algorithm 1, and the form of AReaL.
    "m2po": _MOMENT | {"region_sides": "away"},
    "m2po_areal": _MOMENT,
    # Trust Region Masking, arXiv 2512.23075. The paper leaves the number open.
    "max_k3": {"reject_max_k3": 0.05},
    # ``seq_logprob_error_threshold`` of NeMo-RL and tunix.
    "abs_ratio": {"reject_abs_ratio": 2.0},
}
"""The fields of each preset, with the numbers of its source."""

if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal["none", *PRESETS]


@dataclass(frozen=True)
class CorrectionConfig:
    """The correction of the loss for the mismatch between trainer and rollout engine."""

    preset: Preset = "none"
    """A named combination of the other fields. With a preset, the other fields must keep their defaults. Only part and
    score_centering may be set with it."""
    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """The importance ratio that weights the loss of a token. token: its own ratio. sequence: the product over its
    sequence. geometric: the n-th root of that product, for n tokens. none: no weights."""
    mode: Literal["truncate", "mask", "band", "gate"] = "truncate"
    """truncate (TIS): min(ratio, threshold). mask (MIS): 0 above the threshold. band: 0 outside threshold_low ..
    threshold. gate: the token's own ratio, or 0 if the ratio of its sequence (level sequence or geometric) is outside.
    A token of weight 0 still counts in the denominator (equation 6)."""
    threshold: float = 2.0
    """Upper bound of the ratio."""
    threshold_low: float = 0.0
    """Lower bound of the ratio. Only for modes band and gate."""
    part: Literal["whole", "numerics", "drift"] = "whole"
    """The part of the log-ratio that weights and rejections use. whole: trainer against rollout. With stale rollouts it
    has two parts. numerics: the trainer's forward with the policy version that sampled the token, against the rollout.
    drift: the current policy against that version. numerics and drift cost one forward of the batch for each version
    in it."""
    normalize: bool = False
    """Divide the weights by the mean weight of the batch."""
    reject_k3: float = 0.0
    """Drop a sequence if its mean over tokens of exp(lr) - lr - 1 is above this value (nats), where lr is the
    log-ratio. 0: off."""
    reject_geometric_low: float = 0.0
    """Drop a sequence if its exp(mean lr) is below this value. 0: no lower bound."""
    reject_geometric_high: float = 0.0
    """Drop a sequence if its exp(mean lr) is above this value. 0 turns both bounds off."""
    veto: float = 0.0
    """Drop a sequence if the ratio of any of its tokens is below this value. 0: off."""
    reject_max_k3: float = 0.0
    """Drop a sequence if exp(lr) - lr - 1 of any of its tokens is above this value (nats). 0: off."""
    reject_abs_ratio: float = 0.0
    """Drop a sequence if its mean over tokens of exp(abs(lr)) is above this value, which is at least 1. 0: off."""
    region: Literal["none", "tv", "kl", "kpop", "smooth", "moment"] = "none"
    """Trust region of single tokens, with p the trained policy's probability of the token and q the rollout's. A token
    at a distance above region_threshold weighs 0. tv: the distance is abs(p - q). kl: it is KL(q || p) of the events
    "this token" and "any other". kpop: it is the larger of KL(q || p) and KL(p || q). smooth: no mask, but weights are
    multiplied by 1 - (p - q) / region_threshold, or by 1 + (p - q) / region_threshold if the advantage is not
    positive. moment (M2PO): the distance is (log p - log q)^2, with p before the first update. The largest distances
    of the batch are outside, so many that the mean of the others is at most region_threshold. region_sides away is the
    paper's form: only tokens that move away count. both is AReaL's: all tokens count, and the ones outside
    leave the denominator. It costs one forward of the batch, unless there are several updates."""
    region_threshold: float = 0.0
    """Largest distance inside the region: a probability, or nats for kl and kpop. Largest mean distance for moment
    (nats^2). 0 without a region."""
    region_sides: Literal["both", "away"] = "both"
    """both: every token outside the region weighs 0. away: a token outside weighs 0 only if its update would move it
    further away. That is the case if p is above q and the advantage is positive, or p is below q and the advantage is
    not positive."""
    region_over: Literal["token", "tops"] = "token"
    """Distribution whose distance is taken. token: the sampled token and all others together. tops: the sampler's
    likeliest tokens, the sampled token, and all others together. tops needs ``rollout.top_logprobs`` or
    ``rollout.top_k``."""
    score_centering: bool = False
    """Subtract the expected score under the sampler from the gradient of each token (arXiv 2609.20807). It may be
    set with a preset. It needs ``rollout.top_logprobs`` or ``rollout.top_k``."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 0, "reject_k3", "reject_max_k3", "reject_abs_ratio", "veto")
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        others = [name for name in changed if name not in ("preset", "part", "score_centering")]
        if self.preset != "none" and others:
            raise ValueError(f"preset {self.preset!r} sets the other fields, got {', '.join(others)} as well")
        if self.part != "whole" and not others and self.preset == "none":
            raise ValueError(f"part {self.part!r} does nothing without weights or a rejection")
        idle = [name for name in changed if name in ("mode", "threshold", "threshold_low", "normalize")]
        if self.level == "none" and idle:
            raise ValueError(f"{', '.join(idle)} do nothing at level 'none'; choose token, sequence or geometric")
        if not 0.0 < self.threshold < np.inf:
            raise ValueError(f"threshold must be finite and above 0, got {self.threshold}")
        if not 0.0 <= self.threshold_low <= self.threshold or (self.threshold_low and self.mode not in BANDS):
            raise ValueError(
                "threshold_low must be in 0 .. threshold, and 0 unless mode is band or gate, "
                f"got {self.threshold_low} with threshold {self.threshold}, mode {self.mode}"
            )
        if self.mode == "gate" and self.level == "token":
            raise ValueError("mode gate needs level sequence or geometric, got token")
        if not 0.0 <= self.reject_geometric_low <= self.reject_geometric_high:
            raise ValueError(
                "reject_geometric_low must be in 0 .. reject_geometric_high, "
                f"got {self.reject_geometric_low} and {self.reject_geometric_high}"
            )
        self._check_region()
        self._check_centering()

    def _check_region(self) -> None:
        """Raises ValueError if the fields of the region do not fit together."""
        if self.reject_abs_ratio and not self.reject_abs_ratio >= 1:
            raise ValueError(f"reject_abs_ratio must be 0 or at least 1, got {self.reject_abs_ratio}")
        region = (self.region_threshold, self.region_sides, self.region_over)
        if self.region == "none" and region != (0.0, "both", "token"):
            raise ValueError("region_threshold, region_sides and region_over do nothing without a region")
        if self.region != "none" and not 0.0 < self.region_threshold < np.inf:
            raise ValueError(f"region_threshold must be finite and above 0, got {self.region_threshold}")
        if self.region == "smooth" and self.region_sides != "both":
            raise ValueError("region smooth has no sides: region_sides must be both, got away")
        if self.region_over == "tops" and self.region not in ("tv", "kl"):
            raise ValueError(f"region_over tops is for the regions tv and kl, got {self.region}")
        if self.region_over == "tops" and self.part != "whole":
            raise ValueError(
                f"region_over tops needs part whole, got {self.part}: older policies' likeliest tokens are not kept"
            )

    def _check_centering(self) -> None:
        """Raises ValueError if score centering is combined with a correction whose expectation is not known."""
        config = self.resolved()
        if not config.score_centering:
            return
        if config.level in ("sequence", "geometric"):
            raise ValueError(
                f"score_centering needs level token or none, got {config.level}: "
                "the expectation of a sequence's weight is not known"
            )
        if config.rejections:
            fields = (field.name for field in dataclasses.fields(config))
            names = ", ".join(name for name in fields if name.startswith(("reject_", "veto")) and getattr(config, name))
            raise ValueError(
                f"score_centering cannot be combined with a rejection of sequences, got {names}: "
                "the expectation over the kept sequences is not known"
            )
        if config.cuts_batch:
            raise ValueError(
                "score_centering cannot be combined with region moment: the expectation over the tokens inside is not "
                "known"
            )
        if config.part != "whole":
            raise ValueError(
                f"score_centering needs part whole, got {config.part}: older policies' likeliest tokens are not kept"
            )

    def resolved(self) -> CorrectionConfig:
        """Returns the same correction with the fields of its preset filled in."""
        if self.preset == "none":
            return self
        return CorrectionConfig(**PRESETS[self.preset], part=self.part, score_centering=self.score_centering)

    @property
    def rejections(self) -> tuple[tuple[Any, Any], ...]:
        """The pairs (statistic, threshold) of the rejections that are on, in the form of ``rejection_mask``."""
        config = self.resolved()
        bounds = (config.reject_geometric_low, config.reject_geometric_high)
        every: tuple[tuple[Any, Any], ...] = (
            ("k3", config.reject_k3),
            ("max_k3", config.reject_max_k3),
            ("abs_ratio", config.reject_abs_ratio),
            ("geometric", bounds),
            ("veto", config.veto),
        )
        return tuple((statistic, threshold) for statistic, threshold in every if np.any(threshold))

    @property
    def weighting(self) -> tuple[Any, Any, Any] | None:
        """The arguments level, mode and threshold of ``importance_weights``; None at level "none"."""
        config = self.resolved()
        if config.level == "none":
            return None
        bounds = (config.threshold_low, config.threshold)
        return config.level, config.mode, bounds if config.mode in BANDS else config.threshold

    @property
    def trust_region(self) -> Region | None:
        """The trust region of single tokens, or None."""
        config = self.resolved()
        if config.region == "none":
            return None
        sides, over = config.region_sides == "away", config.region_over == "tops"
        return Region(config.region, config.region_threshold, one_sided=sides, over_tops=over)

    @property
    def cuts_batch(self) -> bool:
        """Whether the bound of the trust region depends on the whole batch."""
        return self.resolved().region == "moment"

    @property
    def is_off(self) -> bool:
        """Whether this correction changes nothing."""
        config = self.resolved()
        return not (config.weighting or config.rejections or config.trust_region or config.score_centering)

    @property
    def needs_tops(self) -> bool:
        """Whether the loss needs the trainer's log-probabilities of the sampler's likeliest tokens."""
        config = self.resolved()
        return config.score_centering or config.region_over == "tops"


def correct(
    config: CorrectionConfig,
    logprobs: Float[Array, "b t"],
    rollout_logprobs: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    *,
    sequence_ids: Int[Array, "b t"],
    num_sequences: int,
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"], Statistics]:
    """Computes the correction of one micro-batch, without gradient.

    Args:
      config: The correction.
      logprobs: The trainer's log-probabilities before the first update on the batch (nats).
      rollout_logprobs: The log-probabilities of the rollout engine (nats).
      mask: The tokens in the loss.
      sequence_ids, num_sequences: The index of each token's sequence, which lies whole in one row, and their number.

    Returns:
      The weights, the mask and the statistics. The weights are float32 and not normalised (``gradient_divisor`` does
      that). They are 0 outside the mask and, at every level but "none", at tokens with a log-probability that is not
      finite. The mask omits each sequence that fails a rejection. A sequence without a finite token fails every
      rejection. The statistics of micro-batches can be merged, and ``finalize_correction`` turns them into metrics.
    """
    config = config.resolved()
    arrays = map(jnp.asarray, (logprobs, rollout_logprobs, mask))
    tokens = read_tokens(*arrays, sequence_ids=sequence_ids, num_sequences=num_sequences)
    weights, kept, statistics = correct_tokens(tokens, config.weighting, config.rejections)
    return weights.astype(jnp.float32), kept, statistics


def gradient_divisor(config: CorrectionConfig, statistics: Statistics) -> Float[Array, ""]:
    """Returns the divisor of the batch's gradient: with ``normalize`` the mean weight, if that is not 0; else 1."""
    if not config.resolved().normalize:
        return jnp.float32(1.0)
    mean = finalize_correction(statistics)["weight_mean"]
    return jnp.where(mean > 0, mean, 1.0)
