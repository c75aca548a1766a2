"""Where a run stands: the host's part of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from rljax.mismatch.diagnosis import split_sum_rise
from rljax.policy.config import PolicyConfig
from rljax.record.rows import Row

GRAD_NORM_EMA_DECAY = 0.9


@dataclasses.dataclass
class Progress:
    """What a checkpoint holds besides the device state and the states of the components."""

    step: int = 0
    policy_version: int = 0
    grad_norm_ema: float | None = None
    reference: dict[str, float] = dataclasses.field(default_factory=dict)
    """Sums of the mismatch over the run's first steps."""
    stopped_by: list[str] = dataclasses.field(default_factory=list)
    """The guard's lines that ended the run."""

    def observe_grad_norm(self, norm: float) -> None:
        """Adds the gradient norm of an update to its exponential moving average; one that is not finite is left out."""
        if not np.isfinite(norm):
            return
        ema = self.grad_norm_ema
        self.grad_norm_ema = norm if ema is None else GRAD_NORM_EMA_DECAY * ema + (1 - GRAD_NORM_EMA_DECAY) * norm

    def sum_rise(self, row: Row, reference_steps: int) -> Row:
        """How much of the rise of ``mismatch/log_ppl_abs_diff_sum`` since the run's first steps is longer responses.

        Each of the first ``reference_steps`` rows is added to the reference instead, and gives nothing.
        """
        names = ("token_count", "sequence_count", "log_ppl_abs_diff_sum")
        tokens, sequences, summed = (row[f"mismatch/{name}"] for name in names)
        reference = self.reference
        if reference.get("steps", 0) < reference_steps:
            values = {"steps": 1, "token_count": tokens, "sequence_count": sequences, "gap": summed * sequences}
            for name, value in values.items():
                reference[name] = reference.get(name, 0) + value
            return {}
        before = reference | {"log_ppl_abs_diff_sum": reference["gap"] / max(reference["sequence_count"], 1)}
        after = dict(zip(names, (tokens, sequences, summed), strict=True))
        return {f"mismatch/sum_{name}": value for name, value in split_sum_rise(before, after).items()}

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable; without ``stopped_by``, which ends with the process."""
        return {
            "step": self.step,
            "policy_version": self.policy_version,
            "grad_norm_ema": self.grad_norm_ema,
            "mismatch_reference": self.reference,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Progress:
        """The inverse of :meth:`state_dict`; other keys are ignored."""
        return cls(
            int(state["step"]), int(state["policy_version"]), state["grad_norm_ema"], state["mismatch_reference"]
        )


def policy_record(policy: PolicyConfig) -> dict[str, Any]:
    """The policy's shape as JSON has it."""
    return json.loads(json.dumps(dataclasses.asdict(policy)))


def check_policy(recorded: dict[str, Any], policy: PolicyConfig, path: str) -> None:
    """Raises ValueError when the checkpoint was taken of another model than ``policy``, which ``path`` holds."""
    now = policy_record(policy)
    differing = [f"{key} ({recorded.get(key)} there, {now[key]} now)" for key in now if recorded.get(key) != now[key]]
    if differing:
        raise ValueError(f"the checkpoint is of another model than {path}: {', '.join(differing)}")


def check_fingerprints(recorded: dict[str, str], now: dict[str, str], names: dict[str, str]) -> None:
    """Raises ValueError when frozen weights or the training problems are not those of the checkpoint.

    Args:
      recorded: in the checkpoint; {} in one of an older rljax, which is not checked.
      now: of this run, under ``reference``, ``base`` and ``problems``.
      names: what each of them was read from.
    """
    remedies = {
        "reference": "the reference policy of loss.kl has other weights than before: give the model that the run began "
        "with as model.path",
        "base": "the frozen model under the adapters has other weights than before: give the model that the run began "
        "with as model.path",
        "problems": "the training problems or their order are not those before: put back the data that the run began "
        "with",
    }
    for kind, remedy in remedies.items():
        if kind in recorded and kind in now and recorded[kind] != now[kind]:
            raise ValueError(f"{names[kind]}: {remedy}, or give another run.dir")
