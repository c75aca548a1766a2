"""Corrections for mismatch as one value of the configuration, and their statistics over micro-batches.

The weights and rejections themselves are ``rljax.mismatch.correction``'s.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rljax.algorithms.aggregation import sequences_of
from rljax.mismatch import importance_weights, rejection_mask
from rljax.mismatch.accurate import Total, add_totals, total_over, value_of
from rljax.mismatch.sequences import Sequences, sequence_sums
from rljax.mismatch.tokens import read_tokens

Preset = Literal[
    "none",
    "token_tis",
    "token_mis",
    "sequence_tis",
    "sequence_mis",
    "geometric_band",
    "icepop",
    "vexact",
]

PRESETS: dict[str, dict[str, Any]] = {
    "token_tis": {"level": "token", "mode": "truncate", "threshold": 2.0},
    "token_mis": {"level": "token", "mode": "mask", "threshold": 2.0},
    "sequence_tis": {"level": "sequence", "mode": "truncate", "threshold": 2.0},
    "sequence_mis": {"level": "sequence", "mode": "mask", "threshold": 2.0},
    "geometric_band": {"level": "geometric", "mode": "band", "threshold_low": 0.99, "threshold": 1.01},
    "icepop": {"level": "token", "mode": "band", "threshold_low": 0.5, "threshold": 5.0},
    "vexact": {"level": "token", "mode": "truncate", "threshold": 2.0, "reject_k3": 1e-3},
}
"""What each preset fills in: equations 4-6 of arXiv 2602.01826, IcePop's band, the best remedy of arXiv 2605.14220."""


@dataclass(frozen=True)
class CorrectionConfig:
    """What the loss does about the mismatch between trainer and rollout engine."""

    preset: Preset = "none"
    """A named combination of the other fields, which must then keep their defaults."""
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

    def __post_init__(self) -> None:
        choices = {
            "preset": get_args(Preset),
            "level": ("none", "token", "sequence", "geometric"),
            "mode": ("truncate", "mask", "band"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        if self.preset != "none" and changed != ["preset"]:
            raise ValueError(f"preset {self.preset!r} sets the other fields, got {', '.join(changed[1:])} as well")
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
        if not (self.reject_k3 >= 0.0 and self.veto >= 0.0):
            raise ValueError(f"reject_k3 and veto must not be negative, got {self.reject_k3} and {self.veto}")
        if not 0.0 <= self.reject_geometric_low <= self.reject_geometric_high:
            raise ValueError(
                "reject_geometric_low must be in 0 .. reject_geometric_high, "
                f"got {self.reject_geometric_low} and {self.reject_geometric_high}"
            )

    def resolved(self) -> CorrectionConfig:
        """The same correction with its preset spelled out."""
        return self if self.preset == "none" else CorrectionConfig(**PRESETS[self.preset])

    @property
    def rejects(self) -> bool:
        """Whether it may drop whole sequences."""
        config = self.resolved()
        return bool(config.reject_k3 or config.reject_geometric_high or config.veto)

    @property
    def is_off(self) -> bool:
        """Whether it changes nothing."""
        return self.resolved().level == "none" and not self.rejects


class CorrectionTotals(NamedTuple):
    """Mergeable statistics of a correction; units are sequences at the levels sequence and geometric, else tokens."""

    number: Any  # shape=(), int32: units with a ratio
    weight: Total  # shape=(), float: sum of their weights
    weight_squared: Total  # shape=(), float
    weight_max: Any  # shape=(), float; 0 without units
    changed: Any  # shape=(), int32: units whose ratio was truncated or zeroed
    sequences: Any  # shape=(), int32: sequences with a token in the mask
    rejected_sequences: Any  # shape=(), int32
    tokens: Any  # shape=(), int32: tokens in the mask
    rejected_tokens: Any  # shape=(), int32
    nonfinite: Any  # shape=(), int32: tokens in the mask not finite on either side


def correct(
    config: CorrectionConfig,
    logprobs: Float[Array, "b t"],
    rollout_logprobs: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    *,
    sequence_ids: Int[Array, "b t"],
    num_sequences: int,
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"], CorrectionTotals]:
    """The correction of one micro-batch, without gradient.

    Args:
      config: what to do.
      logprobs: of the trainer before the first update on the batch (nats).
      rollout_logprobs: of the rollout engine (nats).
      mask: tokens in the loss.
      sequence_ids: index of each token's sequence in the batch; a sequence lies whole inside one row.
      num_sequences: sequences of the batch (static).

    Returns:
      The weights, float32, never normalised (see ``gradient_divisor``): 0 outside the mask and, at every level but
      "none", at tokens not finite on either side. The mask without the sequences that fail any of the rejections (one
      without a finite token fails them all). And the totals, whose weights are those of all sequences, the rejected
      included, as in ``importance_weights``.
    """
    config = config.resolved()
    logprobs, rollout_logprobs = jax.lax.stop_gradient((jnp.asarray(logprobs), jnp.asarray(rollout_logprobs)))
    mask = jnp.asarray(mask) != 0
    arrays = (logprobs, rollout_logprobs, mask)
    where: dict[str, Any] = {"sequence_ids": sequence_ids, "num_sequences": num_sequences}
    tokens = read_tokens(*arrays)
    sequences = sequences_of(mask, **where)
    changed = jnp.int32(0)
    if config.level == "none":
        weights, unit_weights, units = mask.astype(jnp.float32), mask.astype(jnp.float32), tokens.valid
    else:
        band = (config.threshold_low, config.threshold)
        threshold = band if config.mode == "band" else config.threshold
        weights, stats = importance_weights(*arrays, level=config.level, mode=config.mode, threshold=threshold, **where)
        unit_weights, units = _units(config.level, weights, tokens.valid, sequences)
        # The share is a rounded quotient of two counts, so this is exact below four million units.
        changed = jnp.round(stats["changed_fraction"] * jnp.sum(units)).astype(jnp.int32)
    kept = _kept(config, arrays, where)
    unit_weights = jnp.where(units, unit_weights, 0)
    totals = CorrectionTotals(
        number=_count(units),
        weight=total_over(jnp, unit_weights, (0, 1)),
        weight_squared=total_over(jnp, unit_weights * unit_weights, (0, 1)),
        weight_max=jnp.max(unit_weights, initial=0),
        changed=changed,
        sequences=_count(sequences.slot_valid),
        rejected_sequences=_count(sequences.slot_valid & ~kept),
        tokens=_count(mask),
        rejected_tokens=_count(mask & ~kept),
        nonfinite=_count(tokens.nonfinite),
    )
    return weights.astype(jnp.float32), kept, totals


def _units(level: str, weights: Any, valid: Any, sequences: Sequences) -> tuple[Any, Any]:
    """One weight a unit, [b, t], and where: at every valid token, or at the last token of a sequence with any."""
    if level == "token":
        return weights, valid
    number = sequence_sums(sequences, valid.astype(weights.dtype)[None])[0]
    sums = sequence_sums(sequences, weights[None])[0]
    return sums / jnp.maximum(number, 1), sequences.slot_valid & (number > 0)


def _kept(config: CorrectionConfig, arrays: Any, where: dict[str, Any]) -> Any:
    """The mask without rejected sequences, [b, t] bool."""
    kept = arrays[2]
    tests: list[tuple[Any, Any]] = []
    if config.reject_k3:
        tests.append(("k3", config.reject_k3))
    if config.reject_geometric_high:
        tests.append(("geometric", (config.reject_geometric_low, config.reject_geometric_high)))
    if config.veto:
        tests.append(("veto", config.veto))
    for statistic, threshold in tests:
        kept &= rejection_mask(*arrays, statistic=statistic, threshold=threshold, **where)[0]
    return kept


def _count(flags: Any) -> Any:
    return jnp.sum(flags, dtype=np.int32)


def merge_correction(a: CorrectionTotals, b: CorrectionTotals) -> CorrectionTotals:
    """The totals of both; associative and commutative up to rounding."""
    totals = [
        add_totals(x, y) if isinstance(x, Total) else jnp.maximum(x, y) if name == "weight_max" else x + y
        for name, x, y in zip(CorrectionTotals._fields, a, b, strict=True)
    ]
    return CorrectionTotals._make(totals)


def gradient_divisor(config: CorrectionConfig, totals: CorrectionTotals) -> Float[Array, ""]:
    """What the batch's gradient is divided by: with ``normalize`` the mean weight of its units, unless 0; else 1."""
    if not config.resolved().normalize:
        return jnp.float32(1.0)
    mean = finalize_correction(totals)["weight_mean"]
    return jnp.where(mean > 0, mean, 1.0)


def finalize_correction(totals: CorrectionTotals) -> dict[str, Any]:
    """Scalars of a batch, all 0 without tokens.

    ``weight_mean`` (before normalising), ``weight_max``, ``changed_fraction`` and ``effective_sample_size`` (a share of
    the units) as in ``importance_weights``; ``rejected_sequence_fraction``, ``rejected_token_fraction``,
    ``nonfinite_count``.
    """
    number = jnp.maximum(totals.number, 1)
    mean = value_of(totals.weight) / number
    square = value_of(totals.weight_squared) / number
    return {
        "weight_mean": mean,
        "weight_max": totals.weight_max,
        "changed_fraction": totals.changed / number,
        "effective_sample_size": jnp.where(square > 0, mean * mean / jnp.where(square > 0, square, 1), 0),
        "rejected_sequence_fraction": totals.rejected_sequences / jnp.maximum(totals.sequences, 1),
        "rejected_token_fraction": totals.rejected_tokens / jnp.maximum(totals.tokens, 1),
        "nonfinite_count": totals.nonfinite,
    }
