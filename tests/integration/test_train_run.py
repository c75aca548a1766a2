"""Whole runs of ``python -m rljax.train`` as a person starts, kills and resumes them."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from toy_runs import ROOT, TIMEOUT, command, comparable, complete, start, wait_for_rows

from rljax.config import Config
from rljax.config_loader import load_config
from rljax.data.toy import policy_config
from rljax.policy.config import read_config
from rljax.policy.qwen3 import init_params

STEPS = 8
SMALL = [
    *("--data.batch-size", "8", "--rollout.group-size", "4", "--packing.rows-per-micro-batch", "4"),
    *("--run.steps", str(STEPS), "--eval.every", "3", "--checkpoint.every", "2"),
    *("--optimizer.learning-rate", "1e-3", "--schedule.surge.warmup", "7", "--schedule.surge.window", "30"),
]


def small(base, run_dir, *options):
    return command(base, run_dir, *SMALL, *options)


@pytest.fixture(scope="module")
def uninterrupted(toy_base, cache, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    code, output = complete(small(toy_base, run_dir), cache)
    assert code == 0, output
    return run_dir


def test_rows_are_complete_and_finite(uninterrupted):
    rows = comparable(uninterrupted)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert "nonfinite_keys" not in row
        assert 0 < row["mismatch/log_ppl_abs_diff"] < 0.05
        assert row["rollout/policy_version"] == row["step"] - 1
        assert row["rollout/staleness"] == 0.0
        assert row["schedule/learning_rate"] == np.float32(1e-3)
        assert ("eval/toy/accuracy" in row) == (row["step"] in (3, 6, 8))
    # Else resuming would be tested without an optimizer state to lose.
    assert all(row["optimizer/grad_norm"] > 0 for row in rows)
    assert rows[-1]["optimizer/skipped_updates"] == 0
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert (uninterrupted / "report.png").stat().st_size > 10_000
    assert list((uninterrupted / "tb").glob("events*"))


def test_written_config_reproduces_the_run(uninterrupted, toy_base, cache, tmp_path):
    written = uninterrupted / "config.yaml"
    config = load_config(Config, [str(written)], prog="test", description="")
    assert config.run.steps == STEPS
    again = [
        sys.executable,
        "-m",
        "rljax.train",
        str(written),
        "--run.dir",
        str(tmp_path / "again"),
        "--run.steps",
        "3",
    ]
    code, output = complete(again, cache)
    assert code == 0, output
    # The last step of the shorter run is evaluated as a last step.
    shorter = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in comparable(tmp_path / "again")]
    expected = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in comparable(uninterrupted)[:3]]
    assert shorter == expected


def test_killed_twice_and_resumed_the_rows_are_the_same_bit_for_bit(uninterrupted, toy_base, cache, tmp_path):
    run_dir = tmp_path / "killed"
    for rows in (3, 6):
        process = start(small(toy_base, run_dir), cache)
        wait_for_rows(process, run_dir, rows)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    code, output = complete(small(toy_base, run_dir), cache)
    assert code == 0, output
    assert comparable(run_dir) == comparable(uninterrupted)


def test_a_terminated_run_saves_its_step_and_goes_on(uninterrupted, toy_base, cache, tmp_path):
    run_dir = tmp_path / "stopped"
    process = start(small(toy_base, run_dir, "--checkpoint.every", "0"), cache)
    wait_for_rows(process, run_dir, 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT)
    done = len(comparable(run_dir))
    assert process.returncode == 128 + signal.SIGTERM, output
    assert f"stopped after step {done}, saved" in output
    assert [int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()] == [done]
    code, output = complete(small(toy_base, run_dir), cache)
    assert code == 0, output
    assert comparable(run_dir) == comparable(uninterrupted)


def test_another_run_is_continued_by_its_path(uninterrupted, toy_base, cache, tmp_path):
    source = uninterrupted
    code, output = complete(small(toy_base, tmp_path / "more", "--run.resume", str(source), "--run.steps", "9"), cache)
    assert code == 0, output
    rows = comparable(tmp_path / "more")
    assert rows[:STEPS] == comparable(source)
    assert rows[STEPS]["step"] == STEPS + 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--run.resume", "never"], "already holds a run"),
        (["--model.path", "nowhere"], "no model at nowhere"),
        (["--packing.row-tokens", "40"], "row_tokens = 40 is shorter than the longest possible sequence, 44"),
        (["--mesh.fsdp", "64"], "needs more than the 1 devices here"),
        (["--optimizer.learning-rate", "-1"], "optimizer.learning_rate must be positive and finite, got -1.0"),
        (["--rollout.group-size", "1"], "group_size must be at least 2"),
        (["--schedule.kind", "wrong"], "length_triggered"),
        (["--rollout.temperature", "0.9"], "other settings: rollout.temperature (1.0 there, 0.9 now)"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_lost(extra, message, uninterrupted, toy_base, cache):
    before = comparable(uninterrupted)
    code, output = complete(small(toy_base, uninterrupted, *extra), cache)
    assert code == 2
    assert len(output.strip().splitlines()) == 1
    assert output.startswith("error: ")
    assert message in output
    assert comparable(uninterrupted) == before


def test_exported_checkpoint_is_the_trained_policy(uninterrupted, toy_base, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "bfloat16"):
        arguments = [str(ROOT / "tools/convert_checkpoint.py"), str(uninterrupted), str(tmp_path / dtype)]
        done = subprocess.run(
            [sys.executable, *arguments, "--dtype", dtype], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"wrote step {STEPS}" in done.stdout
    assert read_config(tmp_path / "float32") == policy_config()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "float32")
    fresh = init_params(policy_config(), 1)["embed"]
    assert not np.array_equal(model.get_input_embeddings().weight.detach().numpy(), np.asarray(fresh))
    ids = tokenizer(["123+456="], return_tensors="pt")["input_ids"]
    answer = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=36)[0])
    assert answer.startswith("123+456=")


def test_missing_checkpoint_is_named(uninterrupted, tmp_path):
    arguments = [str(ROOT / "tools/convert_checkpoint.py"), str(uninterrupted), str(tmp_path / "x"), "--step", "77"]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no checkpoint of step 77")
