"""The length-triggered learning rate for torch: a scheduler, a mean over ranks, and a callback for transformers.

This module needs torch. ``LengthTriggeredCallback`` needs transformers as well, which is imported on its first use.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.optim.lr_scheduler import LRScheduler

from rljax.schedule.arguments import as_float, as_int, check_keys
from rljax.schedule.length_decay import SILENT_STEPS, LengthTriggeredLR, OfController
from rljax.schedule.surge import SurgeTracker

if TYPE_CHECKING:
    from rljax.schedule.trainer_callback import LengthTriggeredCallback

__all__ = ["LengthTriggeredCallback", "LengthTriggeredScheduler", "mean_over_ranks"]

_STATE_KEYS = {"base_lrs", "controller", "last_epoch", "last_lr", "step_count"}


class LengthTriggeredScheduler(OfController, LRScheduler):
    """A torch scheduler whose rates follow the mean response length of each batch.

    Call ``observe`` once a rollout batch, before ``optimizer.step()``: it writes the rates of this very update. Call
    ``step`` after ``optimizer.step()``, as for every torch scheduler. It counts updates and keeps the rates, so
    several updates of one batch share them.

    In ``SequentialLR`` it may follow a warm-up: it observes during the warm-up and writes no rate before its turn.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        tracker: SurgeTracker | None = None,
        multiplier: float = 1.8,
        decay_factor: float = 0.5,
        floor_ratio: float = 0.1,
    ) -> None:
        """Checks the arguments and starts before the first update.

        Args:
          optimizer: The optimizer. Each parameter group decays from its own initial rate.
          tracker: The tracker that calls the surge. None: ``SurgeTracker()``.
          multiplier: The ratio of decay period to surge step, at least 1.
          decay_factor: The factor of each decay, in (0, 1).
          floor_ratio: The lowest rate as a fraction of the initial one, in [0, 1].

        Raises:
          ValueError: An argument is out of range.
        """
        # The controller counts the decays. The rates come from each group's own table.
        self._controller = LengthTriggeredLR(
            1.0, tracker=tracker, multiplier=multiplier, decay_factor=decay_factor, floor_ratio=floor_ratio
        )
        super().__init__(optimizer)

    def observe(self, length: Any, truncated_fraction: Any = None) -> list[float]:
        """Observes one rollout batch and writes the rates of the update that follows.

        Args:
          length: The mean response length of the batch over all ranks (tokens), a scalar.
          truncated_fraction: The share of responses that reached the length limit, in [0, 1]. None: unknown.

        Returns:
          The rate of each parameter group. During the warm-up of a ``SequentialLR`` they are not written.
        """
        self._controller.step(length, truncated_fraction)
        rates = self.get_lr()
        if self.last_epoch >= 0:  # SequentialLR sets it to -1 until this scheduler's turn comes
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                write_rate(group, rate)
            self._last_lr = [_copied(group["lr"]) for group in self.optimizer.param_groups]
        return rates

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Counts an update.

        Warns:
          RuntimeWarning: ``observe`` was never called in the first 20 updates. The warning comes once.
        """
        super().step(*args, **kwargs)
        if self._step_count == SILENT_STEPS + 1 and not self.tracker.step:  # torch counts the construction, too
            warnings.warn(never_observed("observe() was not called"), RuntimeWarning, stacklevel=2)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Returns the rate of each parameter group for the last observed batch."""
        return [self._controller.rate_from(float(rate)) for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain Python numbers, lists and dictionaries."""
        return {
            "base_lrs": [float(rate) for rate in self.base_lrs],
            "controller": self._controller.state_dict(),
            "last_epoch": self.last_epoch,
            "last_lr": [float(rate) for rate in self._last_lr],
            "step_count": self._step_count,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from the result of ``state_dict()``. Like torch's own schedulers, it writes no rate.

        Raises:
          ValueError: A key is missing or unknown, or a value is not of the form that ``state_dict`` writes. The state
            may also have another number of parameter groups. Nothing is loaded then.
        """
        check_keys(state_dict, _STATE_KEYS)
        groups = len(self.optimizer.param_groups)
        base_lrs, last_lr = (_rates(key, state_dict[key], groups) for key in ("base_lrs", "last_lr"))
        last_epoch, count = (
            as_int("last_epoch", state_dict["last_epoch"], -1),
            as_int("step_count", state_dict["step_count"]),
        )
        self._controller.load_state_dict(state_dict["controller"])
        self.base_lrs, self._last_lr = [*base_lrs], [*last_lr]
        self.last_epoch, self._step_count = last_epoch, count


def mean_over_ranks(
    length_sum: float,
    count: float,
    *,
    group: distributed.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> float:
    """Computes the mean response length over all ranks. Every rank calls it and gets the same number.

    The sums travel as float64. Token counts are integers, so their sum is exact in every order.

    Args:
      length_sum: The sum of the response lengths of this rank (tokens).
      count: The number of responses of this rank.
      group: The process group. None: all ranks.
      device: The device of the tensor that is reduced. None: the current CUDA device with NCCL, else the CPU.

    Returns:
      The mean. Without ``torch.distributed`` it is the mean of this process; without any response it is NaN.
    """
    sums = torch.tensor([float(length_sum), float(count)], dtype=torch.float64)
    if distributed.is_available() and distributed.is_initialized():
        if device is None:
            nccl = distributed.get_backend(group) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu"
        sums = sums.to(device)
        distributed.all_reduce(sums, group=group)
    total, responses = sums.tolist()
    return total / responses if responses else float("nan")


def never_observed(reason: str) -> str:
    """Returns the warning of a scheduler or a callback that has seen no length in ``SILENT_STEPS`` updates."""
    return f"{reason} in the first {SILENT_STEPS} updates: without response lengths the learning rate never decays"


def _rates(key: str, rates: Any, groups: int) -> list[float]:
    """Returns the rates of a state, one for each parameter group. Raises ValueError if they are not that."""
    if not isinstance(rates, list | tuple) or len(rates) != groups:
        raise ValueError(f"{key} must be a list of {groups} rates, one a parameter group, got {key} = {rates!r:.100}.")
    values = [as_float(key, rate) for rate in rates]
    if not all(0.0 <= value < float("inf") for value in values):
        raise ValueError(f"{key} must be finite and not negative, got {key} = {rates!r:.100}.")
    return values


def write_rate(group: dict[str, Any], rate: float) -> None:
    """Writes the rate of a parameter group, in place where the rate is a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def __getattr__(name: str) -> Any:
    if name != "LengthTriggeredCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module("rljax.schedule.trainer_callback")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        message = "LengthTriggeredCallback needs transformers, which is not installed: pip install transformers."
        raise ModuleNotFoundError(message, name=error.name) from error
    return module.LengthTriggeredCallback
