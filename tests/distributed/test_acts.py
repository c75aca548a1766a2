"""Values that process 0 sends to the others arrive bit for bit."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from records import train_sequence

from rljax.distributed.acts import Act, gather_results, to_the_end, values_of
from rljax.distributed.messages import Request, pack_request, ragged, unpack_request, vectors_of
from rljax.distributed.processes import Processes, is_of_devices, start_processes
from rljax.errors import ConfigError
from rljax.tokens import from_arrays, to_arrays
from rljax.trainer.packing import TrainSequence


@pytest.mark.parametrize("optional", [False, True])
def test_sequences_come_out_as_they_went_in(optional):
    rng = np.random.default_rng(0)
    lengths = [(3, 5), (1, 1), (4, 2)]
    sequences = [
        train_sequence(
            rng.integers(0, 9, p).astype(np.int32),
            rng.integers(0, 9, r).astype(np.int32),
            rng.normal(size=r).astype(np.float32),
            float(rng.normal()),
            bool(r % 2),
            staleness=rng.integers(0, 3, r),
            routes=rng.integers(0, 9, (p + r, 2, 3)).astype(np.uint8) if optional else None,
            top_ids=rng.integers(0, 9, (r, 4)).astype(np.int32) if optional else None,
            top_logprobs=rng.normal(size=(r, 4)).astype(np.float32) if optional else None,
        )
        for p, r in lengths
    ]
    request = unpack_request(pack_request(Request("step", "pack", {"a": 1}, to_arrays(sequences))))
    found = from_arrays(TrainSequence, request.arrays)
    assert (request.act, request.part, request.fields) == ("step", "pack", {"a": 1})
    assert len(found) == len(sequences)
    for one, other in zip(found, sequences, strict=True):
        facts = [(each.advantage, each.in_loss, each.trajectory, each.prompt_length) for each in (one, other)]
        assert facts[0] == facts[1]
        assert list(one.columns) == list(other.columns)
        for got, expected in zip([one.ids, *one.columns.values()], [other.ids, *other.columns.values()], strict=True):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)


def test_vectors_may_be_empty():
    vectors = [np.arange(2), np.arange(0), np.arange(3)]
    assert [v.tolist() for v in vectors_of("x", ragged("x", vectors))] == [[0, 1], [], [0, 1, 2]]


def test_who_stops_early_takes_the_rest_all_the_same():
    taken = []

    def items():
        for item in range(5):
            taken.append(item)
            yield item

    stream = to_the_end(items())
    assert next(stream) == 0
    stream.close()
    assert taken == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 2}, "must be given together, or none"),
        ({"index": 0}, "must be given together, or none"),
        ({"count": 2, "index": 2, "coordinator": "host:1"}, "run.process_id = 2 must be below run.processes = 2"),
        ({"count": 2, "index": 0, "coordinator": "host"}, "run.coordinator must be HOST:PORT of process 0, got 'host'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        start_processes(**options)


class Anything(Act):
    name = "anything"


def test_an_error_names_what_one_process_cannot_write():
    def refuse():
        raise OSError("no room")

    assert values_of(gather_results(Processes(), lambda: (1, 2)), tuple[int, ...]) == [(1, 2)]
    with pytest.raises(OSError, match="process 0: no room"):
        values_of(gather_results(Processes(), refuse), int)


def test_one_process_does_everything_alone():
    processes, done = Processes(), []
    with processes, Anything(processes).lead("a part", {}, {"x": np.zeros(3)}):
        done.append("work")
    assert done == ["work"]
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


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: anything"), True),
        (ValueError(GLOO), True),
        (ValueError("INTERNAL: ncclAllReduce: NCCL operation failed"), True),
        (ValueError("NOT_FOUND: Error opening zarr driver"), False),
        (ValueError("Gloo is no engine"), False),
        (RuntimeError(GLOO), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_a_lost_collective_is_told_from_other_errors(error, is_one):
    wrapped = RuntimeError("not written")
    wrapped.__cause__ = error
    assert is_of_devices(error) == is_of_devices(wrapped) == is_one
