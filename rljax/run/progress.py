"""The counters of a run, and the checks that a checkpoint belongs to it: the JSON part of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from rljax.mismatch.diagnosis import split_sum_rise
from rljax.policy.config import PolicyConfig
from rljax.record.rows import Row

GRAD_NORM_EMA_DECAY = 0.9
"""The decay of the moving average of the gradient norm, per update."""


@dataclasses.dataclass
class Progress:
    """The counters of a run at its newest finished step.

    Attributes:
      step: The number of finished steps.
      policy_version: The version of the policy that the last of them made.
      grad_norm_ema: The exponential moving average of the gradient norm. None: no norm was observed.
      reference: The sums of the mismatch over the first steps of the run.
      stopped_by: The lines of the guard that ended the run.
    """

    step: int = 0
    policy_version: int = 0
    grad_norm_ema: float | None = None
    reference: dict[str, float] = dataclasses.field(default_factory=dict)
    stopped_by: list[str] = dataclasses.field(default_factory=list)

    def observe(self, row: Row, *, has_loss: bool, reference_steps: int) -> Row:
        """Observes the row of an update.

        Args:
          row: The metrics of the step so far, those of the update among them.
          has_loss: Whether any response carried loss; only then does the gradient norm count.
          reference_steps: The number of first steps that are the reference for the rise of the mismatch.

        Returns:
          The keys that the row gains: ``optimizer/grad_norm_ema`` and ``mismatch/sum_*``.
        """
        if has_loss:
            self.observe_grad_norm(row["optimizer/grad_norm"])
        return self.sum_rise(row, reference_steps) | {"optimizer/grad_norm_ema": self.grad_norm_ema}

    def observe_grad_norm(self, norm: float) -> None:
        """Adds a gradient norm to the moving average, unless it is not finite."""
        if not np.isfinite(norm):
            return
        ema = self.grad_norm_ema
        self.grad_norm_ema = norm if ema is None else GRAD_NORM_EMA_DECAY * ema + (1 - GRAD_NORM_EMA_DECAY) * norm

    def sum_rise(self, row: Row, reference_steps: int) -> Row:
        """Splits the rise of ``mismatch/log_ppl_abs_diff_sum`` since the first steps; longer responses are one part.

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
        """Returns the counters as JSON, without ``stopped_by``, which ends with the process."""
        return {
            "step": self.step,
            "policy_version": self.policy_version,
            "grad_norm_ema": self.grad_norm_ema,
            "mismatch_reference": self.reference,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Progress:
        """Makes the counters from :meth:`state_dict`; other keys are ignored."""
        return cls(
            int(state["step"]), int(state["policy_version"]), state["grad_norm_ema"], state["mismatch_reference"]
        )


def policy_record(policy: PolicyConfig) -> dict[str, Any]:
    """Returns the policy's shape as JSON."""
    return json.loads(json.dumps(dataclasses.asdict(policy)))


def check_policy(recorded: dict[str, Any], policy: PolicyConfig, path: str) -> None:
    """Raises ValueError if a checkpoint was taken of another model.

    Args:
      recorded: The ``policy_record`` in the checkpoint.
      policy: The shape of the policy of this run.
      path: The directory of the model, for the message.
    """
    now = policy_record(policy)
    differing = [f"{key} ({recorded.get(key)} there, {now[key]} now)" for key in now if recorded.get(key) != now[key]]
    if differing:
        raise ValueError(f"the checkpoint is of another model than {path}: {', '.join(differing)}")


def check_fingerprints(recorded: dict[str, str], now: dict[str, str], names: dict[str, str]) -> None:
    """Raises ValueError if the frozen weights or the training problems differ from those of the checkpoint.

    Args:
      recorded: The checksums in the checkpoint; {} in one of an older rljax, which is not checked.
      now: The checksums of this run under ``reference``, ``base`` and ``problems``.
      names: The path from which each of them was read, for the message.
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
