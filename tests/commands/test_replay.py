"""rljax replay on every kind of log it reads, and on logs it cannot read."""

import csv
import json
import math
import subprocess
import sys

import pytest

from rljax.commands import replay
from rljax.errors import ConfigError

SummaryWriter = pytest.importorskip("tensorboardX").SummaryWriter

# The level triples at step 80: the median of five and six lengths in a row have it at step 85.
LENGTHS = [1000.0] * 79 + [3500.0] * 221
CALL = "surge called at step 85 (crossing since step 82), decay period 153"


@pytest.fixture(scope="module")
def tool():
    return replay


def run(tool, capsys, tmp_path, log, *arguments):
    tool.main([str(log), "--png", str(tmp_path / "out.png"), *arguments])
    return capsys.readouterr().out.splitlines()


def refused(tool, log, *arguments):
    with pytest.raises(ConfigError) as error_info:
        tool.main([str(log), *arguments])
    assert "\n" not in str(error_info.value)
    return str(error_info.value)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(column, lengths=LENGTHS, first=1):
    return [{"step": step, column: length} for step, length in enumerate(lengths, first)]


@pytest.mark.parametrize(
    "column",
    [
        "response_length/mean",  # rljax, verl
        "completions/mean_length",  # TRL
        "train/completions/mean_length",  # TRL in TensorBoard
        "rl/completions/mean_length",  # tunix
        "decode_len/all/mean",  # prime-rl
        "completion_len/mean",
        "train/agg/all/num_output_tokens/mean",
        "train/mean_gen_tokens_per_sample",  # NeMo-RL
        "rollout/response_len/mean",  # slime
        "generate/avg_num_tokens",  # SkyRL
        "my run - response_length/mean",  # a CSV that Weights & Biases exports
    ],
)
def test_the_length_column_is_found(tool, capsys, tmp_path, column):
    rows = [{**row, "loss": 1.0, "eval/" + column: 5.0} for row in rows_of(column)]
    lines = run(tool, capsys, tmp_path, write_jsonl(tmp_path / "log.jsonl", rows))
    assert lines[:2] == [f"300 steps of {column!r}", CALL]


def test_changes_of_the_rate_are_printed_and_a_figure_written(tool, capsys, tmp_path):
    lines = run(tool, capsys, tmp_path, write_jsonl(tmp_path / "log.jsonl", rows_of("response_length/mean")))
    assert lines[2:4] == ["  from step     1: learning rate 1e-06", "  from step   153: learning rate 5e-07"]
    assert len(lines) == 5
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_csv(tool, capsys, tmp_path):
    path = tmp_path / "log.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "response_length/mean"])
        writer.writeheader()
        writer.writerows(rows_of("response_length/mean"))
    assert CALL in run(tool, capsys, tmp_path, path)


def test_tensorboard_file_and_directory(tool, capsys, tmp_path):
    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step, length in enumerate(LENGTHS, 1):
            writer.add_scalar("response_length/mean", length, step)
            writer.add_scalar("response_length/clip_ratio", 0.1, step)
    (path,) = (tmp_path / "tb").glob("*tfevents*")
    header = "300 steps of 'response_length/mean', truncated fraction 'response_length/clip_ratio'"
    assert run(tool, capsys, tmp_path, path)[:2] == [header, CALL]
    assert run(tool, capsys, tmp_path, tmp_path)[:2] == [header, CALL]
    # A writer that was killed leaves half a record.
    path.write_bytes(path.read_bytes()[:-5])
    assert CALL in run(tool, capsys, tmp_path, path)


def test_truncated_batches_are_not_used(tool, capsys, tmp_path):
    rows = [
        {**row, "response_length/clip_ratio": 0.5 if row["step"] >= 80 else 0.0}
        for row in rows_of("response_length/mean")
    ]
    lines = run(tool, capsys, tmp_path, write_jsonl(tmp_path / "log.jsonl", rows))
    assert lines[1:3] == [
        "221 of them have a truncated fraction above max_truncated: not used",
        "no surge in 300 steps",
    ]
    assert "no surge" not in " ".join(run(tool, capsys, tmp_path, tmp_path / "log.jsonl", "--max-truncated", "0.6"))


def test_steps_that_start_at_zero_are_counted_from_one(tool, capsys, tmp_path):
    log = write_jsonl(tmp_path / "log.jsonl", rows_of("rollout/response_len/mean", first=0))
    assert CALL in run(tool, capsys, tmp_path, log)


def test_skipped_and_repeated_steps(tool, capsys, tmp_path):
    rows = rows_of("response_length/mean")
    # Resumed from step 60: the first try of 61-70 was something else. Steps 20-22 were never logged.
    rows = rows[:19] + rows[22:60] + [{**row, "response_length/mean": 1.0} for row in rows[60:70]] + rows[60:]
    lines = run(tool, capsys, tmp_path, write_jsonl(tmp_path / "log.jsonl", rows))
    assert lines[1:3] == ["3 of them have no finite, positive length: they count as steps, but are not used", CALL]


def test_rows_of_nan_and_null_are_one_line(tool, capsys, tmp_path):
    rows = rows_of("response_length/mean")
    for index, bad in ((10, math.nan), (11, None), (12, "n/a"), (13, -1.0)):
        rows[index]["response_length/mean"] = bad
    lines = run(tool, capsys, tmp_path, write_jsonl(tmp_path / "log.jsonl", rows))
    assert lines[1:3] == ["4 of them have no finite, positive length: they count as steps, but are not used", CALL]


def test_without_a_step_column_rows_are_steps(tool, capsys, tmp_path):
    log = write_jsonl(tmp_path / "log.jsonl", [{"tokens": length} for length in LENGTHS])
    assert CALL in run(tool, capsys, tmp_path, log, "--column", "tokens")


def test_sweep_shows_how_the_call_moves(tool, capsys, tmp_path):
    ramp = [1000.0] * 79 + [1000.0 + 125 * step for step in range(1, 21)] + [3500.0] * 200
    log = write_jsonl(tmp_path / "log.jsonl", rows_of("response_length/mean", ramp))
    lines = run(tool, capsys, tmp_path, log, "--sweep")
    swept = [line for line in lines if line.startswith(("* ", "  ratio", "  window", "  persistence"))]
    assert len(swept) == 15
    assert sum(line.startswith("* ") for line in swept) == 3
    steps = [int(line.split("step ")[1].split()[0]) for line in swept if "ratio" in line and "no surge" not in line]
    # 1000 + 125 n reaches 2000, 2500, 3000, 3500 at n = 8, 12, 16, 20, two steps before the median of five.
    assert steps == [79 + n + 2 for n in (8, 12, 16, 20)]
    assert "  ratio 4: no surge in 299 steps" in swept


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("", (), "the log is empty"),
        ("\n\n", (), "the log is empty"),
        ('{"loss": 1}\n', (), "no length column of a known name in the log; choose one with --column from: loss"),
        ('{"loss": 1}\n', ("--column", "len"), "no column 'len' in the log; it has: loss"),
        ('{"response_length/mean": NaN}\n', (), "has no positive number in any of its 1 steps"),
        ('{"response_length/mean": 1\n', (), "line 1 is not JSON"),
        ("[1, 2]\n", (), "line 1 is not a JSON object"),
        ('{"response_length/mean": 1}\n', ("--ratio", "0.5"), "ratio = 0.5"),
        ('{"response_length/mean": 1}\n', ("--multiplier", "0.5"), "multiplier = 0.5"),
    ],
)
def test_what_cannot_be_replayed_is_one_clear_line(tool, tmp_path, content, arguments, message):
    log = tmp_path / "log.jsonl"
    log.write_text(content)
    assert message in refused(tool, log, *arguments)


def test_a_log_that_is_not_there(tool, tmp_path):
    assert "no such file" in refused(tool, tmp_path / "nothing.jsonl")
    assert "neither metrics.jsonl nor" in refused(tool, tmp_path)


def test_the_program_exits_with_one_line_on_stderr(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rljax.cli", "replay", str(tmp_path / "no.csv")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
