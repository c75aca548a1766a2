"""A further number of each token comes from a server's reply to the token dump without any code between them."""

import contextlib
import json
from collections.abc import Sequence

import numpy as np
import pytest
from served_engines import PARAMS, PROMPTS, make
from vllm_fake import FakeVllm

from rljax.distributed import messages
from rljax.record.token_dumps import read_dump
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import SamplingParams
from rljax.run.config import Config, RunConfig
from rljax.run.rollout_files import write_tokens
from rljax.run.sampling import Rollouts, training_sequences
from rljax.tokens import COLUMNS, Column
from rljax.trainer.packing import TrainSequence, pack
from rljax.trainer.update import TrainerValues


class Server(FakeVllm):
    """A stand-in whose replies say of each token how certain it was: the token's id, divided by 64."""

    def answer(self, command, path, body):
        status, reply = super().answer(command, path, body)
        for choice in reply.get("choices", ()):
            choice["certainty"] = [token / 64 for token in choice["token_ids"]]
        return status, reply


class Backend(VllmBackend):
    def read(self, route, reply, request):
        (choice,) = json.loads(reply)["choices"]
        return super().read(route, reply, request).add({"certainty": choice["certainty"]})


def test_a_new_number_takes_three_lines(monkeypatch, tmp_path):
    """The lines are the column in the table, the ``add`` of ``Backend.read``, and the mean that uses the number."""
    column = Column(np.float32, 0.0, "", "how certain the server was of the token", "values/certainty")
    monkeypatch.setitem(COLUMNS, "certainty", column)
    server = Server()
    server.routes -= {ROLLOUTS}
    with contextlib.closing(make(server.url, backend=Backend())) as engine, contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        engine.publish(PARAMS, 0)
        samples = engine.generate(PROMPTS, 2, SamplingParams(3), seed=0)
        responses = sorted(samples, key=lambda one: (one.prompt_index, one.sample_index))

    config = Config(run=RunConfig(dir=str(tmp_path)))
    rollouts = Rollouts([responses[:2], responses[2:]], np.float32([[0, 1], [1, 0]]))
    sequences = training_sequences(rollouts, config, 0)
    (sequences,) = messages.unpack(messages.pack([sequences]), tuple[Sequence[TrainSequence]])  # to other processes
    pack(sequences, row_tokens=8, rows_per_micro_batch=4, micro_batches=1)  # it leaves out what no batch has
    assert [s["certainty"].mean() for s in sequences] == pytest.approx([s.response.mean() / 64 for s in sequences])
    write_tokens(config, 1, 0, sequences, TrainerValues([s["rollout_logprobs"] for s in sequences]))
    dump = read_dump(tmp_path / "rollouts" / "step_000001.parquet")
    assert set(dump.values) == {"advantage", "version", "in_loss", "certainty"}
    for s, values in zip(sequences, dump.values["certainty"], strict=True):
        np.testing.assert_array_equal(values, np.float32([*[np.nan] * len(s.prompt), *s.response / 64]))
