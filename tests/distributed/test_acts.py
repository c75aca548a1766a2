"""Values that process 0 sends to the others arrive bit for bit."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from records import train_sequence

from rljax.distributed.acts import Shared, gather_results, to_the_end, together, values_of
from rljax.distributed.messages import Announcement, pack, unpack
from rljax.distributed.processes import Processes, is_of_devices, start_processes
from rljax.errors import ConfigError
from rljax.rollout.engine import TurnRequest
from rljax.rollout.types import SamplingParams
from rljax.trainer.packing import TrainSequence
from rljax.trainer.update import UpdateOptions
from rljax.weights.writer import Kind


@pytest.mark.parametrize("optional", [False, True])
def test_sequences_come_out_as_they_went_in(optional):
    rng, sequences = np.random.default_rng(0), []
    for p, r in [(3, 5), (1, 1), (4, 2)]:
        ids = (rng.integers(0, 9, size).astype(np.int32) for size in (p, r))
        more = {"staleness": rng.integers(0, 3, r)}
        if optional:
            more["routes"] = rng.integers(0, 9, (p + r, 2, 3)).astype(np.uint8)
            more["top_ids"] = rng.integers(0, 9, (r, 4)).astype(np.int32)
            more["top_logprobs"] = rng.normal(size=(r, 4)).astype(np.float32)
        logprobs = rng.normal(size=r).astype(np.float32)
        sequences.append(train_sequence(*ids, logprobs, float(rng.normal()), bool(r % 2), **more))
    sent = Announcement("step", "_pack", pack([sequences]))
    announced = unpack(pack(sent), Announcement)
    assert announced == sent
    assert (announced.place, Announcement("stop").place) == ("pack", "stop")
    (found,) = unpack(announced.arguments, tuple[Sequence[TrainSequence]])
    for one, other in zip(found, sequences, strict=True):
        facts = [(each.advantage, each.in_loss, each.trajectory, each.prompt_length) for each in (one, other)]
        assert facts[0] == facts[1]
        assert list(one.columns) == list(other.columns)
        for got, expected in zip([one.ids, *one.columns.values()], [other.ids, *other.columns.values()], strict=True):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)


def test_arguments_come_out_as_they_went_in():
    rng = np.random.default_rng(0)
    vectors = [rng.normal(size=size) for size in ((2, 3), 0, 1)]
    requests = [TurnRequest(7, 2, np.arange(3, dtype=np.int32), 5), TurnRequest(8, 1, np.arange(0), 9)]
    sampling = SamplingParams(5, 0.7, (14, 3), top_k=2)
    options = UpdateOptions(np.float64(0.1) + 0.2, seed=2**40, noise=True)
    host = {"mean": math.nan, "none": None, "nested": [{"a": 1.5}]}
    values = [vectors, requests, sampling, options, Path("/a/b"), "delta", host]
    types = (Sequence[np.ndarray], Sequence[TurnRequest], SamplingParams, UpdateOptions, Path, Kind, dict[str, Any])
    found = unpack(pack(values), tuple[types])
    arrays, told = ([*each[0], *(request.tokens for request in each[1])] for each in (values, found))
    for one, other in zip(told, arrays, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    assert [each._replace(tokens=None) for each in found[1]] == [each._replace(tokens=None) for each in requests]
    assert found[2:6] == tuple(values[2:6])
    assert repr(found[6]) == repr(host)
    with pytest.raises(TypeError, match="object cannot be sent"):
        pack([object()])


def test_who_stops_early_takes_the_rest_all_the_same():
    items = iter(range(5))
    stream = to_the_end(Processes(), Announcement("anything"), items)
    assert next(stream) == 0
    stream.close()
    assert list(items) == []


def test_options_that_do_not_go_together_are_refused():
    for options, message in (
        ({"count": 2}, "must be given together, or none"),
        ({"index": 0}, "must be given together, or none"),
        ({"count": 2, "index": 2, "coordinator": "host:1"}, "run.process_id = 2 must be below run.processes = 2"),
        ({"count": 2, "index": 0, "coordinator": "host"}, "run.coordinator must be HOST:PORT of process 0, got 'host'"),
    ):
        with pytest.raises(ConfigError, match=message):
            start_processes(**options)


class Anything(Shared):
    name = "anything"

    @together
    def work(self, state: list, *, x: np.ndarray) -> int:
        state.append(x)
        return len(state)

    @together
    def items(self, count: int) -> Iterator[int]:
        yield from range(count)


def test_an_error_names_what_one_process_cannot_write():
    def refuse():
        raise OSError("no room")

    assert values_of(gather_results(Processes(), lambda: (1, 2)), tuple[int, ...]) == [(1, 2)]
    with pytest.raises(OSError, match="process 0: no room"):
        values_of(gather_results(Processes(), refuse), int)


def test_values_are_gathered_in_few_lengths(monkeypatch):
    """Each length is compiled once. Another process of two has the same value."""
    lengths, processes = [], Processes()
    processes.count = 2

    def doubled(array):
        lengths.append(np.size(array))
        return np.stack([array, array])

    monkeypatch.setattr(multihost_utils, "process_allgather", doubled)
    values = [1, 12, "a" * 17, "a" * 20]
    assert [processes.gather(value) for value in values] == [[value, value] for value in values]
    assert lengths[1::2] == [1, 2, 32, 32]


def test_one_process_does_everything_alone():
    processes, done = Processes(), []
    with processes:
        assert Anything(processes).work(done, x="a thing that cannot be sent") == 1
        assert list(Anything(processes).items(3)) == [0, 1, 2]
    assert done == ["a thing that cannot be sent"]
    assert (processes.index, processes.count, processes.is_leader, processes.signal()) == (0, 1, True, None)
    processes.end(0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS is 2, but jax.distributed finds no cluster"),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}, "a pod of an Indexed Job"),
    ],
)
def test_processes_that_do_not_meet_do_not_train_alone(environment, message):
    line = "from rljax.distributed.processes import *; start_processes()"
    found = subprocess.run([sys.executable, "-c", line], env=os.environ | environment, capture_output=True, text=True)
    assert found.returncode == 1
    assert "ConfigError" in found.stderr
    assert message in found.stderr


GLOO = "UNKNOWN: Gloo AllGather failed: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:36274"


def test_a_lost_collective_is_told_from_other_errors():
    nccl, gloo = ValueError("INTERNAL: ncclAllReduce: NCCL operation failed"), ValueError("Gloo is no engine")
    zarr = ValueError("NOT_FOUND: Error opening zarr driver")
    lost = (jax.errors.JaxRuntimeError("INTERNAL: anything"), ValueError(GLOO), nccl)
    others = (zarr, gloo, RuntimeError(GLOO), OSError(28, "No space left on device"))
    for error in (*lost, *others):
        wrapped = RuntimeError("not written")
        wrapped.__cause__ = error
        assert is_of_devices(error) == is_of_devices(wrapped) == (error in lost), error
