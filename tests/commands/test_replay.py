"""``rljax replay`` reads every kind of log that it supports, and does what its tutorial shows."""

import contextlib
import csv
import json
import math
import re
import shlex
import struct

import pytest
from isolated import rljax_with_only
from pictures import coloured_share
from study_rows import read_table
from toy_runs import ROOT, outcome, printed, refused

from rljax import cli
from rljax.commands import replay

RecordWriter = pytest.importorskip("tensorboardX.record_writer").RecordWriter
SummaryWriter = pytest.importorskip("tensorboardX").SummaryWriter
Event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
Summary = pytest.importorskip("tensorboardX.proto.summary_pb2").Summary
TensorProto = pytest.importorskip("tensorboardX.proto.tensor_pb2").TensorProto

LENGTH = "response_length/mean"
# The level triples at step 80. The median of five and six lengths in a row call it at step 85.
LENGTHS = [1000.0] * 79 + [3500.0] * 221
COUNTED = list(enumerate(LENGTHS, 1))
CALL = "surge called at step 85 (crossing since step 82), decay period 153"


def run(log, *arguments):
    return printed(replay.main, [log, *arguments]).splitlines()


def table(lines):
    """Returns the cells of the table of rules, by the rule's name without its mark."""
    start = next(number for number, line in enumerate(lines) if line.startswith("rule "))
    rows = [re.split(r" {2,}", line[2:]) for line in lines[start + 1 :]]
    return {name: cells for name, *cells in rows}


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in value))
    return path


def rows_of(column, lengths=LENGTHS, first=1):
    return [{"step": step, column: length} for step, length in enumerate(lengths, first)]


def curve(path, lengths, column=LENGTH):
    return write(path, rows_of(column, lengths))


def wandb_rows(step, length):
    """Returns the row of a step, and that of an evaluation after it."""
    of_evaluation = {"_step": 2 * step + 1, LENGTH: math.nan if step % 2 else None, "eval/acc": 0.5}
    return [{"trainer/global_step": step} | row for row in ({"_step": 2 * step, LENGTH: length}, of_evaluation)]


# verl and rljax; TRL alone, in TensorBoard and in tunix; prime-rl; NeMo-RL; slime; SkyRL; a CSV of Weights & Biases
COLUMNS = ["response_length/mean", "my run - response_length/mean", "response_length.mean"]
COLUMNS += ["completions/mean_length", "train/completions/mean_length", "rl/completions/mean_length"]
COLUMNS += ["decode_len/all/mean", "completion_len/mean", "train/agg/all/num_output_tokens/mean"]
COLUMNS += ["train/mean_gen_tokens_per_sample", "rollout/response_len/mean", "generate/avg_num_tokens"]


@pytest.mark.parametrize("column", COLUMNS)
def test_the_length_column_is_found(tmp_path, column):
    rows = [{**row, "loss": 1.0, "eval/" + column: 5.0} for row in rows_of(column)]
    lines = run(write(tmp_path / "log.jsonl", rows))
    assert lines[:2] == [f"300 steps of {column!r}, steps by 'step'", CALL]


def test_changes_of_the_rate_are_printed_down_to_the_floor(tmp_path):
    """The period is 85 x 1.8 = 153, and an eighth is above the floor of a tenth. A long way to the floor is cut."""
    log = curve(tmp_path / "log.jsonl", LENGTHS)
    changes = {1: "1e-06", 153: "5e-07", 306: "2.5e-07", 459: "1.25e-07", 612: "1e-07"}
    late = " (after the end of the log)"
    lines = [f"  from step {step:5}: learning rate {rate}{late * (step > 300)}" for step, rate in changes.items()]
    assert run(log)[2:8] == [*lines, ""]
    assert sorted(tmp_path.iterdir()) == [log]
    lines = run(log, "--decay-factor", "0.9")  # 0.9 ** 22 = 0.098 is the first below the floor, and 22 x 153 = 3366
    assert sum(line.startswith("  from step") for line in lines) == 12
    assert "  and so on, down to 1e-07 at step 3366" in lines


def test_steps_without_a_length_and_padded_lengths(tmp_path):
    rows = rows_of(LENGTH)
    for index, bad in ((10, math.nan), (11, None), (12, "n/a"), (13, -1.0)):
        rows[index][LENGTH] = bad
    # The run resumed from step 60, so the first try of 61-70 is different. Steps 20-22 were never logged. The file
    # begins with a mark of its encoding, and its last line is cut.
    rows = rows[:19] + rows[22:60] + [row | {LENGTH: 1.0} for row in rows[60:70]] + rows[60:]
    path = write(tmp_path / "log.jsonl", rows)
    path.write_text("\ufeff" + path.read_text() + '{"step": 301, "respon', encoding="utf-8")
    unused = "of them have no finite, positive length: they count as steps, but are not used"
    assert run(path)[1:3] == [f"7 {unused}", CALL]
    # A padded length is refused beside the true one.
    padded = [7000] * 40 + [6990] * 20
    rows = [{"step": i, "response_length": n, "response_tokens": 4000 + i, "x": i} for i, n in enumerate(padded, 1)]
    log = write(tmp_path / "log.jsonl", rows)
    message = refused(replay.main, [log])
    assert "column 'response_length' has one number in most rows, as a padded width has" in message
    assert "choose one with --column response_tokens or --column response_length" in message
    for column in ("response_tokens", "response_length"):
        assert f"60 steps of {column!r}" in run(log, "--column", column)[0]
    # A length at its limit is none, although prompts vary, and so does the time of a token.
    growing = ("step", "prompt_length/mean", "timing/response_tokens", "completions/max_length")
    still = {"completions/mean_length": 256, "completions/mean_terminated_length": 0}
    lines = run(write(log, [dict.fromkeys(growing, i) | still for i in range(1, 60)]))
    assert lines[0] == "59 steps of 'completions/mean_length', steps by 'step'"


def test_a_file_with_two_runs_says_which_is_replayed(tmp_path):
    """MLflow's table has the runs one after the other; a run that continues another has other steps."""
    path, names = tmp_path / "x.csv", [f"{run} - {LENGTH}" for run in ("run a", "run-b")]
    cells = "".join(f"{step},{length},1.0,{3 + step}\n" for step, length in COUNTED)
    path.write_text(f'"Step","{names[0]}","{names[0]}__MIN","{names[1]}"\n{cells}')
    status, out, err = outcome(replay.main, [path, "--json", "-"])
    assert (status, err.count("\n")) == (0, 1)
    assert f"x.csv has 2 runs: {names[0]!r} is replayed; choose another with --column '{names[1]}'" in err
    (log,) = json.loads(out)["logs"]
    assert (log["length_column"], log["other_runs"]) == (names[0], [names[1]])
    assert f"{names[1]!r} is replayed" in outcome(replay.main, [path, "--column", names[1]])[2]
    for start, status in ((1, 2), (3, 0), (4, 0)):
        cells = [("a", step, 300) for step in range(1, 4)] + [("b", start + step, 600) for step in range(3)]
        lines = [f"{run},x{run},{LENGTH},{step},0,{length}" for run, step, length in cells]
        path.write_text("\n".join(["Run,Run ID,metric,step,timestamp,value", *lines]))
        found, _, err = outcome(replay.main, [path])
        said = "column 'Run' has several runs with the same steps: keep the rows of one run" in err
        assert (found, said) == (status, status == 2)


def test_what_cannot_be_replayed_is_one_clear_line(tmp_path):
    assert "neither metrics.jsonl nor" in refused(replay.main, [tmp_path])
    for name, content, arguments, message in (
        (
            "log.jsonl",
            '{"loss": 1}\n',
            (),
            "no length column of a known name in the log; choose one with --column from:",
        ),
        ("log.jsonl", '{"loss": 1}\n', ("--column", "len"), "no column 'len' in the log; it has: loss"),
        ("log.jsonl", '{"response_length/mean": NaN}\n', (), "has no positive number in any of its 1 steps"),
        ("log.jsonl", '{"response_length/mean": 1\n', (), "line 1 is not JSON"),
        ("log.jsonl", '{"a":' * 100000 + "1" + "}" * 100000, (), "nested too deeply"),
        ("log.jsonl", '{"response_length/mean": 1}\n', ("--multiplier", "0.5"), "multiplier = 0.5"),
        ("run.wandb", "x", (), "export the history as CSV or JSONL"),
        ("log.csv", "step," + LENGTH, (), "the log is empty"),
        ("log.csv", f"step,{LENGTH},response_length/clip_ratio\n1,100,35\n", (), "got truncated_fraction = 35.0."),
    ):
        (tmp_path / name).write_text(content)
        assert message in refused(replay.main, [tmp_path / name, *arguments])


CALLS = [row for i, n in COUNTED for row in ({"_step": 2 * i - 2, LENGTH: n}, {"_step": 2 * i - 1, "x": 1})]
AT_7 = {"training/global_step": 7, "eval/acc": 1.0}
TRL = [row | {"eval_completions/mean_length": 5.0} for row in rows_of("completions/mean_length")]
SLIME = [{"rollout/step": i, "rollout/response_lengths": n} for i, n in enumerate(LENGTHS)]


def write_events(directory, lengths, first, tag=LENGTH):
    with SummaryWriter(str(directory), filename_suffix=f".{first}") as writer:
        for step, length in enumerate(lengths, first):
            writer.add_scalar(tag, length, step)
            writer.add_scalar("training/global_step", step, step)


def test_logs_of_other_programs(tmp_path):
    for name, log, steps in (
        # This is verl's own file.
        ("verl.jsonl", [{"step": row.pop("step"), "data": row} for row in rows_of(LENGTH)], "step"),
        ("nested.jsonl", [{"step": i, "response_length": {"mean": n, "max": 9}} for i, n in COUNTED], "step"),
        # In Weights & Biases the evaluation has its own row, or overwrites the length.
        ("history.jsonl", [row for i, n in COUNTED for row in wandb_rows(i, n)], "trainer/global_step"),
        ("calls.jsonl", CALLS, "_step"),
        ("history.json", [{"_step": i, LENGTH: n} for i, n in COUNTED][40:], "_step"),
        ("frame.json", {"_step": {str(i): i for i, _ in COUNTED}, LENGTH: {str(i): n for i, n in COUNTED}}, "_step"),
        # One step column never changes, and one exists only in an evaluation.
        ("constant.jsonl", [{"train/global_step": 0, "_step": i, LENGTH: n} for i, n in COUNTED] + [AT_7], "_step"),
        ("val_first.jsonl", [{"step": 0, LENGTH: None, "val-core/acc": 0.1}, *rows_of(LENGTH)], "step"),
        ("trainer_state.json", {"global_step": 300, "log_history": [*TRL, {"step": 300, "runtime": 5.0}]}, "step"),
        # prime-rl's file has no step, and slime's steps begin at 0.
        ("zero.jsonl", rows_of("rollout/response_len/mean", first=0), "step"),
        ("metrics.jsonl", [{"train/agg/all/num_output_tokens/mean": n, "train/m/all/x": 1} for n in LENGTHS], None),
        ("slime.jsonl", [*SLIME, *({"train/step": i, "train/loss": 1.0} for i in range(600))], "rollout/step"),
    ):
        lines = run(write(tmp_path / name, log))
        assert CALL in lines
        assert (f", steps by {steps!r}" if steps else "each") in lines[0]


def test_directories_of_logs(tmp_path):
    """The event files of a resumed run are one log, and the length may be in another file."""
    write_events(tmp_path / "one", LENGTHS[:100], 1)
    write_events(tmp_path / "one", LENGTHS[60:], 61)
    # TRL begins another folder, and evaluations have their own.
    write_events(tmp_path / "trl/runs/first", LENGTHS[:70], 1)
    write_events(tmp_path / "trl/runs/second", LENGTHS[60:], 61)
    write_events(tmp_path / "trl/runs/eval", [5.0] * 300, 1)
    write(tmp_path / "out/metrics.jsonl", [{"step": 1, "loss": 1.0}])
    write(tmp_path / "out/run_default/metrics.jsonl", rows_of("completion_len/mean"))
    write(tmp_path / "hf/checkpoint-9/trainer_state.json", {"log_history": TRL[:9]})
    write(tmp_path / "hf/trainer_state.json", {"log_history": TRL})
    for name in ("one", "trl", "out", "hf"):
        assert CALL in run(tmp_path / name), name
    write_events(tmp_path / "two/a", LENGTHS, 1)
    write_events(tmp_path / "two/b", LENGTHS, 1)
    message = refused(replay.main, [tmp_path / "two"])
    assert all(words in message for words in ("logs of several runs", str(tmp_path / "two/a"), str(tmp_path / "two/b")))


@pytest.mark.parametrize(
    "tensor",
    [
        lambda n: {"dtype": 2, "double_val": [n]},
        lambda n: {"dtype": 1, "float_val": [n]},
        lambda n: {"dtype": 9, "int64_val": [int(n)]},
        lambda n: {"dtype": 3, "int_val": [int(n)]},
        lambda n: {"dtype": 1, "tensor_content": struct.pack("<f", n)},
        lambda n: {"dtype": 2, "tensor_content": struct.pack("<d", n)},
        lambda n: {"dtype": 9, "tensor_content": struct.pack("<q", int(n))},
        lambda n: {"dtype": 14, "tensor_content": struct.pack("<f", n)[2:]},
        lambda n: {"dtype": 19, "half_val": [struct.unpack("<H", struct.pack("<e", n))[0]]},
    ],
)
def test_tensors_of_every_dtype(tmp_path, tensor):
    path = tmp_path / "events.out.tfevents.1"
    with contextlib.closing(RecordWriter(str(path))) as file:
        for step, length in COUNTED:
            value = Summary.Value(tag=LENGTH, tensor=TensorProto(**tensor(length)))
            file.write(Event(step=step, summary=Summary(value=[value])).SerializeToString())
    assert CALL in run(path)


def test_the_table_and_the_nearest_ratio_say_what_rules_do(tmp_path):
    log = curve(tmp_path / "log.jsonl", LENGTHS)
    rules = table(run(log))
    names = ["in use", "shipped", "study", "three times", "ratio 2", "ratio 2.5", "ratio 3", "warmup 10", "warmup 40"]
    assert list(rules) == [*names, "max_truncated 1"]
    assert rules["in use"] == rules["ratio 2"] == ["85", "82", "153", "153", "5e-07", "3.5"]
    swept = run(log, "--sweep")
    # With the warm-up of 10 a persistence of 12 is no rule.
    assert sum(name.startswith(("ratio", "window", "persistence")) for name in table(swept)) == 14
    # The rule in use, the shipped rule and one value of each field are the same rule.
    assert sum(line.startswith("* ") for line in swept) == 6
    log = curve(tmp_path / "log.jsonl", [1000.0] * 60 + [2400.0] * 60)
    # The median of five is 2400 from step 63 on, and six lengths in a row have it from step 66 on.
    nearest = [
        "nearest: 2.4 times the baseline at step 63; a call needs 2.5",
        "neighbour rules that would have called: ratio 2 at step 66",
        "  from step     1: learning rate 1e-06",
    ]
    assert run(log)[1:5] == ["no surge in 120 steps", *nearest]
    by_wait = run(log, "--max-wait", "100")
    assert by_wait[1:5] == ["surge called at step 100 (by max_wait), decay period 180", *nearest]
    assert table(by_wait)["in use"][:3] == ["100", "-", "180"]
    lines = run(curve(tmp_path / "log.jsonl", [1000.0] * 60 + [4000.0] * 4 + [1000.0] * 30))
    assert lines[2].startswith("nearest: 4 times the baseline at step 63; a call needs 2.5 with ")
    assert lines[2].endswith(" with the newest 6 lengths at 1.5 or more")
    lines = run(curve(tmp_path / "short.jsonl", [1000.0] * 8))
    assert "nearest: none, because 8 usable steps are fewer than the warm-up of 10" in lines
    rows = [row | {"response_length/clip_ratio": 0.5 * (row["step"] >= 80)} for row in rows_of(LENGTH)]
    lines = run(write(log, rows))
    assert lines[1] == "221 of them have a truncated fraction above max_truncated: not used"
    assert "neighbour rules that would have called: three times at step 80, max_truncated 1 at step 85" in lines
    assert CALL in run(log, "--max-truncated", "0.6")


def test_several_logs_are_one_table_and_bad_ones_a_line_each(tmp_path):
    surge = curve(tmp_path / "surge.jsonl", LENGTHS)
    trl = curve(tmp_path / "trl.jsonl", [1000.0] * 60 + [2400.0] * 60, "completions/mean_length")
    loss = write(tmp_path / "loss.jsonl", [{"step": 1, "loss": 1.0}])
    gone = tmp_path / "gone.csv"
    status, out, err = outcome(replay.main, [surge, loss, gone, trl])
    assert status == 2
    assert [line.split(": ")[:2] for line in err.splitlines()] == [["error", str(loss)], ["error", str(gone)]]
    head, *rows = (re.split(r" {2,}", line) for line in out.splitlines())
    assert head[:7] == ["log", "steps", "called", "decay period", "first decay", "last rate", "nearest ratio"]
    cells = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    assert list(cells) == [str(surge), str(trl)]
    assert list(cells[str(surge)].values())[:6] == ["300", "85", "153", "153", "5e-07", "3.5"]
    assert (cells[str(trl)]["called"], cells[str(trl)]["ratio 2"], cells[str(trl)]["ratio 2.5"]) == ("-", "66", "-")
    picture, drawing = tmp_path / "new/all.png", tmp_path / "one.svg"  # one picture shows all logs
    assert printed(replay.main, [surge, trl, "--picture", picture]).splitlines()[-1] == f"picture: {picture}"
    assert coloured_share(picture) > 1e-3
    printed(replay.main, [surge, "--picture", drawing])
    assert drawing.read_text().startswith("<?xml")


def test_the_json_has_every_number_under_documented_keys(tmp_path):
    rows = rows_of(LENGTH, [1000.0] * 60 + [2400.0] * 60)
    rows[10][LENGTH] = math.nan
    log, gone = write(tmp_path / "log.jsonl", rows), tmp_path / "gone.csv"
    status, out, err = outcome(replay.main, [log, gone, "--json", "-", "--learning-rate", "2e-6"])
    assert (status, err.count("\n")) == (2, 1)
    found = json.loads(out, parse_constant=pytest.fail)
    whole, missing = found.pop("logs")
    assert found == {"format": 1, "learning_rate": 2e-6, "multiplier": 1.8, "decay_factor": 0.5, "floor_ratio": 0.1}
    assert missing == {"log": str(gone), "error": f"{gone}: no such file"}
    assert whole["lengths"] == [1000.0] * 10 + [None] + [1000.0] * 49 + [2400.0] * 60
    rule = {one["rule"]: one for one in whole["rules"]}["ratio 2"]
    # The period is 66 x 1.8 = 118.8, rounded to 119.
    assert [rule[key] for key in ("surge_step", "crossing_step", "decay_period", "ignored")] == [66, 63, 119, 1]
    rates = {1: 2e-6, 119: 1e-6, 238: 5e-7, 357: 2.5e-7, 476: 2e-7}
    assert {one["step"]: one["learning_rate"] for one in rule["rates"]} == rates
    assert whole["rules"][0]["nearest"] == {"step": 63, "ratio": 2.4}
    page = (ROOT / "docs/schedule.md").read_text(encoding="utf-8")
    for place, keys in ((r"logs\[\]\.", whole), (r"logs\[\]\.rules\[\]\.", rule)):
        assert re.findall(rf"^\| `{place}(\w+)` \|", page, re.MULTILINE) == list(keys)
    printed(replay.main, [log, "--json", tmp_path / "out.json", "--capped-ratio", "inf"])
    (endless,) = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)["logs"]
    assert (endless["steps"], endless["rules"][0]["config"]["capped_ratio"]) == (120, None)


def alone(*words):
    """Runs the command in a process that can import only numpy and the standard library."""
    status, out, err = rljax_with_only(["numpy"], "replay", *words)
    return status, out.splitlines(), err


def test_text_logs_need_numpy_alone(tmp_path):
    """Later columns of CSV may be empty in some rows, and a file may begin with a mark of its encoding."""
    rows = [f"{i},{n}\n" for i, n in COUNTED]
    with_empty = [f"{row}{i},\n" for i, row in enumerate(rows, 1)][40:]
    forms = {
        "verl.jsonl": "".join(json.dumps({"step": i, "data": {LENGTH: n}}) + "\n" for i, n in COUNTED),
        "trainer_state.json": json.dumps({"log_history": TRL}),
        "log.csv": f"step,{LENGTH}\n{''.join(rows)}",
        "train.log": "".join(f"step:{i} - a/b:1.0 - {LENGTH}:{n}\n" for i, n in COUNTED),
    }
    separators = {"comma": ",", "semicolon": ";", "tab": "\t"}
    forms |= {
        f"{name}.csv": f"step,{LENGTH}\n{''.join(with_empty)}".replace(",", one) for name, one in separators.items()
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text, "utf-8-sig" if name.endswith(".csv") else "utf-8")
    status, lines, err = alone(*(tmp_path / name for name in forms))
    assert (status, err) == (0, "")
    assert [line.split()[1:3] for line in lines[1:]] == [["300", "85"]] * 7
    status, lines, err = alone(tmp_path / "log.csv", "--sweep", "--json", "-")
    assert (status, err, json.loads(lines[0])["logs"][0]["rules"][0]["surge_step"]) == (0, "", 85)
    # A missing package is one line with its extra.
    write_events(tmp_path / "tb", LENGTHS, 1)
    (events,) = (tmp_path / "tb").iterdir()
    remedy = "which is not installed: pip install '.[replay]' in a checkout of rljax, or 'WHEEL[replay]' with its wheel"
    expected = f"error: {events}: an event file of TensorBoard needs the package tensorboardX, {remedy}\n"
    assert alone(events) == (2, [], expected)
    assert alone(tmp_path / "tb") == (2, [], expected)
    # A directory that also has a log in text is read without the package.
    write(tmp_path / "tb/trainer_state.json", {"log_history": TRL})
    assert CALL in alone(tmp_path / "tb")[1]
    status, _, err = alone(tmp_path / "tb", "--picture", tmp_path / "x.png")
    assert (status, err) == (2, f"error: --picture needs the package matplotlib, {remedy}\n")


# ---- the commands of docs/tutorials/schedule.md that lead from a log to a decision, on real logs ----

SECTION = (ROOT / "docs/tutorials/schedule.md").read_text(encoding="utf-8").partition("## 4.")[2]
COMMANDS, *PRINTED = (block.strip().splitlines() for block in re.findall(r"```\w*\n(.*?)```", SECTION, re.DOTALL))
LOGS = {"my_run": ("constant", 4), "other_seed": ("constant", 5), "lower_rate": ("constant_tenth", 4)}
EXPORTED = {
    "step": "step",
    "response_length/mean": "response_length/mean",
    "response_length/clip_ratio": "response_length/truncated_fraction",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Returns a directory with the lengths of three runs as CSV, with two decimals as a dashboard exports them."""
    place, runs = tmp_path_factory.mktemp("logs"), read_table(ROOT / "benchmarks/study_slow.parquet")
    for name, run in LOGS.items():
        with (place / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(EXPORTED)
            for row in runs[run]:
                writer.writerow([row["step"], *(f"{row[key]:.2f}" for key in list(EXPORTED.values())[1:])])
    return place


@pytest.mark.parametrize("number", range(3))
def test_a_command_prints_what_the_page_shows(number, directory, monkeypatch):
    monkeypatch.chdir(directory)
    program, *words = shlex.split(COMMANDS[number])
    assert (program, len(COMMANDS), len(PRINTED)) == ("rljax", 3, 3)
    status, out, err = outcome(cli.main, words)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line for line in PRINTED[number] if line not in lines] == []
    assert number != 1 or (directory / "my_run.png").is_file()


def test_the_page_names_the_accuracies_of_the_runs():
    runs = read_table(ROOT / "benchmarks/study_slow.parquet")
    final = {name: sum(row["reward/mean"] for row in runs[run][-10:]) / 10 for name, run in LOGS.items()}
    assert f"accuracy of {final['lower_rate']:.2f}, and `my_run` at {final['my_run']:.2f}" in SECTION
