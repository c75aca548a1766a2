"""Whole runs of ``python -m rljax.train`` are started, killed and resumed as a person does it."""

import json
import os
import re
import shutil
import signal

import jax
import numpy as np
import pytest
from glossary import glossary
from pictures import coloured_share
from small_disk import fill, small_disk
from toy_runs import command, comparable, complete, complete_signalled, completed, printed, refused, tiny
from toy_texts import toy_config

from rljax import evaluate
from rljax.commands import export
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.record.rows import read_rows
from rljax.run.checkpoint import Checkpointer
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.state import OptimizerConfig, abstract_state, make_optimizer

pytestmark = pytest.mark.slow

STEPS = 8
SMALL = [
    *("--data.batch-size", "8", "--rollout.group-size", "4", "--packing.rows-per-micro-batch", "4"),
    *("--run.steps", str(STEPS), "--eval.every", "3", "--eval.max-response-tokens", "8", "--checkpoint.every", "2"),
    # The tracker calls at the first length 1% above the shortest so far, and the rate decays soon after, so that a made
    # call is resumed. No call comes only if lengths fall at each of steps 2 to 5, by chance in 1 of 5! runs.
    *("--optimizer.learning-rate", "2e-4", "--schedule.surge.ratio", "1.01", "--schedule.surge.held-ratio", "0.5"),
    *("--schedule.surge.smooth", "1", "--schedule.surge.persistence", "1", "--schedule.surge.warmup", "2"),
    *("--schedule.multiplier", "1.5", "--packing.share-prefixes", "false"),
]


def small(base, run_dir, *options):
    return command(base, run_dir, *SMALL, *options)


@pytest.fixture(scope="module")
def uninterrupted(toy_base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    completed(small(toy_base, run_dir), figure=True)
    return run_dir


def test_rows_are_complete_and_finite(uninterrupted):
    rows = comparable(uninterrupted)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    known = glossary().values()  # test_metric_glossary.py has more keys, and looks for unwritten ones
    keys = {key for row in read_rows(uninterrupted / "metrics.jsonl") for key in row}
    assert [key for key in keys if not any(pattern.fullmatch(key) for pattern in known)] == []
    for row in rows:
        assert "nonfinite_keys" not in row
        assert 0 < row["mismatch/log_ppl_abs_diff"] < 0.05
        assert row["rollout/policy_version"] == row["step"] - 1
        assert row["rollout/staleness"] == 0.0
        assert ("eval/toy/accuracy" in row) == (row["step"] in (3, 6, 8))
    assert 2 <= rows[-1]["schedule/surge_step"] <= 5
    assert rows[-1]["schedule/learning_rate"] < rows[0]["schedule/learning_rate"] == np.float32(2e-4)
    # Otherwise there would be no optimizer state to lose on the way.
    assert all(row["optimizer/grad_norm"] > 0 for row in rows)
    assert rows[-1]["optimizer/skipped_updates"] == 0
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert coloured_share(uninterrupted / "report.png") > 1e-3
    assert list((uninterrupted / "tb").glob("events*"))


def test_written_config_reproduces_the_run(uninterrupted, toy_base, tmp_path):
    completed([uninterrupted / "config.yaml", "--run.dir", tmp_path / "again", "--run.steps", "3"])
    # The shorter run evaluates its last step because it is the last.
    shorter = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in comparable(tmp_path / "again")]
    expected = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in comparable(uninterrupted)[:3]]
    assert shorter == expected


def test_a_terminated_run_saves_its_step_and_goes_on(uninterrupted, toy_base, tmp_path):
    run_dir = tmp_path / "stopped"
    code, output = complete_signalled(small(toy_base, run_dir, "--checkpoint.every", "0"), run_dir, 2)
    done = len(comparable(run_dir))
    assert code == 128 + signal.SIGTERM, output
    assert 2 <= done < STEPS
    assert f"stopped after step {done}, saved" in output
    assert [int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()] == [done]
    completed(small(toy_base, run_dir))
    assert comparable(run_dir) == comparable(uninterrupted)


def test_another_run_is_continued_by_its_path(uninterrupted, toy_base, tmp_path):
    completed(small(toy_base, tmp_path / "more", "--run.resume", str(uninterrupted), "--run.steps", "9"))
    rows = comparable(tmp_path / "more")
    assert rows[:STEPS] == comparable(uninterrupted)
    assert rows[STEPS]["step"] == STEPS + 1


@pytest.mark.harness
def test_a_fork_has_the_rows_of_its_own_schedule_from_the_start(uninterrupted, toy_base, tmp_path):
    """The fork's schedule decays after its checkpoint. The run that it forks from has a constant rate."""
    kept = ("--checkpoint.every", "1", "--checkpoint.keep", "20")

    def run(name, *options):
        completed(small(toy_base, tmp_path / name, *kept, *options))
        return comparable(tmp_path / name)

    constant, triggered = run("constant", "--schedule.kind", "constant"), comparable(uninterrupted)
    parted = [i for i, row in enumerate(triggered) if row["schedule/learning_rate"] < np.float32(2e-4)]
    assert parted, "no surge was called, so that this test shows nothing"
    first = parted[0]
    source = tmp_path / "constant/checkpoints" / str(first)
    forked = run("forked", "--run.fork", str(source))
    assert forked[first:] == triggered[first:] != constant[first:]
    assert forked[:first] == constant[:first]
    period = "schedule/decay_period"  # a constant rate has no decay period
    assert [row | {period: None} for row in triggered[:first]] == constant[:first]
    shutil.rmtree(tmp_path / "constant")
    assert run("forked", "--run.fork", str(source)) == forked  # it began before, so its own checkpoints are enough


@pytest.mark.harness
def test_a_run_on_a_full_disk_ends_in_one_line_and_goes_on(toy_base, tmp_path):
    """A dump and part of a checkpoint still fit."""
    dumps, run_dir = ("--rollout.dump-every", "1"), tmp_path / "run"
    with small_disk(tmp_path, 24):
        completed(tiny(toy_base, run_dir, 2, *dumps), figure=True)
        filler = fill(tmp_path)
        os.truncate(filler, filler.stat().st_size - 100_000)
        status, output = complete(tiny(toy_base, run_dir, 6, *dumps), figure=True)
        assert status == 2, output
        last = output.strip().splitlines()[-1]
        assert re.match("error: .*(No space left on device|could not be written, those before it are kept)", last), last
        assert "No space left on device" in refused(export.main, [run_dir, tmp_path / "exported"])
        filler.unlink()
        completed(tiny(toy_base, run_dir, 6, *dumps), figure=True)
        found = comparable(run_dir)
    completed(tiny(toy_base, tmp_path / "unbroken", 6, *dumps))
    assert found == comparable(tmp_path / "unbroken")


def test_bad_input_is_one_line_and_nothing_is_lost(uninterrupted, toy_base, tmp_path):
    new, other, before = tmp_path / "new", shutil.copytree(toy_base, tmp_path / "other"), comparable(uninterrupted)
    changed = json.loads((toy_base / "config.json").read_text())
    changed["rope_parameters"]["rope_theta"] = changed["rope_theta"] = 5.0
    (other / "config.json").write_text(json.dumps(changed))

    def fork(step):
        return ["--run.dir", new, "--run.fork", uninterrupted / "checkpoints" / step]

    for extra, message in (
        (["--run.resume", "never"], "already holds a run"),
        (["--model.path", "nowhere"], "no model at nowhere"),
        (["--data.batch-size", "30000", "--run.dir", new], "a batch takes 30000 problems, but there are only 20000"),
        (["--run.resume", "nowhere", "--run.dir", new], "run.resume: nowhere holds no checkpoint"),
        (["--model.path", other], "the checkpoint is of another model than"),
        (["--rollout.temperature", "0.9"], "other settings: rollout.temperature (1.0 there, 0.9 now)"),
        ([*fork("8"), "--data.fraction", "0.5"], "other settings: data.fraction (1.0 there, 0.5 now)"),
        ([*fork("8"), "--schedule.metric", "policy/entropy"], "other settings: schedule.metric"),
        (fork("7"), "is not a checkpoint RUN/checkpoints/STEP;"),
        (fork(".."), "is not a checkpoint RUN/checkpoints/STEP;"),
        ([*fork("8"), "--run.resume", "elsewhere"], "fork and resume name two runs to begin from"),
    ):
        code, output = complete(small(toy_base, uninterrupted, *map(str, extra)))
        assert code == 2, output
        assert len(output.strip().splitlines()) == 1
        assert output.startswith("error: ")
        assert message in output
        assert comparable(uninterrupted) == before
        assert not new.exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_checkpoint_is_the_trained_policy(dtype, uninterrupted, toy_base, tmp_path):
    assert f"wrote step {STEPS}" in printed(export.main, [uninterrupted, tmp_path, "--dtype", dtype])
    policy, mesh = read_config(tmp_path), make_mesh(MeshConfig(1, 1))
    assert policy == toy_config()
    wanted = abstract_state(policy, make_optimizer(OptimizerConfig()), mesh, dynamic_scale=False)
    state, _ = Checkpointer(uninterrupted / "checkpoints", read_only=True).restore(STEPS, wanted)
    exported = load_params(tmp_path, policy)
    expected = jax.tree.map(lambda p: np.asarray(p.astype(dtype), np.float32), state.params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(exported), expected)
    assert not np.array_equal(exported["embed"], load_params(toy_base, policy)["embed"])
    assert (tmp_path / "tokenizer.json").exists()


def test_a_missing_or_damaged_checkpoint_is_one_line(uninterrupted, tmp_path):
    words = [uninterrupted, tmp_path / "x", "--step", "77"]
    assert refused(export.main, words).startswith("error: no checkpoint of step 77")
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    newest = run / "checkpoints" / str(STEPS)
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    for main, words in ((export.main, [run, tmp_path / "out"]), (evaluate.main, ["--path", newest])):
        assert refused(main, words).startswith(f"error: checkpoint {STEPS} in {run}/checkpoints is damaged: ")
    assert newest.exists()
