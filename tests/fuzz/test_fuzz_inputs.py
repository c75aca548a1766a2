"""Malformed inputs must be refused in one line and harm nothing; inputs that once failed are listed by hand."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import hypothesis
import pyarrow as pa
import pytest
from malformed_inputs import (
    CONFIG,
    DUMP,
    HELD,
    KINDS,
    LOG,
    MODEL,
    POLICIES,
    PROBLEMS,
    RECORD,
    SEQUENCES,
    SETTINGS,
    TURN,
    Case,
    Special,
    as_json,
    as_lines,
    as_parquet,
    as_yaml,
    events,
    inside,
    sound_adapters,
    sound_model,
)
from run_input import COMMANDS, Command, run_case, write_case

from rljax.policy.peft import ADAPTER_CONFIG, WEIGHTS_NAME

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("RLJAX_FUZZ_EXAMPLES", "96"))
SEED = int(os.environ.get("RLJAX_FUZZ_SEED", "0"))
MEMORY = 8 * 2**30  # the bytes that an input may allocate in addition to the present ones
FIRST, SECOND = {"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}
MODEL_FILES = inside("model", {path.name: path.read_bytes() for path in MODEL.iterdir() if path.suffix == ".json"})
OF_MODEL = (*PROBLEMS, "--model.path", "model")


def loaded(config, weights):
    return Case("load", ("model",), {"model/config.json": as_json(config), "model/model.safetensors": weights})


def indexed(document):
    return Case("load", ("model",), {**MODEL_FILES, "model/model.safetensors.index.json": as_json(document)})


def adapters(config, weights):
    return Case("adapters", ("a",), {f"a/{ADAPTER_CONFIG}": as_json(config), f"a/{WEIGHTS_NAME}": weights})


def configured(text, *words):
    return Case("dry run", ("config.yaml", *words, "--dry-run"), {"config.yaml": text.encode("utf-8", "surrogatepass")})


def problems(content, name="p.jsonl"):
    return Case("train", (*PROBLEMS, "--data.path", name), {**HELD, name: content})


def model(name, content):
    row = as_lines([{"prompt": TURN, "answer": "2"}])
    return Case("train", OF_MODEL, {**HELD, **MODEL_FILES, f"model/{name}": content, "p.jsonl": row})


def shaped(**changed):
    return model("config.json", as_json(CONFIG | changed))


def tokens(content, name="t.jsonl"):
    return Case("compare", (name, "--out", "out"), {name: content})


def headed(**changed):
    return tokens(as_lines([SEQUENCES[0] | changed, *SEQUENCES[1:]]))


def sequence(**changed):
    return tokens(as_lines([SEQUENCES[1] | changed]))


def log(name, content, *words):
    words = (name.split("/")[0], "--picture", "out/x.png", *words)
    return Case("replay", words, {name: content, "out": Special.DIRECTORY})


def logged(**changed):
    return log("log.jsonl", as_lines([{"step": 1, "response_length/mean": 5.0} | changed]))


def recorded(**changed):
    return Case("plot", ("run",), {"run/metrics.jsonl": as_lines([*RECORD[:2], RECORD[2] | changed, *RECORD[3:5]])})


def resumed(rows, more=()):
    words = (*PROBLEMS, "--run.resume", "auto", "--run.steps", "1")
    return Case("train", words, {**HELD, "p.jsonl": as_lines([FIRST]), "held/metrics.jsonl": rows, **dict(more)})


SOUND = {
    "dry run": configured(as_yaml(SETTINGS).decode()),
    "train": problems(as_lines([FIRST])),
    "prepare": Case("prepare", ("p.jsonl", "out/made.parquet"), {"p.jsonl": as_lines([FIRST, SECOND])}),
    "load": loaded(CONFIG, (MODEL / "model.safetensors").read_bytes()),
    **{family: loaded(*sound_model(family)) for family in POLICIES},
    "adapters": adapters(*sound_adapters()),
    "compare": tokens(as_lines(SEQUENCES)),
    "replay": log("log.jsonl", as_lines(LOG)),
    "plot": Case("plot", ("run",), {"run/metrics.jsonl": as_lines(RECORD)}),
}
DATES = as_parquet({"columns": {"prompt": ["1+1="] * 2, "extra_info": pa.array([2**50, 1], pa.timestamp("s"))}})
DEEP = b"[" * 100_000
ROW = b'{"step": 1}\n'
LARGE = as_yaml(SETTINGS | {"optimizer": {"learning_rate": 1e308}}).decode()
NO_TOKENS = b'{"eos_token": "$", "added_tokens_decoder": []}'
HOLE = as_parquet(DUMP | {"columns": DUMP["columns"] | {"token_ids": [[1, None], [3]]}})
FAULTS = [
    # configurations
    (configured("run: !!timestamp x"), "not valid YAML: nested too deeply, or a value that is not of its tag"),
    (configured('run: {dir: "\\ud800"}'), "not UTF-8 text"),
    (configured("run: " + "[" * 3000), "not valid YAML: nested too deeply, or a value that is not of its tag"),
    (configured('run: {"a\\e[31m": 1}'), r"unknown key run.a\x1b[31m"),
    (configured("{}", "--run.dir", "\udcff"), r'command line: "\udcff" is not UTF-8 text'),
    (configured("{}", "--run.steps", "9" * 5000), "run.steps: expected a valid integer"),
    (configured(LARGE), "the learning rate must be a finite, non-negative scalar"),
    # problems
    (problems(DEEP), "p.jsonl:1: not JSON that can be read (nested too deeply)"),
    (problems(DATES, "p.parquet"), "p.parquet cannot be read after row 0"),
    # model directories
    (shaped(head_dim=[1]), "head_dim cannot be [1]"),
    (shaped(vocab_size=10**400), "vocab_size cannot be 1000"),
    (shaped(rope_parameters="x"), "rope_parameters must be an object, got 'x'"),
    (model("config.json", b"\xff"), "model/config.json: not UTF-8 text, at byte 0"),
    (model("config.json", DEEP), "model/config.json: not JSON that can be read (nested"),
    (model("tokenizer_config.json", NO_TOKENS), "not UTF-8 text, or not of the form that transformers writes"),
    (model("chat_template.jinja", b"{{ 1 / 0 }}"), "the chat template fails on a prompt: ZeroDivisionError"),
    (model("chat_template.jinja", b"\xff"), "a file of it is not UTF-8 text, or not of"),
    (indexed([1]), "index.json has no weight_map"),
    (indexed({"weight_map": {"a": ["x"]}}), "weight_map must name files beside it"),
    (indexed({"weight_map": {"a": "../b.safetensors"}}), "must name files beside it, got '../b.safetensors'"),
    # token dumps
    (headed(columns=[]), "header: columns must be an object, got []"),
    (headed(sampling=[1]), "sampling must be an object, got [1]"),
    (headed(columns={"trainer": {"engin": "x"}}), "the source of a column has the keys engine, dtype,"),
    (headed(columns={"trainer": {"temperature": 10**400}}), "temperature of a column must be positive and finite"),
    (sequence(response_mask=["False", "True", "True"]), "response_mask must be true or false at each token"),
    (sequence(token_ids=3), "t.jsonl:1: a field is not of the form"),
    (sequence(token_ids=[[1, 2], [3]], response_mask=3), "t.jsonl:1: the mask of a batch must be a list"),
    (tokens(as_parquet(DUMP | {"note": []}), "t.parquet"), "its metadata must be an object with version"),
    (tokens(as_parquet(DUMP | {"note": b'{"version": '}), "t.parquet"), "its metadata is not JSON"),
    (tokens(HOLE, "t.parquet"), "a row has a null in its token ids or its mask"),
    # logs for replay
    (logged(step=10**18), "a step of 1e+18, beyond 1,000,000"),
    (logged(**{"response_length/mean": 10**400}), "has no positive number in any"),
    (log("events.out.tfevents.1", events()[:12] + b"\xff" * 100), "not a TensorBoard event file, or a damaged one"),
    (log("log.jsonl", as_lines(LOG), "--window", "9" * 30), "window must be at most 1000000 steps"),
    (log("run/events.out.tfevents.1", Special.LOOP), "neither metrics.jsonl nor"),
    (log("log.csv", b"step,x\n1,\xff\n"), "log.csv: not UTF-8 text"),
    # records of runs
    (recorded(step=[3]), "metrics.jsonl:3: step cannot be [3]"),
    (recorded(**{"reward/mean": [3]}), "metrics.jsonl:3: reward/mean cannot be [3]"),
    (recorded(**{"reward/mean": "x"}), "run: reward/mean must be a number, got 'x'"),
    (recorded(**{"schedule/surge_step": "x"}), "run: schedule/surge_step must be a step, got 'x'"),
    (resumed(b'{"x": 1}\n{"step": 2}\n'), "held/metrics.jsonl:1: expected an object with a step"),
    (resumed(ROW, {"held/checkpoints/²": Special.DIRECTORY}), "holds 1 rows and no checkpoint to go on from"),
    (resumed(ROW, {"held/checkpoints/1": b""}), "held holds 1 rows and no checkpoint to go on from"),
    (resumed(b"", {"held/checkpoints": b""}), "held/checkpoints: "),
    (resumed(b"", {"held/checkpoints": Special.LOOP}), "held/checkpoints: "),
]


@pytest.mark.parametrize("name", SOUND)
def test_sound_inputs_are_accepted(name, tmp_path):
    outcome = run_case(SOUND[name], tmp_path, 60.0)
    assert outcome.accepted, outcome.said


@pytest.mark.parametrize(("case", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_what_once_was_no_clear_line(case, message, tmp_path):
    outcome = run_case(case, tmp_path, 30.0)
    assert not outcome.accepted
    assert message in outcome.said


@pytest.fixture
def bounded_memory():
    """Limits the memory, so that an input that asks for too much fails instead of the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.timeout(0)  # a longer search may take hours
@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("kind", KINDS)
def test_malformed_inputs_are_refused_in_one_line(kind, tmp_path):
    """The folder of the test keeps the smallest input of the last failure."""
    share, strategy = KINDS[kind]
    count = EXAMPLES * share // sum(share for share, _ in KINDS.values())
    outcomes, unchecked = Counter(), list(hypothesis.HealthCheck)

    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=count, database=None, deadline=None, suppress_health_check=unchecked)
    @hypothesis.given(strategy)
    def each(case):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            try:
                outcomes[run_case(case, Path(folder), 60.0).accepted] += 1
            except Exception:
                shutil.rmtree(tmp_path / "failed", ignore_errors=True)
                write_case(case, tmp_path / "failed")
                raise

    each()
    print(f"{kind}: {outcomes[False]} refused, {outcomes[True]} accepted")
    assert outcomes.total() >= count // 2
    # A page that names no cause is no refusal.
    assert outcomes[False] > 0 or kind == "silent"


@pytest.mark.parametrize(
    ("main", "detail"),
    [
        (lambda _: time.sleep(60), "more than 0.2 s"),
        (lambda _: int("a bug"), "a bug"),
        (lambda _: print("one\ntwo", file=sys.stderr) or 2, "status 2 with 2 lines"),
        (lambda _: Path("../elsewhere").write_text("x") - 1, "written outside the folder"),
        (lambda _: Path("beside").write_text("x") - 1, r"written outside \('out',\): \['beside'\]"),
        (lambda _: Path("given").write_text(""), r"an input changed: \['given'\]"),
    ],
)
def test_a_command_that_does_harm_is_seen(main, detail, tmp_path, monkeypatch):
    monkeypatch.setitem(COMMANDS, "bad", Command(main, ("out",)))
    with pytest.raises((AssertionError, ValueError), match=detail):
        run_case(Case("bad", (), {"given": b"x"}), tmp_path / "case", 0.2)
