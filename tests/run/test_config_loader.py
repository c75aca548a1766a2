"""The configuration reader: precedence, one-line errors that name the place, and a YAML form that reads back equal."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.run.config_file import config_to_yaml, load_config


@dataclass(frozen=True)
class Optimizer:
    """The update rule.

    Attributes:
      learning_rate: peak rate, per update.
      clip: largest global gradient norm; None leaves gradients alone.
    """

    learning_rate: float = 1e-4
    clip: float | None = 1.0
    kind: Literal["adamw", "sgd", "off"] = "adamw"
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")


@dataclass(frozen=True)
class Schedule:
    kind: Literal["constant", "length_decay"] = "constant"
    decay_period: int | None = None
    """updates between halvings"""

    def __post_init__(self) -> None:
        if self.kind == "length_decay" and self.decay_period is None:
            raise ValueError("length_decay needs decay_period")


@dataclass(frozen=True)
class Rollout:
    urls: tuple[str, ...] = ()
    limits: tuple[int, ...] | None = None
    warmup: Schedule = field(default_factory=lambda: Schedule(kind="length_decay", decay_period=7))


@dataclass(frozen=True)
class Config:
    name: str = "run"
    steps: int = 10
    resume: Literal["auto", "never"] | str = "auto"
    note: str | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    rollout: Rollout = field(default_factory=Rollout)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclass(frozen=True)
class Model:
    path: str


@dataclass(frozen=True)
class Needs:
    model: Model


def load(*argv: str, root: type = Config):
    return load_config(root, argv, prog="python -m rljax.example", description="An example.")


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "c.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refusal(*argv: str, root: type = Config) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, root=root)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults():
    assert load() == Config()


def test_precedence_default_yaml_command_line(yaml_file):
    file = yaml_file("steps: 20\noptimizer: {learning_rate: 0.5, clip: 2}\n")
    assert load(file) == Config(steps=20, optimizer=Optimizer(learning_rate=0.5, clip=2.0))
    got = load(file, "--optimizer.learning-rate", "1e-3", "--name", "x")
    assert got == Config(name="x", steps=20, optimizer=Optimizer(learning_rate=1e-3, clip=2.0))


def test_a_section_given_in_part_keeps_the_rest_of_its_own_default(yaml_file):
    assert load(yaml_file("rollout: {warmup: {decay_period: 9}}")).rollout.warmup == Schedule("length_decay", 9)
    assert load(yaml_file("rollout: {urls: [a]}")).rollout.warmup == Schedule("length_decay", 7)


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "+1.0e-4", ".0001", "1.e-4"])
def test_every_spelling_of_a_float_in_yaml(yaml_file, text):
    assert load(yaml_file(f"optimizer: {{learning_rate: {text}}}")).optimizer.learning_rate == 1e-4


def test_an_int_is_taken_for_a_float_and_stored_as_one(yaml_file):
    for got in (load(yaml_file("optimizer: {learning_rate: 2}")), load("--optimizer.learning_rate", "2")):
        assert type(got.optimizer.learning_rate) is float


def test_yaml_words_that_are_not_booleans_stay_strings(yaml_file):
    assert load(yaml_file("optimizer: {kind: off}\nname: yes\n")) == Config("yes", optimizer=Optimizer(kind="off"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--optimizer.learning-rate", "2e-3"], Config(optimizer=Optimizer(learning_rate=2e-3))),
        (["--optimizer.learning_rate=2e-3"], Config(optimizer=Optimizer(learning_rate=2e-3))),
        (["--optimizer.clip", "None"], Config(optimizer=Optimizer(clip=None))),
        (["--note", "none"], Config(note=None)),
        (["--name", "none"], Config(name="none")),
        (["--optimizer.nesterov"], Config(optimizer=Optimizer(nesterov=True))),
        (["--optimizer.nesterov", "true", "--steps", "3"], Config(steps=3, optimizer=Optimizer(nesterov=True))),
        (["--optimizer.nesterov", "False"], Config()),
        (["--optimizer.betas", "0.5", "1"], Config(optimizer=Optimizer(betas=(0.5, 1.0)))),
        (["--optimizer.betas=0.5,1"], Config(optimizer=Optimizer(betas=(0.5, 1.0)))),
        (["--rollout.urls", "http://a", "http://b"], Config(rollout=Rollout(urls=("http://a", "http://b")))),
        (["--rollout.limits", "3"], Config(rollout=Rollout(limits=(3,)))),
        (["--rollout.limits", "3", "--rollout.limits", "None"], Config()),
        (["--steps", "3", "--steps", "4"], Config(steps=4)),
        (["--resume", "runs/x"], Config(resume="runs/x")),
        (["--name=--odd"], Config(name="--odd")),
    ],
)
def test_command_line_forms(words, expected):
    assert load(*words) == expected


def test_the_command_line_can_complete_a_file_that_is_not_valid_alone(yaml_file):
    file = yaml_file("schedule: {kind: length_decay}")
    assert refusal(file) == "schedule: length_decay needs decay_period"
    assert load(file, "--schedule.decay-period", "40").schedule == Schedule("length_decay", 40)


@pytest.mark.parametrize(
    ("text", "place", "parts"),
    [
        (
            "optimizer: {learning_rat: 1}",
            ":1: ",
            ["unknown key optimizer.learning_rat", "did you mean optimizer.learning_rate?"],
        ),
        ("optimizer: {lr: 0.5}", ":1: ", ["optimizer.lr (value 0.5)", "did you mean optimizer.learning_rate?"]),
        ("\nlearning_rate: 1", ":2: ", ["unknown key learning_rate", "did you mean optimizer.learning_rate?"]),
        ("optimizer: {learning-rate: 1}", ":1: ", ["did you mean optimizer.learning_rate?"]),
        ("optimizer: {zzzz: 1}", ":1: ", ["optimizer.zzzz", "known keys: optimizer.learning_rate, optimizer.clip"]),
        ("zzzz: 1", ":1: ", ["unknown key zzzz", "known keys: name, steps, resume, note, optimizer"]),
        ("steps: many", ":1: ", ["steps: expected int, got 'many'"]),
        ("steps: 1.5", ":1: ", ["steps: expected int, got 1.5"]),
        ("steps: true", ":1: ", ["steps: expected int, got true"]),
        ("steps: 010", ":1: ", ["steps: expected int, got '010'"]),
        ("steps: [1]", ":1: ", ["steps: expected int, got [1]"]),
        ("steps: {a: 1}", ":1: ", ["steps: expected int, got a mapping"]),
        ("steps:", ":1: ", ["steps: expected int, got null"]),
        ("name: 3", ":1: ", ["name: expected str, got 3"]),
        ("optimizer:\n  learning_rate: '1e-4'", ":2: ", ["optimizer.learning_rate: expected float, got '1e-4'"]),
        ("optimizer: {learning_rate: true}", ":1: ", ["expected float, got true"]),
        ("optimizer: {nesterov: 1}", ":1: ", ["optimizer.nesterov: expected bool (true or false), got 1"]),
        ("optimizer: {nesterov: yes}", ":1: ", ["expected bool (true or false), got 'yes'"]),
        ("optimizer: {kind: adam}", ":1: ", ["optimizer.kind: expected one of adamw, sgd, off, got 'adam'"]),
        ("optimizer: {clip: x}", ":1: ", ["optimizer.clip: expected float or null, got 'x'"]),
        ("optimizer: {betas: [1]}", ":1: ", ["optimizer.betas: expected a list of 2 (float, float), got [1]"]),
        ("optimizer: {betas: 1}", ":1: ", ["a list of 2 (float, float), got 1"]),
        ("rollout: {urls: [a, 3]}", ":1: ", ["rollout.urls: expected a list of str, got ['a', 3]"]),
        ("rollout: {urls: &a [*a]}", ":1: ", ["rollout.urls: expected a list of str"]),
        ("optimizer: 3", ":1: ", ["optimizer: expected a mapping with the keys learning_rate, clip", "got 3"]),
        ("optimizer:", ":1: ", ["optimizer: expected a mapping", "got null"]),
        ("- 1", ":1: ", ["expected a mapping with the keys name, steps", "got [1]"]),
        ("# nothing", ": ", ["expected a mapping", "got an empty file"]),
        ("steps: 1\n\nsteps: 2", ":3: ", ["duplicate key steps (value 2), first on line 1"]),
        ("optimizer:\n  clip: 1\n  clip: 1", ":3: ", ["duplicate key optimizer.clip"]),
        ("steps: 1\noptimizer: {clip: ", ":2: ", ["not valid YAML"]),
        ("a: !!python/object:os.system {}", ":1: ", ["unknown key a"]),
        ("name: !!python/name:os.system ''", ":1: ", ["name: cannot read"]),
        ("steps: !!int x", ":1: ", ["steps: cannot read 'x'"]),
        ("---\nsteps: 1\n---\nsteps: 2", ":3: ", ["not valid YAML"]),
        ("steps: 0", "", ["steps must be at least 1, got 0"]),
        ("optimizer: {learning_rate: -1}", "", ["optimizer.learning_rate must be positive, got -1.0"]),
        ("rollout: {warmup: {decay_period: null}}", "", ["rollout.warmup: length_decay needs decay_period"]),
    ],
)
def test_yaml_mistakes(yaml_file, text, place, parts):
    file = yaml_file(text)
    message = refusal(file)
    assert message.startswith(file + place if place else parts[0])
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "many"], "command line: steps: expected int, got 'many'"),
        (["--steps", "1e3"], "command line: steps: expected int, got '1e3'"),
        (["--steps"], "command line: steps: expected int, got nothing"),
        (["--steps", "--name", "x"], "command line: steps: expected int, got nothing"),
        (["--optimizer.kind", "adam"], "command line: optimizer.kind: expected one of adamw, sgd, off, got 'adam'"),
        (["--optimizer.clip", "x"], "command line: optimizer.clip: expected float or null, got 'x'"),
        (["--optimizer.betas", "1"], "command line: optimizer.betas: expected a list of 2 (float, float), got '1'"),
        (["--optimizer.nesterov=1"], "command line: optimizer.nesterov: expected bool (true or false), got '1'"),
        (
            ["--optimizer.learning-rat", "3"],
            "command line: unknown key optimizer.learning_rat (value '3'); did you mean optimizer.learning_rate?",
        ),
        (
            ["--learning-rate", "3"],
            "command line: unknown key learning_rate (value '3'); did you mean optimizer.learning_rate?",
        ),
        (["--optimizer", "x"], "command line: optimizer is a section: set its keys, as in --optimizer.KEY VALUE"),
        (["a.yaml", "b.yaml"], "command line: unexpected argument 'b.yaml' after the configuration 'a.yaml'"),
        (["no/such.yaml"], "no/such.yaml: No such file or directory"),
        (["--optimizer.learning-rate", "-1"], "optimizer.learning_rate must be positive, got -1.0"),
    ],
)
def test_command_line_mistakes(words, message):
    assert refusal(*words) == message


def test_unreadable_files(tmp_path):
    (tmp_path / "latin").write_bytes(b"name: \xff")
    assert "not UTF-8 text" in refusal(str(tmp_path / "latin"))
    assert "Is a directory" in refusal(str(tmp_path))
    (tmp_path / "control").write_bytes(b"name: \x01")
    assert "not valid YAML" in refusal(str(tmp_path / "control"))


def test_a_field_without_a_default_must_be_given(yaml_file):
    expected = "model.path: missing, expected str (in the file or as --model.path)"
    assert refusal(root=Needs) == expected
    assert load("--model.path", "x", root=Needs) == Needs(Model("x"))


def test_help_explains_and_shows_the_values_of_the_file(yaml_file, capsys):
    with pytest.raises(SystemExit) as caught:
        load(yaml_file("optimizer: {learning_rate: 0.25}"), "--help")
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    for part in ("python -m rljax.example [CONFIG.yaml]", "An example.", "--optimizer.learning-rate", "0.25"):
        assert part in shown
    assert "peak rate, per update" in shown
    assert "updates between halvings" in shown


@pytest.mark.parametrize("argv", [["--help", "--steps", "many"], ["-h", "no/such.yaml"]])
def test_help_survives_mistakes(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        load(*argv)
    assert caught.value.code == 0
    assert "--optimizer.learning-rate" in capsys.readouterr().out


def test_help_with_required_fields(capsys):
    with pytest.raises(SystemExit) as caught:
        load("--help", root=Needs)
    assert caught.value.code == 0
    assert "--model.path" in capsys.readouterr().out


@dataclass(frozen=True)
class Unreadable:
    table: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Nested:
    table: tuple[tuple[int, ...], ...] = ()


@pytest.mark.parametrize("root", [Unreadable, Nested])
def test_a_field_type_that_cannot_be_read_is_the_programmers_mistake(root, yaml_file):
    with pytest.raises(TypeError, match="table"):
        load(yaml_file("table: {}"), root=root)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "",
        "~",
        "null",
        "yes",
        "off",
        "1e-4",
        "010",
        "1:30",
        "2020-01-01",
        "<<",
        "=",
        "- a",
        "a: b",
        "#",
        "1_000",
        ".inf",
        "&a",
    ]
)
floats = st.floats(allow_nan=False)
configs = st.builds(
    Config,
    name=text,
    steps=st.integers(1, 2**80),
    resume=text,
    note=st.none() | text,
    optimizer=st.builds(
        Optimizer,
        learning_rate=st.floats(min_value=0, exclude_min=True),
        clip=st.none() | floats,
        kind=st.sampled_from(["adamw", "sgd", "off"]),
        nesterov=st.booleans(),
        betas=st.tuples(floats, floats),
    ),
    schedule=st.builds(Schedule, kind=st.sampled_from(["constant", "length_decay"]), decay_period=st.integers()),
    rollout=st.builds(
        Rollout,
        urls=st.lists(text, max_size=3).map(tuple),
        limits=st.none() | st.lists(st.integers(), max_size=3).map(tuple),
    ),
)


@settings(max_examples=150, deadline=None)
@given(configs)
def test_the_yaml_form_reads_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8")
    back = load(str(path))
    assert back == config
    assert config_to_yaml(back) == config_to_yaml(config)


def test_nan_reads_back():
    assert ".nan" in config_to_yaml(Optimizer(clip=math.nan))


def test_run_cli_prints_one_line_and_returns_2(capsys):
    def main(argv):
        load(*argv)
        return 5

    assert run_cli(main, ["--steps", "3"]) == 5
    assert run_cli(main, ["--steps", "x"]) == 2
    assert capsys.readouterr().err == "error: command line: steps: expected int, got 'x'\n"


def test_run_cli_reads_the_process_arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["prog", "a", "b"])
    assert run_cli(lambda argv: len(argv)) == 2


def test_run_cli_leaves_bugs_their_traceback_and_interrupts_quiet(capsys):
    def bug(argv):
        raise ValueError("shapes differ")

    def interrupt(argv):
        raise KeyboardInterrupt

    with pytest.raises(ValueError, match="shapes differ"):
        run_cli(bug, [])
    assert run_cli(interrupt, []) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_caller_errors_turns_the_callers_mistakes_into_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^batch_size must divide, got 3$"), caller_errors():
        raise ValueError("batch_size\n must divide, got 3")
    with pytest.raises(ConfigError, match=r"nothing: No such file or directory$"), caller_errors():
        (tmp_path / "nothing").read_text()
    with pytest.raises(RuntimeError), caller_errors():
        raise RuntimeError("server gone")
