"""The settings of the proof that servers use the published weights."""

from __future__ import annotations

from dataclasses import dataclass

from rljax.errors import check_at_least, check_finite


@dataclass(frozen=True)
class VerifyConfig:
    """The settings of the check that a server computes with the published weights.

    The server generates from probe prompts, and the trainer scores the same tokens. The bits of the weights are
    verified at every publish, too, and need no settings.
    """

    prompts: int = 4
    """The number of probe prompts of one measurement. They are made from prompts of the run. There are at least 16
    for a mixture of experts, for a server that rounds to 8 bits as ``rollout.server_form`` says, and without a run."""
    tokens: int = 16
    """The number of tokens generated from each prompt. The statistic is a mean over ``prompts * tokens`` tokens."""
    factor: float = 4.0
    """The band as a multiple of the worst measurement at the first publish. Each dtype has a lowest and a highest
    band."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompts", "tokens", "factor")
        check_finite(self, "factor")
