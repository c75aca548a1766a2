"""rljax replay on every kind of log it reads, and on logs it cannot read."""

import csv
import json
import math
import struct
import subprocess
import sys

import pytest

from rljax.commands import replay
from rljax.errors import ConfigError

SummaryWriter = pytest.importorskip("tensorboardX").SummaryWriter
Event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
Summary = pytest.importorskip("tensorboardX.proto.summary_pb2").Summary
TensorProto = pytest.importorskip("tensorboardX.proto.tensor_pb2").TensorProto

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


NAN = float("nan")
LENGTH = "response_length/mean"


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in value))
    return path


def write_events(directory, lengths, first, tag=LENGTH):
    with SummaryWriter(str(directory), filename_suffix=f".{first}") as writer:
        for step, length in enumerate(lengths, first):
            writer.add_scalar(tag, length, step)
            writer.add_scalar("training/global_step", step, step)


@pytest.mark.parametrize(
    ("name", "log", "note"),
    [
        # verl's own file
        ("verl.jsonl", [{"step": row.pop("step"), "data": row} for row in rows_of(LENGTH)], ""),
        ("nested.jsonl", [{"step": i, "response_length": {"mean": n, "max": 9}} for i, n in enumerate(LENGTHS, 1)], ""),
        # Weights & Biases: the evaluation has a row of its own, or overwrites the length
        (
            "history.jsonl",
            [
                row
                for i, n in enumerate(LENGTHS, 1)
                for row in (
                    {"_step": 2 * i, "trainer/global_step": i, LENGTH: n},
                    {"_step": 2 * i + 1, "trainer/global_step": i, LENGTH: NAN if i % 2 else None, "eval/acc": 0.5},
                )
            ],
            ", steps by 'trainer/global_step'",
        ),
        (
            "calls.jsonl",
            [row for i, n in enumerate(LENGTHS) for row in ({"_step": 2 * i, LENGTH: n}, {"_step": 2 * i + 1, "x": 1})],
            ", steps by '_step'",
        ),
        ("history.json", [{"_step": i, LENGTH: n} for i, n in enumerate(LENGTHS, 1)][40:], ", steps by '_step'"),
        (
            "frame.json",
            {"_step": {str(i): i for i in range(1, 301)}, LENGTH: {str(i): n for i, n in enumerate(LENGTHS, 1)}},
            ", steps by '_step'",
        ),
        # a step column that never changes, and one that only an evaluation has
        (
            "constant.jsonl",
            [{"train/global_step": 0, "_step": i, LENGTH: n} for i, n in enumerate(LENGTHS, 1)]
            + [{"training/global_step": 7, "eval/acc": 1.0}],
            ", steps by '_step'",
        ),
        ("val_first.jsonl", [{"step": 0, LENGTH: None, "val-core/acc": 0.1}, *rows_of(LENGTH)], ""),
        (
            "trainer_state.json",
            {
                "global_step": 300,
                "log_history": [
                    *({**row, "eval_completions/mean_length": 5.0} for row in rows_of("completions/mean_length")),
                    {"step": 300, "train_runtime": 5.0},
                ],
            },
            "",
        ),
        # prime-rl's file has no step; slime's steps begin at 0
        ("dots.jsonl", rows_of("response_length.mean"), ""),
        ("metrics.jsonl", [{"train/agg/all/num_output_tokens/mean": n, "train/m/all/x": 1} for n in LENGTHS], "each"),
        (
            "slime.jsonl",
            [{"rollout/step": i, "rollout/response_lengths": n} for i, n in enumerate(LENGTHS)]
            + [{"train/step": i, "train/loss": 1.0} for i in range(600)],
            ", steps by 'rollout/step'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_logs_of_other_programs(tool, capsys, tmp_path, name, log, note):
    lines = run(tool, capsys, tmp_path, write(tmp_path / name, log))
    assert CALL in lines
    assert note in lines[0] if note else "by" not in lines[0]


def test_a_bom_and_empty_cells_in_csv(tool, capsys, tmp_path):
    cells = [f"{i},{n}\n{i},\n" for i, n in enumerate(LENGTHS, 1)][40:]
    for separator in ",;\t":
        path = tmp_path / "log.csv"
        path.write_text(separator.join(("step", LENGTH)) + "\n" + "".join(cells).replace(",", separator), "utf-8-sig")
        assert CALL in run(tool, capsys, tmp_path, path)


def test_event_files_of_a_resumed_run_are_one_log(tool, capsys, tmp_path):
    write_events(tmp_path / "one", LENGTHS[:100], 1)
    write_events(tmp_path / "one", LENGTHS[60:], 61)
    assert CALL in run(tool, capsys, tmp_path, tmp_path / "one")
    # TRL begins another folder; evaluations have their own.
    write_events(tmp_path / "trl/runs/first", LENGTHS[:70], 1)
    write_events(tmp_path / "trl/runs/second", LENGTHS[60:], 61)
    write_events(tmp_path / "trl/runs/eval", [5.0] * 300, 1)
    assert CALL in run(tool, capsys, tmp_path, tmp_path / "trl")


def test_several_runs_in_a_directory_are_named(tool, tmp_path):
    write_events(tmp_path / "a", LENGTHS, 1)
    write_events(tmp_path / "b", LENGTHS, 1)
    message = refused(tool, tmp_path)
    assert "logs of several runs" in message
    assert str(tmp_path / "a") in message
    assert str(tmp_path / "b") in message


def test_a_directory_with_the_length_in_another_file(tool, capsys, tmp_path):
    write(tmp_path / "out/metrics.jsonl", [{"step": 1, "loss": 1.0}])
    write(tmp_path / "out/run_default/metrics.jsonl", rows_of("completion_len/mean"))
    assert CALL in run(tool, capsys, tmp_path, tmp_path / "out")
    write(tmp_path / "hf/checkpoint-9/trainer_state.json", {"log_history": rows_of("completions/mean_length")[:9]})
    write(tmp_path / "hf/trainer_state.json", {"log_history": rows_of("completions/mean_length")})
    assert CALL in run(tool, capsys, tmp_path, tmp_path / "hf")


@pytest.mark.parametrize(
    "tensor",
    [
        lambda n: {"dtype": 2, "double_val": [n]},
        lambda n: {"dtype": 9, "int64_val": [int(n)]},
        lambda n: {"dtype": 3, "int_val": [int(n)]},
        lambda n: {"dtype": 1, "tensor_content": struct.pack("<f", n)},
        lambda n: {"dtype": 2, "tensor_content": struct.pack("<d", n)},
        lambda n: {"dtype": 9, "tensor_content": struct.pack("<q", int(n))},
        lambda n: {"dtype": 14, "tensor_content": struct.pack("<f", n)[2:]},
        lambda n: {"dtype": 19, "half_val": [struct.unpack("<H", struct.pack("<e", n))[0]]},
    ],
)
def test_tensors_of_every_dtype(tool, capsys, tmp_path, tensor):
    path = tmp_path / "events.out.tfevents.1"
    with path.open("wb") as file:
        for step, length in enumerate(LENGTHS, 1):
            value = Summary.Value(tag=LENGTH, tensor=TensorProto(**tensor(length)))
            record = Event(step=step, summary=Summary(value=[value])).SerializeToString()
            file.write(struct.pack("<QI", len(record), 0) + record + bytes(4))
    assert CALL in run(tool, capsys, tmp_path, path)


def test_a_last_line_that_is_cut_is_left_out(tool, capsys, tmp_path):
    path = write(tmp_path / "log.jsonl", rows_of(LENGTH))
    path.write_text("\ufeff" + path.read_text() + '{"step": 301, "respon', encoding="utf-8")
    assert CALL in run(tool, capsys, tmp_path, path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.wandb", "x", "export the history as CSV or JSONL"),
        ("log.json", "[]", "the log is empty"),
        ("log.json", '{"log_history": 3}', "no length column"),
        ("log.jsonl", '{"a":' * 900 + "1" + "}" * 900, "no length column"),
        ("log.jsonl", '{"a":' * 100000 + "1" + "}" * 100000, "nested too deeply"),
        ("log.csv", "step," + LENGTH, "the log is empty"),
    ],
)
def test_other_files_are_refused_in_one_line(tool, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    assert message in refused(tool, tmp_path / name)


@pytest.mark.parametrize(
    "line",
    [
        "(TaskRunner pid=7) step:{i} - a/b:1.0 - response_length/mean:np.float64({n}) - timing_s/step:3.5",
        "[2026-01-02] rollout.py:55 - perf {j}: {{'rollout/response_len/mean': {n}, 'rollout/truncated_ratio': 1e-05}}",
        " 3%|#   | 3/99 [00:01<00:02]\r{{'loss': '0.0', 'completions/mean_length': '{n}', 'epoch': '0.1'}}",
    ],
    ids=["verl", "slime", "TRL"],
)
def test_console_output(tool, capsys, tmp_path, line):
    text = "".join(
        f"INFO it's step {i}\n{line.format(i=i, j=i - 1, n=n)}\neval {i}: {{'eval/response_len/mean': 5.0}}\n"
        for i, n in enumerate(LENGTHS, 1)
    )
    (tmp_path / "train.log").write_text(text)
    assert CALL in run(tool, capsys, tmp_path, tmp_path / "train.log")
