"""The length-triggered learning rate for torch: a scheduler, a mean over ranks, and a callback for transformers.

This module needs torch. ``LengthTriggeredCallback`` needs transformers as well, which is imported on its first use.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import distributed
from torch.optim.lr_scheduler import LRScheduler

from rljax.schedule.arguments import as_float, as_int, as_step, check_keys
from rljax.schedule.length_decay import SILENT_STEPS, LengthTriggeredLR, OfController
from rljax.schedule.surge import SurgeTracker

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
                _write_rate(group, rate)
            current = [group["lr"] for group in self.optimizer.param_groups]
            self._last_lr = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in current]
        return rates

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Counts an update.

        Warns:
          RuntimeWarning: ``observe`` was never called in the first 20 updates. The warning comes once.
        """
        super().step(*args, **kwargs)
        if self._step_count == SILENT_STEPS + 1 and not self.tracker.step:  # torch counts the construction, too
            warnings.warn(_never_observed("observe() was not called"), RuntimeWarning, stacklevel=2)

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
        last_epoch = as_int("last_epoch", state_dict["last_epoch"], -1)
        count = as_int("step_count", state_dict["step_count"])
        self._controller.load_state_dict(state_dict["controller"])
        self.base_lrs, self._last_lr = [*base_lrs], [*last_lr]
        self.last_epoch, self._step_count = last_epoch, count


class LengthTriggeredCallback(OfController):
    """A callback of ``transformers.Trainer`` and of TRL's trainers: the log's response length sets the next rate.

    The log of update t comes after update t, so the surge acts from the next update on. If the first decay comes after
    the call, as with the multiplier 1.8, every rate equals the rate of ``LengthTriggeredLR``.

    Before each update the trainer's own scheduler writes a rate, and the callback lowers it to its own rate if that is
    lower. So a warm-up or a linear decay is kept. The trainer's scheduler must compute its rate from the initial one,
    as ``constant``, ``constant_with_warmup``, ``linear`` and ``cosine`` of transformers do.

    The callback makes the trainer log every update. After a resume it reads the lengths back from the log in
    ``trainer_state.json``, so it has no state of its own to save.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> LengthTriggeredCallback:
        """Makes an object that is a ``transformers.TrainerCallback`` as well, whose import is late because it is slow.

        Raises:
          ModuleNotFoundError: transformers is not installed.
        """
        kind: Any = cls
        return super().__new__(_trainer_callback(kind))

    def __init__(
        self,
        *,
        tracker: SurgeTracker | None = None,
        multiplier: float = 1.8,
        decay_factor: float = 0.5,
        floor_ratio: float = 0.1,
        length_key: str = "completions/mean_length",
        truncated_key: str = "completions/clipped_ratio",
        updates_per_batch: int | None = None,
    ) -> None:
        """Checks the arguments.

        Args:
          tracker: The tracker that calls the surge. None: ``SurgeTracker()``.
          multiplier: The ratio of decay period to surge step, at least 1.
          decay_factor: The factor of each decay, in (0, 1).
          floor_ratio: The lowest rate as a fraction of the initial one, in [0, 1].
          length_key: The key of the mean response length in the log. A log without it is not a step.
          truncated_key: The key of the share of truncated responses in the log. It may be absent.
          updates_per_batch: The number of updates on one rollout batch, which share a rate. None: computed from
            ``steps_per_generation`` and ``num_iterations`` of TRL's arguments, and 1 without them.

        Raises:
          ValueError: An argument is out of range.
        """
        self._controller = LengthTriggeredLR(
            1.0, tracker=tracker, multiplier=multiplier, decay_factor=decay_factor, floor_ratio=floor_ratio
        )
        self._length_key, self._truncated_key = length_key, truncated_key
        self._updates_per_batch = as_step("updates_per_batch", updates_per_batch)
        self._start = self._controller.state_dict()
        self._first_update = 0  # the first update on the last observed batch
        self._unseen = 0  # the number of logs without a length, before the first one with a length

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts from the given tracker, and reads the lengths of a resumed run from the trainer's log."""
        self._controller.load_state_dict(self._start)
        self._first_update = 0
        updates, last = self._updates_of(args), 0
        for logs in state.log_history:
            step = logs.get("step", 0)
            if step <= state.global_step and ("loss" in logs or self._length_key in logs):
                # Batches between two entries of the log were steps, too.
                self.tracker.step += max(0, (step - 1) // updates - (last - 1) // updates - 1)
                last = step
                self._observe(logs, step)

    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        """Lowers the rates of the update that begins to the callback's rates, where these are lower."""
        update = state.global_step + 1
        new_batch = update >= self._first_update + self._updates_of(args)
        for group in optimizer.param_groups:
            initial = group.get("initial_lr", args.learning_rate)
            rate = self._controller.rate_from(float(initial), self.tracker.step + new_batch)
            if rate < float(group["lr"]):
                _write_rate(group, rate)
        # The trainer logs the last rates of its scheduler. They must be the rates of this update.
        last_rates = getattr(lr_scheduler, "_last_lr", None)
        if isinstance(last_rates, list):
            last_rates[:] = [float(group["lr"]) for group in optimizer.param_groups]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Asks the trainer to log this update."""
        control.should_log = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Observes the length in the log, if there is one.

        Warns:
          RuntimeWarning: The first 20 logs have no length. The warning comes once.
        """
        self._observe(logs or {}, state.global_step)
        self._unseen += not self.tracker.step
        if self._unseen == SILENT_STEPS and not self.tracker.step:
            keys = ", ".join(sorted(logs or {}))
            reason = f"no log had the key {self._length_key} (length_key; the last one has {keys})"
            warnings.warn(_never_observed(reason), RuntimeWarning, stacklevel=2)

    def _observe(self, logs: dict[str, Any], update: int) -> None:
        if self._length_key not in logs:
            return
        length = logs[self._length_key]
        # TRL logs None where no length is known. It counts as a step, as NaN does.
        self._controller.step(float("nan") if length is None else length, logs.get(self._truncated_key))
        self._first_update = update

    def _updates_of(self, args: Any) -> int:
        if self._updates_per_batch is not None:
            return self._updates_per_batch
        micro_steps = getattr(args, "steps_per_generation", None)
        if micro_steps is None:
            return getattr(args, "num_iterations", None) or 1
        return max(1, micro_steps * (getattr(args, "num_iterations", None) or 1) // args.gradient_accumulation_steps)


@functools.cache
def _trainer_callback(kind: type) -> Any:
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        message = "LengthTriggeredCallback needs transformers, which is not installed: pip install transformers."
        raise ModuleNotFoundError(message, name=error.name) from error
    return type(kind.__name__, (kind, TrainerCallback), {"__module__": kind.__module__, "__doc__": kind.__doc__})


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


def _never_observed(reason: str) -> str:
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


def _write_rate(group: dict[str, Any], rate: float) -> None:
    """Writes the rate of a parameter group, in place where the rate is a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
