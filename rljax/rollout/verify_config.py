"""The settings of the proof that servers use the published weights."""

from __future__ import annotations

from dataclasses import dataclass

from rljax.errors import check_at_least, check_finite


@dataclass(frozen=True)
class DtypeBands:
    """Bands of the mean of |server - trainer| over probe tokens, by the dtype of the server (nats).

    A band is the largest mean that passes the verification.
    """

    bfloat16: float
    """The band of a server in bfloat16 (nats)."""
    float16: float
    """The band of a server in float16 (nats)."""
    float32: float
    """The band of a server in float32 (nats)."""

    def __post_init__(self) -> None:
        check_finite(self, "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class VerifyConfig:
    """The settings of the check that a server computes with the published weights.

    The server generates from probe prompts, and the trainer scores the same tokens. The bits of the weights are
    verified at every publish, too, and need no settings.
    """

    prompts: int = 4
    """The number of probe prompts of one measurement. They are made from prompts of the run."""
    tokens: int = 32
    """The number of tokens generated from each prompt. The statistic is a mean over ``prompts * tokens`` tokens."""
    rounds: int = 3
    """The number of times that the probes are sampled at the first publish, which calibrates the band."""
    factor: float = 4.0
    """The band as a multiple of the worst round of the calibration. It stays between floor and ceiling of the dtype."""
    floors: DtypeBands = DtypeBands(2e-2, 2.5e-3, 1e-5)
    """The lowest band of each dtype. There is one, because the mismatch of equal weights changes as a policy learns. A
    tiny random model showed 1.2e-2 in bfloat16, 1.6e-3 in float16 and 9e-7 in float32."""
    ceilings: DtypeBands = DtypeBands(8e-2, 1e-2, 1e-3)
    """The highest band of each dtype. At the first publish a server above it is refused."""
    mixture_factor: float = 3.0
    """The highest bands of a mixture of experts, as a multiple of ``ceilings``. They are wider because a different
    rounding in server and trainer sends some tokens to other experts."""
    rounded_floor: float = 0.1
    """The lowest band of a server that rounds to 8 bits as ``rollout.server_form`` says, in every dtype (nats)."""
    rounded_ceiling: float = 0.6
    """The highest band of a server that rounds to 8 bits as ``rollout.server_form`` says, in every dtype (nats)."""
    rounded_prompts: int = 16
    """The number of probe prompts of one measurement of a mixture of experts, or of a server that rounds to 8 bits as
    ``rollout.server_form`` says. They need more prompts, because a few of their tokens are far off."""
    rounded_own_floor: float = 1e-3
    """The lowest band of the distance between two scores that a server which rounds to 8 bits gives to the same tokens
    (nats). It scores them as it generates them, and again as a prompt, which reads nothing from its prefix cache. A
    third of the probes have a smaller distance than the one that is compared."""
    seed: int = 0
    """The seed of the choice of the probe prompts."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompts", "rounded_prompts", "tokens", "rounds", "factor", "mixture_factor")
        check_at_least(self, 0, "seed")
        check_finite(self, "factor", "mixture_factor", "rounded_floor", "rounded_ceiling", "rounded_own_floor")

    def limits(self, dtype: str, *, mixture: bool, rounded: bool = False) -> tuple[float, float]:
        """Returns the lowest and highest band (nats) of a server in ``dtype``.

        ``mixture``: Whether it serves a mixture of experts. ``rounded``: Whether it rounds weights or cache to 8 bits.
        """
        wider = self.mixture_factor if mixture else 1.0
        if rounded:
            return self.rounded_floor, self.rounded_ceiling * wider
        return getattr(self.floors, dtype), getattr(self.ceilings, dtype) * wider
