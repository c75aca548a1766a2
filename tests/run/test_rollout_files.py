"""A run's token dump describes the weights behind its columns, and carries a further number from a server's reply."""

import contextlib
import json
from collections.abc import Sequence

import numpy as np
import pytest
from records import train_sequence
from served_engines import PARAMS, PROMPTS, make
from vllm_fake import FakeVllm

from rljax.algorithms.advantages import AdvantageConfig
from rljax.distributed import messages
from rljax.record.token_dumps import read_dump
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import InjectConfig, RolloutConfig, SamplingParams
from rljax.run.config import Config, RunConfig
from rljax.run.rollout_files import write_tokens
from rljax.run.sampling import Rollouts, training_sequences
from rljax.tokens import COLUMNS, Column
from rljax.trainer.packing import TrainSequence, pack
from rljax.trainer.update import TrainerValues

IDS, LOGPROBS = np.arange(3, dtype=np.int32), -np.ones(3, np.float32)


def dumped(run_dir, sequences, values=None, estimator="rloo", **rollout):
    """Returns the dump of step 4 of a run, which has the policy version 3."""
    advantage = AdvantageConfig(estimator=estimator)
    config = Config(run=RunConfig(dir=str(run_dir)), rollout=RolloutConfig(**rollout), advantage=advantage)
    write_tokens(config, 4, 3, sequences, values or TrainerValues([LOGPROBS] * len(sequences)))
    return read_dump(run_dir / "rollouts" / "step_000004.parquet")


@pytest.mark.parametrize(
    ("inject", "staleness", "expected"),
    [
        ({}, 0, "{trainer}"),
        ({"logit_noise": 0.5}, 0, "{trainer}"),
        ({"weight_noise": 0.1, "quantize": "int8"}, 0, "{trainer}, weight_noise 0.1, quantize int8"),
        # The first steps of such a run sample with the oldest weights that exist, which are the trainer's.
        ({"staleness": 2}, 0, "{trainer}"),
        ({"staleness": 2}, 2, ""),
        ({}, 1, ""),
    ],
)
def test_a_dump_names_the_weights_that_sampled(tmp_path, inject, staleness, expected):
    sequence = train_sequence(IDS, IDS, LOGPROBS, 0.5, staleness=np.full(3, staleness))
    dump = dumped(tmp_path, [sequence], inject=InjectConfig(**inject), kv_cache_dtype="fp8_e4m3")
    trainer = dump.sources["trainer"].weights_hash
    assert trainer == f"{tmp_path} version 3"
    assert dump.sources["rollout"].weights_hash == expected.format(trainer=trainer)
    assert (dump.sampling.get("inject", {}), dump.sampling["kv_cache_dtype"]) == (inject, "fp8_e4m3")
    assert dump.token_ids[0].tolist() == [*IDS, *IDS]


def test_a_dump_of_a_cut_sampling_has_its_support(tmp_path):
    tops = np.asarray([[0, 4], [1, -1], [2, 5]], np.int32), np.asarray([[-1, -2], [0, -np.inf], [-1, -2]], np.float32)
    sequence = train_sequence(IDS, IDS, LOGPROBS, 0.5, top_ids=tops[0], top_logprobs=tops[1])
    dump = dumped(tmp_path, [sequence], top_k=2, top_p=0.9)
    assert {name: dump.sampling[name] for name in ("top_k", "top_p", "min_p")} == {"top_k": 2, "top_p": 0.9, "min_p": 0}
    assert dump.sources["rollout"].cut
    assert dump.sources["trainer"].cut
    assert dump.columns["top_ids"][0].tolist() == [[-1, -1]] * 3 + tops[0].tolist()
    np.testing.assert_array_equal(dump.columns["top_logprobs"][0][3:], tops[1])


def test_a_dump_has_advantage_version_and_loss_of_each_token(tmp_path):
    stale = train_sequence(IDS, IDS, LOGPROBS, 0.25, staleness=np.asarray([2, 2, 0], np.int32))
    values = dumped(tmp_path, [train_sequence(IDS, IDS, LOGPROBS, -0.5, False), stale]).values
    found = {name: [vector[3:].tolist() for vector in vectors] for name, vectors in values.items()}
    assert found == {
        "advantage": [[-0.5] * 3, [0.25] * 3],
        "version": [[3, 3, 3], [1, 1, 3]],
        "in_loss": [[0, 0, 0], [1, 1, 1]],
    }
    assert all(np.isnan(vector[:3]).all() for vectors in values.values() for vector in vectors)
    # Only the update knows the advantages of single tokens.
    assert "advantage" not in dumped(tmp_path, [stale], estimator="optimal_token").values


def test_a_dump_tells_an_environments_tokens_apart(tmp_path):
    ids, turns = np.arange(4, dtype=np.int32), np.array([1, 0, 0, 2], np.int32)
    sequence = train_sequence(ids[:2], ids, np.float32([-1, 0, 0, -2]), 0.5, turn=turns)
    dump = dumped(tmp_path, [sequence], TrainerValues([np.float32([-1.5, 0, 0, -2.5])]))
    assert dump.response_mask[0].tolist() == [False, False, True, False, False, True]
    np.testing.assert_array_equal(dump.logprobs["trainer"][0][2:], np.float32([-1.5, np.nan, np.nan, -2.5]))
    np.testing.assert_array_equal(dump.logprobs["rollout"][0][2:], np.float32([-1, np.nan, np.nan, -2]))
    np.testing.assert_array_equal(dump.values["turn"][0][2:], turns)


def test_a_dump_has_the_trainers_entropies_and_likeliest_tokens(tmp_path):
    """The trainer's numbers of the sampler's likeliest tokens stand in the trainer's order. Prompts have none."""
    ids, logprobs = np.arange(2, dtype=np.int32), -np.ones(2, np.float32)
    tops = np.asarray([[5, 7], [6, -1]], np.int32), np.asarray([[-0.5, -1.5], [-0.25, -np.inf]], np.float32)
    trainer = np.asarray([[-1.0, -0.75], [-0.5, -np.inf]], np.float32)
    sequence = train_sequence(ids, ids, logprobs, 0.5, top_ids=tops[0], top_logprobs=tops[1])
    entropy = np.asarray([1.25, 0.5], np.float32)
    dump = dumped(tmp_path, [sequence], TrainerValues([logprobs], [entropy], [trainer]))
    assert dump.values["entropy"][0][2:].tolist() == [1.25, 0.5]
    assert np.isnan(dump.values["entropy"][0][:2]).all()
    assert dump.columns["top_ids"][0].tolist() == [[-1, -1], [-1, -1], [5, 7], [6, -1]]
    (of_trainer,), (values,) = dump.columns["top_ids/trainer"], dump.columns["top_logprobs/trainer"]
    assert of_trainer.tolist() == [[-1, -1], [-1, -1], [7, 5], [6, -1]]
    assert values[2:].tolist() == [[-0.75, -1.0], [-0.5, -np.inf]]


# ---- a further number of each token ----


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
