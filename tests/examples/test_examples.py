"""Each program of examples/ does what it says."""

import dataclasses

import custom_reward
import external_rollouts
import ml_dtypes
import numpy as np
import offline_comparison
import optax_loop
import pytest
from recount_weights import agrees, counted

from rljax.compare.importers import read_tokens
from rljax.data.toy import addition_problems
from rljax.errors import run_cli
from rljax.rollout.external.queue import TrajectoryQueue
from rljax.rollout.external.rows import RowLimits
from rljax.rollout.types import SamplingParams
from rljax.weights.sums import array_checksum, bits_of


def test_the_optax_loop_follows_algorithm_1_after_the_surge():
    rows = optax_loop.train()
    surge, period = rows[-1]["surge_step"], rows[-1]["decay_period"]
    assert 41 <= surge <= 80
    assert period == (18 * surge + 5) // 10
    for row in rows:
        halvings = row["step"] // period if row["step"] >= surge else 0
        assert row["learning_rate"] == np.float32(max(0.03 * 0.5**halvings, 0.003))
    assert rows[-1]["learning_rate"] < rows[0]["learning_rate"]
    before, after = (np.mean([row["length"] for row in part]) for part in (rows[:20], rows[-20:]))
    assert after > 6 * before
    assert rows[-1]["reward"] > 10 * rows[0]["reward"]


def test_the_offline_comparison_gives_the_metrics_of_the_files(tmp_path):
    trainer, rollout = offline_comparison.make_files(tmp_path, sequences=4)
    (pair,) = offline_comparison.compare(trainer, rollout).pairs
    assert (pair.trainer, pair.rollout) == ("trainer", "rollout")
    columns = {name: read_tokens(tmp_path / f"{name}.parquet") for name in ("trainer", "rollout")}
    ours, theirs = (np.stack(dump.logprobs[name]).astype(np.float64) for name, dump in columns.items())
    mask = np.stack(columns["trainer"].response_mask)
    assert mask.sum() == 4 * 60
    assert pair.metrics["kl"] == pytest.approx(np.mean(theirs[mask] - ours[mask]), rel=1e-9)
    assert 1e-3 < np.mean(np.abs(theirs - ours)[mask]) < 3e-2  # bfloat16 rounds logits of size 3 by up to 2^-7


def test_the_programs_print_their_tables_and_the_reward_by_hand(capsys):
    said = [("12,130", False), ("130", False), ("1,120", False), ("13", False), ("130", True)]
    rewards = [custom_reward.digits_right({"answer": "130"}, *each) for each in said]
    assert rewards == [1.0, 1.0, 2 / 3, 0.0, 0.0]
    optax_loop.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 25
    assert lines[0].startswith("step  mean length")
    assert offline_comparison.main([]) == 0
    assert "trainer / rollout  PASS" in capsys.readouterr().out
    assert offline_comparison.main(["one", "two"]) == 2
    assert run_cli(offline_comparison.main, ["one.jsonl#a", "two.jsonl#b"]) == 2
    assert capsys.readouterr().err.endswith("error: one.jsonl: No such file or directory\n")


@pytest.mark.slow
def test_the_other_program_writes_rows_that_a_run_takes(toy_base, tmp_path, monkeypatch, capsys):
    options = ["--model", str(toy_base), "--groups", "3", "--at-once", "2", "--group-size", "3"]
    monkeypatch.setattr("sys.argv", ["external_rollouts.py", str(tmp_path / "run"), str(tmp_path), *options])
    monkeypatch.setattr(external_rollouts, "addition_problems", lambda split: addition_problems(split)[:2])
    monkeypatch.setattr(external_rollouts, "ask", lambda url: {"waiting_groups": 0, "max_waiting_groups": 8})
    external_rollouts.wait_for_room("http://trainer", 8)
    with pytest.raises(SystemExit, match=r"at most 8 groups at once, not 9: give --at-once 8"):
        external_rollouts.wait_for_room("http://trainer", 9)
    external_rollouts.main()
    assert "sent groups 2 .. 2 of version 0" in capsys.readouterr().out
    files = TrajectoryQueue(tmp_path, RowLimits(16, 8, SamplingParams(36)), group_size=3, max_staleness=0)
    read = [one for path in sorted(tmp_path.glob("*.jsonl")) for one in files.read(path.name)]
    assert [one.group for one in read] == [f"problem {i}" for i in range(3) for _ in range(3)]


def array(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


def sums_of(part):
    return list(dataclasses.astuple(array_checksum(part)))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("size", [1, 1000, 70_001])
def test_its_sums_are_the_packages(dtype, size):
    tensor = array(size, dtype)
    assert counted(bits_of(tensor)) == sums_of(tensor)


def test_workers_that_hold_parts_copies_or_something_else():
    keys = array((4, 8), np.float16)
    expected, (one, other) = counted(bits_of(keys).reshape(-1)), np.split(keys, 2)
    for parts in ((keys, keys), (one, other), (one, one, other, other)):
        assert agrees(expected, [sums_of(part) for part in parts])
    for parts in ((keys, keys[::-1]), (one, one), (one, other[:1])):
        assert not agrees(expected, [sums_of(part) for part in parts])
    assert not agrees(expected, [sums_of(keys), None])
