"""The configured correction for mismatch, and its use on a micro-batch.

The weights and rejections are computed by ``rljax.mismatch.correction``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rljax.errors import check_at_least, check_choices
from rljax.mismatch import Statistics, read_tokens
from rljax.mismatch.correction import correct_tokens, finalize_correction

Preset = Literal["none", "token_tis", "token_mis", "sequence_tis", "sequence_mis", "geometric_band", "icepop", "vexact"]

PRESETS: dict[str, dict[str, Any]] = {
    "token_tis": {"level": "token", "mode": "truncate", "threshold": 2.0},
    "token_mis": {"level": "token", "mode": "mask", "threshold": 2.0},
    "sequence_tis": {"level": "sequence", "mode": "truncate", "threshold": 2.0},
    "sequence_mis": {"level": "sequence", "mode": "mask", "threshold": 2.0},
    "geometric_band": {"level": "geometric", "mode": "band", "threshold_low": 0.99, "threshold": 1.01},
    "icepop": {"level": "token", "mode": "band", "threshold_low": 0.5, "threshold": 5.0},
    "vexact": {"level": "token", "mode": "truncate", "threshold": 2.0, "reject_k3": 1e-3},
}
"""The fields of each preset: equations 4-6 of arXiv 2602.01826, IcePop's band, the best remedy of arXiv 2605.14220."""


@dataclass(frozen=True)
class CorrectionConfig:
    """The correction of the loss for the mismatch between trainer and rollout engine."""

    preset: Preset = "none"
    """A named combination of the other fields. With a preset, the other fields must keep their defaults."""
    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """The importance ratio that weights the loss of a token. token: its own ratio. sequence: the product over its
    sequence. geometric: the n-th root of that product, for n tokens. none: no weights."""
    mode: Literal["truncate", "mask", "band"] = "truncate"
    """truncate (TIS): min(ratio, threshold). mask (MIS): 0 above the threshold. band: 0 outside threshold_low ..
    threshold. A token of weight 0 still counts in the denominator (equation 6)."""
    threshold: float = 2.0
    """Upper bound of the ratio."""
    threshold_low: float = 0.0
    """Lower bound of the ratio. Only for mode band."""
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
    score_centering: bool = False
    """Subtract the expected score under the sampler from the loss of each token, over the sampler's likeliest tokens
    (arXiv 2609.20807). It needs ``rollout.top_logprobs`` or ``rollout.top_k``."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 0, "reject_k3", "veto")
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        others = [name for name in changed if name not in ("preset", "part")]
        if self.preset != "none" and others:
            raise ValueError(f"preset {self.preset!r} sets the other fields, got {', '.join(others)} as well")
        if self.part != "whole" and not others and self.preset == "none":
            raise ValueError(f"part {self.part!r} does nothing without weights or a rejection")
        idle = [name for name in changed if name in ("mode", "threshold", "threshold_low", "normalize")]
        if self.level == "none" and idle:
            raise ValueError(f"{', '.join(idle)} do nothing at level 'none'; choose token, sequence or geometric")
        if not 0.0 < self.threshold < np.inf:
            raise ValueError(f"threshold must be finite and above 0, got {self.threshold}")
        if not 0.0 <= self.threshold_low <= self.threshold or (self.threshold_low and self.mode != "band"):
            raise ValueError(
                "threshold_low must be in 0 .. threshold, and 0 unless mode is band, "
                f"got {self.threshold_low} with threshold {self.threshold}, mode {self.mode}"
            )
        if not 0.0 <= self.reject_geometric_low <= self.reject_geometric_high:
            raise ValueError(
                "reject_geometric_low must be in 0 .. reject_geometric_high, "
                f"got {self.reject_geometric_low} and {self.reject_geometric_high}"
            )

    def resolved(self) -> CorrectionConfig:
        """Returns the same correction with the fields of its preset filled in."""
        return self if self.preset == "none" else CorrectionConfig(**PRESETS[self.preset], part=self.part)

    @property
    def rejections(self) -> tuple[tuple[Any, Any], ...]:
        """The statistic and threshold of each rejection that is on, as ``rejection_mask`` takes them."""
        config = self.resolved()
        bounds = (config.reject_geometric_low, config.reject_geometric_high)
        every = (("k3", config.reject_k3), ("geometric", bounds), ("veto", config.veto))
        return tuple((statistic, threshold) for statistic, threshold in every if np.any(threshold))

    @property
    def is_off(self) -> bool:
        """Whether this correction changes nothing."""
        config = self.resolved()
        return config.level == "none" and not self.rejections and not config.score_centering

    @property
    def needs_tops(self) -> bool:
        """Whether the loss needs the trainer's log-probabilities of the sampler's likeliest tokens."""
        return self.resolved().score_centering

    @property
    def needs_collision(self) -> bool:
        """Whether the loss needs the sum of squared probabilities at each token. No correction does."""
        return False


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
      sequence_ids: The index of each token's sequence in the batch. Each sequence lies whole in one row.
      num_sequences: The number of sequences in the batch (static).

    Returns:
      The weights, the mask and the statistics. The weights are float32 and not normalised (``gradient_divisor`` does
      that). They are 0 outside the mask and, at every level but "none", at tokens that are not finite on either side.
      The mask omits the sequences that fail any rejection; one without a finite token fails all of them. The
      statistics may be merged, and ``finalize_correction`` reads them.
    """
    config = config.resolved()
    arrays = map(jnp.asarray, (logprobs, rollout_logprobs, mask))
    tokens = read_tokens(*arrays, sequence_ids=sequence_ids, num_sequences=num_sequences)
    threshold = (config.threshold_low, config.threshold) if config.mode == "band" else config.threshold
    weighting = None if config.level == "none" else (config.level, config.mode, threshold)
    weights, kept, statistics = correct_tokens(tokens, weighting, config.rejections)
    return weights.astype(jnp.float32), kept, statistics


def gradient_divisor(config: CorrectionConfig, statistics: Statistics) -> Float[Array, ""]:
    """Returns the divisor of the batch's gradient: with ``normalize`` the mean weight, if that is not 0; else 1."""
    if not config.resolved().normalize:
        return jnp.float32(1.0)
    mean = finalize_correction(statistics)["weight_mean"]
    return jnp.where(mean > 0, mean, 1.0)
