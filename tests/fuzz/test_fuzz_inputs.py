"""Malformed inputs: each is refused in one line and harms nothing; those that once were not stand here by hand."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import fuzz_inputs
import pyarrow as pa
import pytest
from fuzz_inputs import COMMANDS, Command, Failures, fuzz, run_case, shares
from malformed_inputs import (
    CONFIG,
    HELD,
    KINDS,
    LAUGHS,
    LOG,
    MODEL,
    RECORD,
    SEQUENCES,
    SETTINGS,
    TRAIN,
    Case,
    Special,
    as_json,
    as_lines,
    as_parquet,
    as_safetensors,
    as_yaml,
    columns,
    dump_columns,
    events,
    weights,
    without,
)
from sound_models import POLICIES, sound_adapters, sound_model
from sound_run import RUN, STEPS, sound_run

from rljax.policy.peft import CONFIG_NAME, WEIGHTS_NAME

pytestmark = pytest.mark.slow

EXAMPLES = 180
FIRST, SECOND = {"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}
CHAT = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
PROBLEMS = (*TRAIN, "--data.task", "file", "--data.path", "p.jsonl", "--data.batch-size", "1", "--eval.every", "0")
MODEL_FILES = {f"model/{path.name}": path.read_bytes() for path in MODEL.iterdir() if path.suffix == ".json"}
SOUND = {
    "dry run": Case("dry run", ("config.yaml", "--dry-run"), {"config.yaml": as_yaml(SETTINGS)}),
    "train": Case("train", PROBLEMS, {**HELD, "p.jsonl": as_lines([FIRST])}),
    "prepare": Case("prepare", ("p.jsonl", "out/made.parquet"), {"p.jsonl": as_lines([FIRST, SECOND])}),
    "load": Case(
        "load",
        ("model",),
        {"model/config.json": as_json(CONFIG), "model/model.safetensors": as_safetensors(*weights())},
    ),
    **{
        family: Case(
            "load",
            ("model",),
            {
                "model/config.json": as_json(sound_model(family).config),
                "model/model.safetensors": sound_model(family).weights,
            },
        )
        for family in POLICIES
    },
    "adapters": Case(
        "adapters",
        ("adapters",),
        {
            f"adapters/{CONFIG_NAME}": as_json(sound_adapters().config),
            f"adapters/{WEIGHTS_NAME}": sound_adapters().weights,
        },
    ),
    "compare": Case("compare", ("t.jsonl", "--out", "out"), {"t.jsonl": as_lines(SEQUENCES)}),
    "replay": Case(
        "replay", ("log.jsonl", "--png", "out/x.png"), {"log.jsonl": as_lines(LOG), "out": Special.DIRECTORY}
    ),
    "plot": Case("plot", ("run",), {"run/metrics.jsonl": as_lines(RECORD)}),
}


def yaml_case(text, *words):
    return Case("dry run", ("config.yaml", *words, "--dry-run"), {"config.yaml": text.encode("utf-8", "surrogatepass")})


def problem_case(content, name="p.jsonl"):
    return Case("train", (*PROBLEMS, "--data.path", name), {**HELD, name: content})


def model_case(name, content):
    words = (*PROBLEMS, "--model.path", "model")
    return Case("train", words, {**HELD, **MODEL_FILES, f"model/{name}": content, "p.jsonl": as_lines([CHAT])})


def index_case(document):
    return Case("load", ("model",), {**MODEL_FILES, "model/model.safetensors.index.json": as_json(document)})


def token_case(content, name="t.jsonl"):
    return Case("compare", (name, "--out", "out"), {name: content})


def sequence_case(**changed):
    return token_case(as_lines([SEQUENCES[1] | changed]))


def dump_case(note):
    table = pa.table({name: arrays[0] for name, arrays in dump_columns().items() if name != "logprobs/"})
    return token_case(as_parquet(table.replace_schema_metadata({b"rljax.dump": note})), "t.parquet")


def log_case(name, content, *words):
    return Case("replay", (name.split("/")[0], "--png", "out/x.png", *words), {name: content, "out": Special.DIRECTORY})


def record_case(**changed):
    return Case("plot", ("run",), {"run/metrics.jsonl": as_lines([*RECORD[:2], RECORD[2] | changed, *RECORD[3:5]])})


def resume_case(more):
    words = (*PROBLEMS, "--run.resume", "auto", "--run.steps", "1")
    return Case("train", words, {**HELD, "p.jsonl": as_lines([FIRST]), **more})


DEEP = b"[" * 100_000
FAULTS = {
    # configurations
    "yaml: a word tagged as a bool": (yaml_case("run: {steps: !!bool maybe}"), "a value that is not of its tag"),
    "yaml: a word tagged as a date": (yaml_case("run: !!timestamp x"), "a value that is not of its tag"),
    "yaml: a billion values by aliases": (yaml_case(LAUGHS), "its aliases repeat values more than 100000 times"),
    "yaml: half a character": (yaml_case('run: {dir: "\\ud800"}'), "not valid YAML: text that is not UTF-8"),
    "yaml: lists in lists": (yaml_case("run: " + "[" * 3000), "not valid YAML: nested too deeply"),
    "yaml: a key of 10,000 letters": (yaml_case(f"run:\n  ? {'a' * 10_000}\n  : 1\n"), "unknown key run.aaa"),
    "yaml: an escape sequence": (yaml_case('run: {"a\\e[31m": 1}'), r"unknown key run.a\x1b[31m"),
    "words: not UTF-8": (yaml_case("{}", "--run.dir", "\udcff"), r'command line: "\udcff" is not UTF-8 text'),
    "words: 5000 digits": (yaml_case("{}", "--run.steps", "9" * 5000), "run.steps: expected a valid integer"),
    # problems
    "problems: lists in lists": (problem_case(DEEP), "p.jsonl:1: not JSON that can be read (nested too deeply)"),
    "problems: a date that Python does not have": (
        problem_case(
            as_parquet(
                pa.table({"prompt": columns()["prompt"][0], "extra_info": pa.array([2**50, 1], pa.timestamp("s"))})
            ),
            "p.parquet",
        ),
        "p.parquet cannot be read after row 0",
    ),
    # model directories
    "model: a list as a size": (
        model_case("config.json", as_json(CONFIG | {"head_dim": [1]})),
        "head_dim cannot be [1]",
    ),
    "model: a size of 400 digits": (
        model_case("config.json", as_json(CONFIG | {"vocab_size": 10**400})),
        "vocab_size cannot be 1000",
    ),
    "model: a text as rope": (
        model_case("config.json", as_json(CONFIG | {"rope_parameters": "x"})),
        "rope_parameters must be an object, got 'x'",
    ),
    "model: not UTF-8": (model_case("config.json", b"\xff"), "model/config.json: not UTF-8 text, at byte 0"),
    "model: lists in lists": (model_case("config.json", DEEP), "model/config.json: not JSON that can be read (nested"),
    "model: added tokens in a list": (
        model_case("tokenizer_config.json", as_json({"eos_token": "$", "added_tokens_decoder": []})),
        "tokenizer_config.json is not of the form that transformers writes",
    ),
    "model: a template that divides by 0": (
        model_case("chat_template.jinja", b"{{ 1 / 0 }}"),
        "the chat template fails on a prompt (ZeroDivisionError)",
    ),
    "model: a template that is not UTF-8": (
        model_case("chat_template.jinja", b"\xff"),
        "a file of it is not UTF-8 text",
    ),
    "model: another library's file of lists in lists": (
        Case(
            "train",
            (*PROBLEMS, "--model.path", "model"),
            {
                **HELD,
                "model/config.json": as_json(CONFIG),
                "model/tokenizer_config.json": as_json({"eos_token": "$"}),
                "model/special_tokens_map.json": DEEP,
                "p.jsonl": as_lines([FIRST]),
            },
        ),
        "or is nested too deeply",
    ),
    "weights: an index in a list": (index_case([1]), "index.json has no weight_map"),
    "weights: a list as a file": (index_case({"weight_map": {"a": ["x"]}}), "weight_map must name files beside it"),
    "weights: a file elsewhere": (
        index_case({"weight_map": {"a": "../other/model.safetensors"}}),
        "weight_map must name files beside it, got '../other/model.safetensors'",
    ),
    # token dumps
    "tokens: columns in a list": (
        token_case(as_lines([SEQUENCES[0] | {"columns": []}, *SEQUENCES[1:]])),
        "header: columns must be an object, got []",
    ),
    "tokens: sampling in a list": (
        token_case(as_lines([SEQUENCES[0] | {"sampling": [1]}, *SEQUENCES[1:]])),
        "sampling must be an object, got [1]",
    ),
    "tokens: a source with another key": (
        token_case(as_lines([SEQUENCES[0] | {"columns": {"trainer": {"engin": "x"}}}, *SEQUENCES[1:]])),
        "the source of a column has the keys engine, dtype, weights_hash, temperature, role",
    ),
    "tokens: a temperature of 400 digits": (
        token_case(as_lines([SEQUENCES[0] | {"columns": {"trainer": {"temperature": 10**400}}}, *SEQUENCES[1:]])),
        "temperature of a column must be positive and finite",
    ),
    "tokens: a mask of words": (
        sequence_case(response_mask=["False", "True", "True"]),
        "response_mask must be true or false at each token",
    ),
    "tokens: a log-probability in words": (
        sequence_case(logprobs={"trainer": [None, "minus one", -1.0], "rollout": [None, -1.0, -1.0]}),
        "column 'trainer' must be numbers",
    ),
    "tokens: log-probabilities in a list": (sequence_case(logprobs=[1]), "t.jsonl:1: a field is not of the form"),
    "tokens: a note in a list": (dump_case(b"[]"), "its metadata must be an object with version, columns and sampling"),
    "tokens: a note that is cut": (dump_case(b'{"version": '), "its metadata is not JSON"),
    # logs for replay
    "log: a step of 10**18": (
        log_case("log.jsonl", as_lines([{"step": 10**18, "response_length/mean": 5.0}])),
        "column 'step' has a step of 1e+18, beyond 1,000,000",
    ),
    "log: an event file that is none": (
        log_case("events.out.tfevents.1", events()[:12] + b"\xff" * 100),
        "not a TensorBoard event file, or a damaged one",
    ),
    "log: a length of 400 digits": (
        log_case("log.jsonl", as_lines([{"step": 1, "response_length/mean": 10**400}])),
        "has no positive number in any of its 1 steps",
    ),
    "log: a window of 30 digits": (
        log_case("log.jsonl", as_lines(LOG), "--window", "9" * 30),
        "window must be at most 1000000 steps",
    ),
    "log: a link to itself": (log_case("run/events.out.tfevents.1", Special.LOOP), "neither metrics.jsonl nor"),
    "log: CSV that is not UTF-8": (log_case("log.csv", b"step,x\n1,\xff\n"), "log.csv: not UTF-8 text"),
    "log: a number in words": (log_case("log.jsonl", as_lines(LOG), "--window", "x"), "--window: expected INT, got x"),
    # records of runs
    "record: a list as a step": (record_case(step=[3]), "metrics.jsonl:3: step cannot be [3]"),
    "record: a list as a reward": (record_case(**{"reward/mean": [3]}), "metrics.jsonl:3: reward/mean cannot be [3]"),
    "record: a reward in words": (record_case(**{"reward/mean": "x"}), "run: reward/mean must be a number, got 'x'"),
    "record: a surge in words": (
        record_case(**{"schedule/surge_step": "x"}),
        "run: schedule/surge_step must be a step, got 'x'",
    ),
    "resume: a row that is none": (
        resume_case({"held/metrics.jsonl": b'{"x": 1}\n{"step": 2}\n'}),
        "held/metrics.jsonl:1: expected an object with a step",
    ),
    "resume: a checkpoint with a number that is none": (
        resume_case(
            {
                "held/checkpoints/²": Special.DIRECTORY,
                "held/metrics.jsonl": b'{"step": 1}\n',
            }
        ),
        "holds 1 rows and no checkpoint to go on from",
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_inputs_are_accepted(name, tmp_path):
    outcome = run_case(SOUND[name], tmp_path, 60.0)
    assert outcome.verdict == "accepted", outcome.detail


@pytest.mark.parametrize("name", FAULTS)
def test_what_once_was_no_clear_line(name, tmp_path):
    case, message = FAULTS[name]
    outcome = run_case(case, tmp_path, 30.0)
    assert outcome.verdict == "refused", outcome.detail
    assert message in outcome.detail


CHECKPOINTS = f"{RUN}/checkpoints"


def go_on_case(folders):
    """The sound run with these folders of it as given: content by path."""
    files = {f"{RUN}/{name}": content for name, content in sound_run().files.items()}
    for folder, found in folders.items():
        files = without(files, folder) | {f"{folder}/{path}".rstrip("/"): content for path, content in found.items()}
    return Case("go on", (RUN,), files)


@pytest.mark.parametrize("name", [None, "²", "05", "x"])
def test_a_sound_run_continues_beside_foreign_files(name, tmp_path):
    copied = {path.removeprefix("checkpoints/3/"): data for path, data in sound_run().files.items() if "/3/" in path}
    outcome = run_case(go_on_case({f"{CHECKPOINTS}/{name}": copied} if name else {}), tmp_path, 60.0)
    assert outcome.verdict == "accepted", outcome.detail
    assert "warning" not in outcome.detail


def test_files_in_place_of_the_checkpoints_are_none(tmp_path):
    """They once counted: the run then began anew, and its rows were cut."""
    outcome = run_case(go_on_case({f"{CHECKPOINTS}/{step}": {"": b""} for step in STEPS}), tmp_path, 60.0)
    assert outcome.verdict == "refused", outcome.detail
    assert "holds 3 rows and no checkpoint to go on from" in outcome.detail


@pytest.mark.parametrize("content", [b"", Special.LOOP, Special.DANGLING])
def test_something_else_in_place_of_their_folder_is_refused(content, tmp_path):
    outcome = run_case(go_on_case({CHECKPOINTS: {"": content}, f"{RUN}/metrics.jsonl": {}}), tmp_path, 60.0)
    assert outcome.verdict == "refused", outcome.detail
    assert f"{CHECKPOINTS}: " in outcome.detail


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.harness) if kind == "checkpoints" else kind for kind in KINDS]
)
def test_malformed_inputs_are_refused_in_one_line(kind, tmp_path):
    count = shares(list(KINDS), EXAMPLES)[kind]
    failures, counts = Failures(tmp_path), Counter()
    fuzz(kind, count, 0, 60.0, failures, counts)
    assert counts["failed"] == 0, list(failures.causes)
    assert counts.total() >= count // 2
    assert counts["refused"] > 0


def hangs(words):
    time.sleep(60)


def breaks(words):
    raise ValueError("a bug")


def says_two_lines(words):
    print("one\ntwo", file=fuzz_inputs.sys.stderr)
    return 2


def writes_elsewhere(words):
    Path("../elsewhere").write_text("x")
    return 0


def writes_beside(words):
    Path("beside").write_text("x")
    return 0


def eats_its_input(words):
    Path("given").write_text("")
    return 0


@pytest.mark.parametrize(
    ("main", "detail"),
    [
        (hangs, "more than 0.2 s"),
        (breaks, "ValueError: a bug"),
        (says_two_lines, "status 2 with 2 lines"),
        (writes_elsewhere, "written outside the folder"),
        (writes_beside, "written outside ('out',): ['beside']"),
        (eats_its_input, "an input changed: ['given']"),
    ],
)
def test_a_command_that_does_harm_is_seen(main, detail, tmp_path, monkeypatch):
    monkeypatch.setitem(COMMANDS, "bad", Command(main, ("out",)))
    (tmp_path / "case").mkdir()
    outcome = run_case(Case("bad", (), {"given": b"x"}), tmp_path / "case", 0.2)
    assert outcome.verdict == "failed"
    assert detail in outcome.detail


def test_failing_inputs_are_kept_the_smallest_of_each_cause(tmp_path):
    failures = Failures(tmp_path)
    for size in (3, 2, 5):
        failures.add("kind", Case("bad", ("w",), {"given": b"x" * size}), fuzz_inputs.Outcome("failed", "KeyError: 1"))
    (kept,) = tmp_path.iterdir()
    assert (kept / "given").read_bytes() == b"xx"
    assert "KeyError: 1" in (kept / "outcome.txt").read_text()


def test_the_program_prints_its_counts(tmp_path, capsys):
    assert fuzz_inputs.main(["--kinds", "log", "--examples", "6", "--failures", str(tmp_path / "failures")]) == 0
    head, log, everything = capsys.readouterr().out.splitlines()
    assert head.split() == ["kind", "tried", "refused", "in", "one", "line", "accepted", "failed", "seconds"]
    for line in (log, everything):
        _, tried, refused, accepted, failed, _ = line.split()
        assert int(tried) == int(refused) + int(accepted) == 6
        assert failed == "0"
    assert (log.split()[0], everything.split()[0]) == ("log", "all")
    assert not (tmp_path / "failures").exists()
