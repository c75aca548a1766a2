"""A plugin of the test servers: it breaks updates of the weights in ways that a check must notice.

The file that ``$RLJAX_TEST_FAULT`` names holds the fault of the next updates, the name of a tensor, and the only worker
that has the fault, if it is one. ``skip`` leaves the tensor out, ``flip`` changes a bit of it, ``unflushed`` keeps the
prefix cache, and ``off`` is no fault. ``busy`` and a number make so many flushes of the cache impossible, as if a
request were still under way. ``slow`` and a number make each forward take so many seconds longer.
"""

import dataclasses
import itertools
import os
import time
from pathlib import Path

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

FLUSHES = itertools.count()


def fault() -> list[str]:
    return Path(os.environ["RLJAX_TEST_FAULT"]).read_text().split()


def broken(weights):
    how, of, *workers = fault()
    is_sound = how == "off" or (workers and torch.distributed.get_rank() != int(workers[0]))
    for name, tensor in weights:
        if name != of or is_sound:
            yield name, tensor
        elif how == "flip":
            other = tensor.clone()
            other.reshape(-1).view(torch.uint8)[0] ^= 1
            yield name, other


def update(original, updater, *args, **kwargs):
    model = updater.get_model()
    load = model.load_weights
    model.load_weights = lambda weights, *more: load(broken(weights), *more)
    try:
        return original(updater, *args, **kwargs)
    finally:
        del model.load_weights


def flush(original, manager, request, success, message):
    how, *words = fault()
    if how == "busy" and next(FLUSHES) < int(words[0]):
        manager = dataclasses.replace(manager, flush_cache=lambda **_: False)
    return (success, message) if how == "unflushed" else original(manager, request, success, message)


def forward(original, *args, **kwargs):
    words = fault()  # the file is empty while it is written
    if len(words) == 2 and words[0] == "slow":
        time.sleep(float(words[1]))
    return original(*args, **kwargs)


def register() -> None:
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    scheduler = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", forward, HookType.AROUND)
    HookRegistry.register(f"{updater}.update_weights_from_disk", update, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.flush_cache_after_weight_update", flush, HookType.AROUND)
