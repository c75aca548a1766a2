"""The length-triggered learning rate as a callback of ``transformers.Trainer`` and of TRL's trainers."""

import warnings
from typing import Any

from transformers import TrainerCallback

from rljax.schedule.arguments import as_step
from rljax.schedule.length_decay import SILENT_STEPS, LengthTriggeredLR, OfController
from rljax.schedule.surge import SurgeTracker
from rljax.schedule.torch import never_observed, write_rate


class LengthTriggeredCallback(OfController, TrainerCallback):
    """A callback that reads the response length from the trainer's log and sets the rate of the next update.

    The log of update t comes after update t, so the surge acts from the next update on. If the first decay comes after
    the call, as with the multiplier 1.8, every rate equals the rate of ``LengthTriggeredLR``.

    Before each update the trainer's own scheduler writes a rate, and the callback lowers it to its own rate if that is
    lower. So a warm-up or a linear decay is kept. The trainer's scheduler must compute its rate from the initial one,
    as ``constant``, ``constant_with_warmup``, ``linear`` and ``cosine`` of transformers do.

    The callback makes the trainer log every update. After a resume it reads the lengths back from the log in
    ``trainer_state.json``, so it has no state of its own to save.
    """

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
        """Starts with no lengths, or reads the lengths of a resumed run from its log."""
        self._controller.load_state_dict(self._start)
        self._first_update = 0
        for logs in state.log_history:
            if logs.get("step", 0) <= state.global_step:
                self._observe(logs, logs.get("step", 0))

    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        """Writes the rates of the update that begins."""
        update = state.global_step + 1
        new_batch = update >= self._first_update + self._updates_of(args)
        for group in optimizer.param_groups:
            initial = group.get("initial_lr", args.learning_rate)
            rate = self._controller.rate_from(float(initial), self.tracker.step + new_batch)
            if rate < float(group["lr"]):
                write_rate(group, rate)
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
            warnings.warn(never_observed(reason), RuntimeWarning, stacklevel=2)

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
