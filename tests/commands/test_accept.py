"""The verdicts of ``rljax accept`` on numbers worked by hand. integration/test_accept_vllm.py has real servers."""

import errno
import math
from contextlib import nullcontext
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from toy_runs import TOY_BASE, outcome

from rljax.commands import accept
from rljax.commands import check_server as checks
from rljax.commands.accept import Acceptance, AcceptArguments, earlier_report
from rljax.errors import ConfigError
from rljax.record.token_dumps import ColumnSource, make_dump
from rljax.run.config import Config
from rljax.run.config_file import resolve
from rljax.train import read_inputs

ENDS = "the server ends a response at"
TOKENS = {"tokenizer": "a", "stop_token_ids": [14]}
SERVER = SimpleNamespace(info=SimpleNamespace(dtype="float32"), described={}, started=[], watched=nullcontext)


def test_tokens_of_both_sides_and_a_round_trip():
    for found, problems in (
        (checks.token_facts(TOKENS, TOKENS), []),
        (checks.token_facts(TOKENS, TOKENS | {"stop_token_ids": [13, 14]}), [f"{ENDS} [13, 14], the model at [14]"]),
        (checks.token_facts(TOKENS, TOKENS | {"tokenizer": "b"}), ["the server has another tokenizer"]),
        (checks.token_facts(TOKENS, TOKENS | {"tokenizer": ""}), ["the server has no readable tokenizer"]),
        (checks.round_trip_facts({"a": True, "b": True}, ["a", "b", "lm_head.weight"]), []),
        (checks.round_trip_facts({"a": True, "b": False}, ["a", "b"]), ["1 tensors come back with other bits: b"]),
        (checks.round_trip_facts({"a": True}, ["a", "b.bias"]), ["1 tensors of the files are not read: b.bias"]),
    ):
        assert found["problems"] == problems


def test_log_probabilities_that_differ_in_the_mean():
    """The second column is higher by the gap, and 0.03 (0.6) more and less in turn."""
    for gap, rows_of_16, bar, words in (
        # k3 = exp(-0.004) cosh(0.03) - 1 + 0.004 = 4.56e-4. The standard error sqrt(2 k3 / tokens) of 4640 tokens is
        # 4.43e-4, and 0.004 - k3 is 7.99 of them; of 4720 tokens it is 4.40e-4, and 8.06 of them.
        (0.004, 290, 4.60e-4, ()),
        (0.004, 290, 4.55e-4, ("the mean k3 is 0.000456, expected at most 0.000455",)),
        (0.004, 295, 4.60e-4, ("the mean difference is 0.004 nats, more than chance",)),
        (-0.004, 295, 4.61e-4, ("the mean difference is -0.004 nats, more than chance",)),
        (0.004, 295, math.inf, ()),
        (0.02, 13, math.inf, ("of the mass",)),  # the mean ratio is 0.98
        (0.3, 4, math.inf, ("beyond any dtype's",)),
    ):
        more, shape = 0.03 if abs(gap) < 0.1 else 0.6, (rows_of_16, 16)
        trainer = np.random.default_rng(0).uniform(-4.0, -1.0, shape).astype(np.float32)
        sources = {"jax": ColumnSource("jax", "bfloat16"), "vllm": ColumnSource("vllm", "bfloat16", role="rollout")}
        columns = {"jax": trainer, "vllm": trainer + np.float32(gap) + np.tile(np.array([more, -more], np.float32), 8)}
        names = list(map(str, range(rows_of_16)))
        dump = make_dump(names, np.zeros(shape, np.int32), np.ones(shape, bool), columns, sources)
        found = checks.pair_facts(dump, [("jax", "vllm")], bar=bar)
        assert [word in problem for word, problem in zip(words, found["problems"], strict=True)] == [True] * len(words)
        k3 = math.exp(-gap) * math.cosh(more) - 1 + gap
        assert found["pairs"]["jax / vllm"]["k3"] == pytest.approx(k3, rel=1e-3)


def rows(*k3, skipped=0, lost=0):
    others = {"mismatch/nonfinite_count": lost, "optimizer/skipped_updates": skipped}
    return [{"mismatch/k3_kl": each} | others for each in k3]


def test_the_rows_of_a_training_and_a_gap_that_grows():
    for found, problem in (
        (rows(4e-3, 6e-3), ""),  # their mean is the bar
        (rows(4e-3, 6.2e-3), "the mean k3 of the steps is 0.0051, expected at most 0.005"),
        (rows(1e-3, math.nan), "the mean k3 of the steps is nan, expected at most 0.005"),
        (rows(1e-3), "1 of 2 steps were made"),
        ([], "0 of 2 steps were made"),
        (rows(0.0, 0.0, skipped=1), ""),
        (rows(0.0, 0.0, skipped=2), "no step changed the weights: give a --config whose rewards differ in a group"),
        (rows(0.0, 0.0, lost=1), "2 log-probabilities are not finite"),
    ):
        assert checks.training_facts(found, 2, checks.BARS["bfloat16"])["problems"] == [problem] * bool(problem)
    # A gap may grow with the position.
    for first, last, own, grows in (
        (0.01, 0.079, 0.0, False),  # within bfloat16's range, 0.08
        (0.01, 0.081, 0.0, True),
        (0.011, 0.081, 0.0, False),  # 8 x 0.011 = 0.088
        (0.0, 0.3, 0.04, False),  # 8 x 0.04 = 0.32: the trainer's own gap grows there, too
        (0.0, 0.33, 0.04, True),
    ):
        growth = {"1-16": (first, 0.0), "17-64": (1.0, 0.0), "65-256": (last, own)}
        assert bool(checks.growth_problems(growth, 0.08)) == grows
        assert not checks.growth_problems({"1-16": (0.5, 0.0)}, 0.08)


def test_the_task_and_the_second_version_differ_enough(tmp_path):
    rewards = [checks.parity(None, str(number), False) for number in range(100)]
    assert set(rewards) == {0.0, 1.0}
    assert 30 < sum(rewards) < 70
    before = {"a": jnp.full((1000,), 3.0, jnp.bfloat16), "b": jnp.full((1000,), -2.0, jnp.bfloat16)}
    after = checks.changed(before)
    moved = {name: np.asarray(after[name] / each, np.float32) for name, each in before.items()}
    assert all(np.mean(ratio != 1) > 0.9 and np.abs(ratio - 1).max() < 0.3 for ratio in moved.values())
    assert not np.array_equal(moved["a"], moved["b"])
    words = [f"--model.path={TOY_BASE}", "--rollout.dtype=float32", "--precision.compute-dtype=float32"]
    inputs = read_inputs(resolve(Config, "quickstart", words))
    assert [checks.ServerChecks(inputs, None, tmp_path, 8, bar).bar for bar in (None, 0.0)] == [
        checks.BARS["float32"],
        0.0,
    ]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space is left", "accept.json"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_leaves_no_other_weights(error, tmp_path, monkeypatch):
    made = []

    class Checks:
        bar = 1.0

        def __getattr__(self, method):
            made.append(method)
            return lambda: {"says": "", "problems": []}

    def write(path, text):
        if "publish" in made:
            raise error

    monkeypatch.setattr(accept, "ServerChecks", lambda *given: Checks())
    monkeypatch.setattr(accept, "write_whole", write)
    acceptance = Acceptance(AcceptArguments(str(TOY_BASE), "http://nowhere:1", out=tmp_path), SERVER, "accept")
    with pytest.raises((ConfigError, KeyboardInterrupt)) as caught:
        acceptance.run()
    assert str(caught.value) == ("" if isinstance(error, KeyboardInterrupt) else "accept.json: no space is left")
    assert made[-2:] == ["publish", "put_back"]


def test_a_run_of_accept_starts_with_its_server_alone(tmp_path, monkeypatch):
    status, out, err = outcome(accept.main, [TOY_BASE, "--server", "http://127.0.0.1:9", "--out", tmp_path / "out"])
    assert (status, out, list(tmp_path.iterdir())) == (2, "", [])
    assert "no answer from http://127.0.0.1:9" in err
    made = []
    monkeypatch.setattr(accept, "ServerChecks", lambda inputs, *_: made.append(inputs.config) or SimpleNamespace(bar=1))
    sections = ["checkpoint: {keep_best: true}", "eval: {at_start: true}", "data: {max_prompt_tokens: 8}"]
    sections.append("rollout: {max_response_tokens: 8, engine: vllm, discovery: dns://other:8000, trajectories: rows}")
    (tmp_path / "own.yaml").write_text("\n".join(sections))
    options = AcceptArguments(str(TOY_BASE), "http://nowhere:1", str(tmp_path / "own.yaml"), out=tmp_path)
    Acceptance(options, SERVER, "accept")
    made[0].check_start()
    assert not made[0].eval.is_wanted
    assert (made[0].rollout.discovery, made[0].rollout.trajectories) == (None, None)


@pytest.mark.parametrize("name", ["run", "tokens.parquet"])
def test_what_no_report_speaks_of_is_not_removed(tmp_path, name):
    path = tmp_path / "accept.json"
    for content in ("[]", '{"reward": 1}', "not JSON"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"accept.json is no report|JSON"):
            earlier_report(path, tmp_path)
    path.unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} is there, but not .*: give another --out"):
        earlier_report(path, tmp_path)
    path.write_text('{"subject": [], "checks": {}, "away": false}')
    assert earlier_report(path, tmp_path)["checks"] == {}
