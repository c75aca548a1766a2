"""Tests of the record of a run: strict rows, exact cuts on resume, TensorBoard, console lines and the summary."""

import errno
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.mismatch import mismatch_statistics, read_tokens
from rljax.record.rows import format_summary, read_rows, summarize
from rljax.record.writers import Recorder


def record(run_dir, rows, first_step=1, total=100, histograms=None, **reports):
    """Writes rows. ``reports`` turns reports on."""
    recorder = Recorder(run_dir, total, first_step=first_step, **{"tensorboard": False, "progress": False} | reports)
    for row in rows:
        recorder.write(row, histograms)
    recorder.close()


def steps(first, last, **values):
    return [{"step": step} | values for step in range(first, last + 1)]


def test_a_row_reads_nothing_however_many_there_are(tmp_path):
    """The system counts the bytes that this process reads, and its calls that read."""

    def reads():
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return np.array([int(counts["rchar"]), int(counts["syscr"])])

    for step in (1, 2000):
        record(tmp_path / str(step), steps(1, step - 1, loss=0.5))
        recorder = Recorder(tmp_path / str(step), 10**4, first_step=step, progress=False)
        recorder.write({"step": step, "loss": 0.5})
        counted = [reads(), reads()]
        for row in steps(step + 1, step + 10, loss=0.5):
            recorder.write(row)
        counted.append(reads())
        recorder.close()
        nothing, read = np.diff(counted, axis=0)
        assert abs(read - nothing).max() < 10  # the sizes of the counters themselves sometimes grow by a digit


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1).filter(lambda key: key not in ("step", "nonfinite_keys")), st.floats()))
def test_floats_keep_their_bits_and_nonfinite_ones_are_named(tmp_path_factory, values):
    directory = tmp_path_factory.mktemp("run")
    record(directory, [{"step": 1} | values])

    def refuse(token):
        raise AssertionError(f"not strict JSON: {token}")

    row = json.loads((directory / "metrics.jsonl").read_text(), parse_constant=refuse)
    bad = {key for key, value in values.items() if not math.isfinite(value)}
    assert row.pop("nonfinite_keys", []) == sorted(bad)
    assert row == {"step": 1} | {key: None if key in bad else value for key, value in values.items()}


def test_scalars_are_read_back_and_keys_stand_in_order(tmp_path):
    numbers = {"step": np.int64(1), "e": np.float32(0.5), "f": jnp.float32(2), "g": jnp.asarray(jnp.nan)}
    record(tmp_path, [{"b/x": 1, "a/y": None, "c": "s", "d": True} | numbers])
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line.startswith('{"step": 1, "a/y": null, "b/x": 1, "c": "s", "d": true, "e": 0.5, ')
    others = {"e": 0.5, "f": 2.0, "g": None, "nonfinite_keys": ["g"]}
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row == {"step": 1, "a/y": None, "b/x": 1, "c": "s", "d": True} | others


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        *(({"step": 1, "a/b": value}, TypeError, "a/b: expected a scalar") for value in ([1], {"a": 1}, np.zeros(2))),
        *(({"step": step}, ValueError, f"expected the row of step 1, got step {step}") for step in (0, 2, None)),
        ({"step": 1, "nonfinite_keys": 3}, ValueError, "nonfinite_keys"),
    ],
)
def test_a_row_that_does_not_fit_leaves_nothing(tmp_path, row, error, message):
    with pytest.raises(error, match=message):
        record(tmp_path, [row])
    assert read_rows(tmp_path / "metrics.jsonl") == []


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(1, 13), st.integers(0, 40))
def test_resuming_cuts_the_record_to_the_steps_before(tmp_path_factory, recorded, first_step, torn):
    directory = tmp_path_factory.mktemp("run")
    record(directory, steps(1, recorded, x=0.1))
    path = directory / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 99, "x": 0.12345678901234567890}'[:torn])
    if first_step > recorded + 1:
        with pytest.raises(RuntimeError, match=f"expected the rows of steps 1 to {first_step - 1} in order"):
            record(directory, [], first_step)
        return
    record(directory, steps(first_step, 12, x=0.1), first_step)
    assert [row["step"] for row in read_rows(path)] == list(range(1, 13))
    assert path.read_bytes().startswith(b"".join(whole.splitlines(keepends=True)[: first_step - 1]))
    assert sorted(item.name for item in directory.iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\n{"step": 3}\n', r"expected the rows of steps 1 to 3 in order, got 2 up to step 3"),
        ('{"step": 1}\n{"step": 1}\n{"step": 2}\n', r"got 3 up to step 2"),
        ("", r"expected the rows of steps 1 to 3 in order, got 0 up to step 0"),
        ('{"step": 1}\nrubbish\n{"step": 3}\n', r"metrics.jsonl:2: not a row"),
        ('{"step": 1}\n[2]\n{"step": 3}\n', r"metrics.jsonl:2: expected an object with a step"),
    ],
)
def test_a_damaged_record_is_refused_and_left_unchanged(tmp_path, text, message):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(RuntimeError, match="got 0 up to step 0"):
        record(tmp_path, [], first_step=4)  # a missing record is a gap
    path.write_text(text)
    with pytest.raises(RuntimeError, match=message):
        record(tmp_path, [], first_step=4)
    assert path.read_text() == text
    path.write_text('{"step": 1}\n{"step": 2}')  # a last row that lacks only its newline is kept
    record(tmp_path, [{"step": 3}], first_step=3)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def read_values(directory):
    """Returns (step, value in TensorBoard's form) of all that TensorBoard would show, after its purges."""
    from tensorboardX.proto.event_pb2 import Event

    shown = []
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                shown = [item for item in shown if item[0] < event.step]
            shown += [(event.step, value) for value in event.summary.value]
    return shown


def test_tensorboard_gets_histograms_and_what_a_resume_replaces(tmp_path):
    """There are two exact zeros, one value of 1.5e-3 nats and three of 0.2. Each is in a bin of 2% that holds it."""
    tokens = read_tokens(np.array([[0.0, 0.0, 1.5e-3, 0.2, -0.2, 0.2]]), np.zeros((1, 6)), np.ones((1, 6)))
    counts = mismatch_statistics(tokens)["histogram"]
    record(tmp_path / "one", steps(1, 1), histograms={"mismatch/logprob_abs_diff": counts}, tensorboard=True)
    ((step, value),) = read_values(tmp_path / "one/tb")
    histogram = value.histo
    assert (step, value.tag, histogram.num) == (1, "mismatch/logprob_abs_diff", 6)
    held = [(limit, count) for limit, count in zip(histogram.bucket_limit, histogram.bucket, strict=True) if count]
    assert [count for _, count in held] == [2, 1, 3]
    assert [limit for limit, _ in held] == pytest.approx([1e-9, 1.5e-3 * 1.01, 0.2 * 1.01], rel=0.0101)
    assert (histogram.max, histogram.sum) == pytest.approx((0.2, 0.6015), rel=0.01)
    values = {"reward/mean": 0.5, "a/none": None, "a/text": "x", "a/bad": math.nan, "eval/x y/pass@4": 1}
    record(tmp_path, steps(1, 3, **values), tensorboard=True)
    record(tmp_path, steps(3, 3, **{"reward/mean": 0.75}), 3, tensorboard=True)
    shown = [(step, value.tag, value.simple_value) for step, value in read_values(tmp_path / "tb")]
    rewards = [(step, value) for step, tag, value in shown if tag == "reward/mean"]
    assert rewards == [(1, 0.5), (2, 0.5), (3, 0.75)]
    assert [step for step, tag, value in shown if tag == "a/bad" and math.isnan(value)] == [1, 2]
    assert {tag for _, tag, _ in shown} == {"reward/mean", "a/bad", "eval/x y/pass@4"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Gone(io.StringIO):
    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


def test_the_console_has_plain_lines_or_a_bar_and_may_be_gone(tmp_path, capsys, monkeypatch):
    rows = steps(1, 40, **{"reward/mean": 0.25, "response_length/mean": 31.25, "schedule/learning_rate": 2e-4})
    rows[14]["eval/toy/accuracy"] = 0.5
    record(tmp_path / "plain", rows, total=40, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 10, 15, 20, 30, 40]
    assert lines[0].startswith("step  1/40  reward 0.250  length 31.2  lr 2.00e-04  mismatch -  ")
    assert "eval/toy/accuracy 0.500" in lines[2]
    monkeypatch.setattr("sys.stderr", Terminal())
    mismatch = {"mismatch/log_ppl_abs_diff": 2.5e-3, "mismatch/logprob_abs_diff_mean": 3.0}
    record(tmp_path / "bar", steps(1, 2, **{"reward/mean": 0.25}, **mismatch), total=2, progress=True)
    said = sys.stderr.getvalue()
    assert "2/2" in said
    assert "reward 0.250  length -  lr -  mismatch 2.50e-03  mean abs 3.00e+00" in said
    monkeypatch.setattr("sys.stderr", Gone())
    record(tmp_path / "gone", steps(1, 2), total=2, progress=True)
    assert [row["step"] for row in read_rows(tmp_path / "gone/metrics.jsonl")] == [1, 2]


def test_rows_for_tensorboard_do_not_bring_torch_in(tmp_path):
    """A second close changes nothing."""
    code = "import sys; from rljax.record.writers import Recorder; "
    code += f"recorder = Recorder({str(tmp_path)!r}, 1, progress=False); recorder.write({{'step': 1, 'loss': 0.5}}); "
    code += "recorder.close(); recorder.close(); print('torch' in sys.modules); recorder.write({'step': 2})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "False\n"), done.stderr
    assert "closed file" in done.stderr.splitlines()[-1]
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    assert [step for step, _ in read_values(tmp_path / "tb")] == [1]


# ---- the summary ----


def run_rows(total=60):
    """Returns rows with length 10 and reward 0.1. From step 31 on the length is 35 and the reward 0.6."""
    names = ("reward/mean", "response_length/mean", "schedule/learning_rate", "optimizer/skipped_updates")
    rows = []
    for step in range(1, total + 1):
        row = dict(zip(names, (0.6, 35.0, 1e-4, 2) if step > 30 else (0.1, 10.0, 2e-4, 0), strict=True))
        row |= {"step": step, "time/step_s": 0.5, "time/rollout_s": 0.4}
        row |= {"schedule/surge_step": 34, "schedule/decay_period": 61} if step >= 34 else {}
        row |= {"mismatch/log_ppl_abs_diff": 0.004 if step == 7 else 0.001}
        rows.append(row | {"mismatch/logprob_abs_diff_mean": 2.0 if step == 9 else 0.002})
    for step, accuracy in ((20, 0.2), (40, 0.7), (60, 0.6)):
        rows[step - 1]["eval/toy/accuracy"] = accuracy
    return rows


def test_the_summary_and_its_table():
    got = summarize(run_rows())
    assert [got[f"reward_{name}"] for name in ("first", "last", "gain")] == pytest.approx([0.1, 0.6, 0.5])
    assert (got["response_length_first"], got["response_length_last"]) == (10, 35)
    assert (got["surge_step"], got["decay_period"], got["learning_rate_final"]) == (34, 61, 1e-4)
    assert got["evaluations"] == {"toy": {"last": 0.6, "best": 0.7, "best_step": 40}}
    assert got["mismatch_mean"] == pytest.approx((59 * 0.001 + 0.004) / 60)
    assert (got["mismatch_max"], got["skipped_updates"], got["steps"]) == (0.004, 2, 60)
    assert (got["wall_seconds"], got["rows_with_nonfinite"]) == (pytest.approx(30), 0)
    assert {
        "reward                0.100 -> 0.600 (gain +0.500)",
        "surge called          at step 34; decay period 61",
        "accuracy on toy       0.600 (best 0.700 at step 40)",
        "mismatch              mean 1.05e-03, max 4.00e-03 (log_ppl_abs_diff)",
        "mean abs              mean 3.53e-02, max 2.00e+00 (logprob_abs_diff_mean)",
        "wall time             30.0 s",
    } < set(format_summary(got).splitlines())
    bare = summarize([{"step": 1}, {"step": 2, "reward/mean": None, "nonfinite_keys": ["reward/mean"]}])
    assert (bare["rows_with_nonfinite"], bare["reward_gain"]) == (1, None)
    assert json.loads(json.dumps(bare, allow_nan=False)) == bare
    assert "reward" in format_summary(bare)
    with pytest.raises(ValueError, match="no rows"):
        summarize([])
