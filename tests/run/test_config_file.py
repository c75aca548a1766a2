"""Tests of the readers of configurations and of programs' arguments: precedence, mistakes in one line, and YAML."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.errors import ConfigError
from rljax.policy.hub import CONFIGS, model_directory, packaged
from rljax.run.config import Config as RealConfig
from rljax.run.config_file import config_to_yaml, find_config, load_config
from rljax.run.options import Positional, Repeated, field_texts, option_words, parse_arguments


@dataclass(frozen=True)
class Optimizer:
    """The update rule."""

    learning_rate: float = 1e-4
    """peak rate,
    per update"""
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
    template: bool | Literal["auto"] = "auto"
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


def load(*argv: str):
    return load_config(Config, argv, prog="python -m rljax.example", description="An example.")


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str, name: str = "c.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_precedence_default_yaml_command_line(yaml_file):
    file = yaml_file("steps: 20\noptimizer: {learning_rate: 2, clip: 2}\n")
    assert load() == Config()
    assert type(load(file).optimizer.learning_rate) is float
    got = load(file, "--optimizer.learning_rate", "1", "--name", "x")
    assert got == Config(name="x", steps=20, optimizer=Optimizer(learning_rate=1.0, clip=2.0))
    assert type(got.optimizer.learning_rate) is float
    # A partial section keeps its own defaults.
    assert load(yaml_file("rollout: {warmup: {decay_period: 9}}")).rollout.warmup == Schedule("length_decay", 9)
    assert load("--rollout.warmup.decay-period", "9").rollout.warmup == Schedule("length_decay", 9)
    assert load(yaml_file("rollout: {urls: [a]}")).rollout.warmup == Schedule("length_decay", 7)
    # Options can complete a file that is not valid alone.
    file = yaml_file("name: x\nschedule: {kind: length_decay}")
    assert refusal(file) == f"{file}:2: schedule: length_decay needs decay_period"
    assert load(file, "--schedule.decay-period", "40").schedule == Schedule("length_decay", 40)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((f"optimizer: {{learning_rate: {text}}}", Config()) for text in ("1E-4", "+1.0e-4", ".0001", "1.e-4")),
        ("optimizer: {kind: off}\nname: yes\n", Config("yes", optimizer=Optimizer(kind="off"))),
        ("name: 010\nnote: 2020-01-01\n", Config("010", note="2020-01-01")),
        ("optimizer: {betas: [-.inf, .inf]}", Config(optimizer=Optimizer(betas=(-math.inf, math.inf)))),
    ],
)
def test_scalars_are_those_of_yaml_1_2(yaml_file, text, expected):
    assert load(yaml_file(text)) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--optimizer.learning-rate 2e-3", Config(optimizer=Optimizer(learning_rate=2e-3))),
        ("--optimizer.clip None", Config(optimizer=Optimizer(clip=None))),
        ("--name none", Config(name="none")),
        ("--name 1e5", Config(name="1e5")),
        ("--name=--odd", Config(name="--odd")),
        ("--optimizer.nesterov", Config(optimizer=Optimizer(nesterov=True))),
        ("--optimizer.nesterov true --steps 3", Config(steps=3, optimizer=Optimizer(nesterov=True))),
        ("--rollout.template=true", Config(rollout=Rollout(template=True))),
        ("--optimizer.betas 0.5 1", Config(optimizer=Optimizer(betas=(0.5, 1.0)))),
        ("--rollout.urls http://a http://b", Config(rollout=Rollout(urls=("http://a", "http://b")))),
        ("--rollout.urls a --rollout.urls", Config()),
        ("--rollout.limits 3 --rollout.limits None", Config()),
        ("--rollout.warmup.decay-period -3", Config(rollout=Rollout(warmup=Schedule("length_decay", -3)))),
        ("--resume runs/x", Config(resume="runs/x")),
    ],
)
def test_command_line_forms(words, expected):
    assert load(*words.split()) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {lr: 0.5}", ":1: unknown key optimizer.lr; did you mean optimizer.learning_rate?"),
        ("\nlearning_rate: 1", ":2: unknown key learning_rate; did you mean optimizer.learning_rate?"),
        ("rollout: {warmup: {kin: x}}", ":1: unknown key rollout.warmup.kin; did you mean rollout.warmup.kind?"),
        ("schedule: {zzzz: 1}", ":1: unknown key schedule.zzzz; known keys: schedule.kind, schedule.decay_period"),
        ("zz: 1", ":1: unknown key zz; known keys: name, steps, resume, note, optimizer, schedule, rollout"),
        ("steps: 1.5", ":1: steps: expected a valid integer, got 1.5"),
        ("steps: true", ":1: steps: expected a valid integer, got true"),
        ("steps:", ":1: steps: expected a valid integer, got null"),
        ("optimizer:\n  learning_rate: '1e-4'", ':2: optimizer.learning_rate: expected a valid number, got "1e-4"'),
        ("optimizer: {kind: adam}", ":1: optimizer.kind: expected 'adamw', 'sgd' or 'off', got \"adam\""),
        ("rollout: {template: x}", ":1: rollout.template: expected a valid boolean or 'auto', got \"x\""),
        ("optimizer: {betas: [1]}", ":1: optimizer.betas: expected 2 items, got [1]"),
        ("optimizer: {betas: [1, 2, 3]}", ":1: optimizer.betas: expected 2 items, got [1, 2, 3]"),
        ("rollout: {urls: [a, 3]}", ":1: rollout.urls: expected a valid string, got 3"),
        ("name: &a x\nnote: *a", ":2: not valid YAML: the alias *a; write its value out"),
        ("schedule: 3", ":1: schedule: expected a mapping with the keys kind, decay_period, got 3"),
        ("- 1", ": expected a mapping, got [1]"),
        ("# nothing", ": expected a mapping, got an empty file"),
        ("steps: 1\n\nsteps: 2", ":3: not valid YAML: duplicate key steps"),
        ("steps: 1\noptimizer: {clip: ", ":2: not valid YAML: expected the node content"),
        ("name: !!python/name:os.system ''", ":1: not valid YAML: could not determine a constructor for the tag"),
        ("steps: !!int x", ": not valid YAML: invalid literal for int()"),
        ("---\nsteps: 1\n---\nsteps: 2", ":3: not valid YAML: but found another document"),
        ("name: x\nsteps: 0", ":2: steps must be at least 1, got 0"),
        ("optimizer: {learning_rate: -1}", ":1: optimizer.learning_rate must be positive, got -1.0"),
        ("rollout: {warmup: {decay_period: null}}", ":1: rollout.warmup: length_decay needs decay_period"),
        (f"steps: {'x' * 200}", f':1: steps: expected a valid integer, got "{"x" * 76}...'),
    ],
)
def test_yaml_mistakes(yaml_file, text, message):
    file = yaml_file(text)
    assert refusal(file).startswith(file + message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps many", 'command line: steps: expected a valid integer, got "many"'),
        ("--steps 3 4", "command line: unexpected argument '4'"),
        ("--steps", "command line: --steps needs a value"),
        ("--optimizer.nesterov=1", 'command line: optimizer.nesterov: expected a valid boolean, got "1"'),
        ("--learning-rate=3", "command line: unknown key learning_rate; did you mean optimizer.learning_rate?"),
        ("--optimizer x", "command line: optimizer is a section: set its keys, as in --optimizer.KEY VALUE"),
        ("--name x b.yaml", "command line: unexpected argument 'b.yaml'"),
    ],
)
def test_command_line_mistakes(words, message):
    assert refusal(*words.split()) == message


def test_a_file_that_is_needed_or_cannot_be_read_is_named(tmp_path):
    for words in ((), ("--steps", "3")):
        with pytest.raises(ConfigError, match=r"give a configuration first, as in: prog configs/x\.yaml \(--h"):
            load_config(Config, words, prog="prog", description="", example="configs/x.yaml")
    for content, said in ((b"name: \xff", "not UTF-8 text"), (b"name: \x01", "not valid YAML")):
        (tmp_path / "file").write_bytes(content)
        assert said in refusal(str(tmp_path / "file"))
    assert "Is a directory" in refusal(str(tmp_path))


def test_help_explains_and_shows_the_values_of_the_file(yaml_file, capsys):

    def printed(*words, common=None):
        with pytest.raises(SystemExit, match="0"):
            load_config(Config, words, prog="prog", description="An example.", example="x.yaml", common=common)
        return capsys.readouterr().out

    file = yaml_file("optimizer: {learning_rate: 0.25}\nschedule: {kind: length_decay}")
    shown = printed(file, "--steps", "many", "--help")
    for words in ("prog [CONFIG.yaml]", "An example.", "--optimizer.learning-rate", "updates between halvings"):
        assert words in shown
    assert "peak rate, per update (default: 0.25)" in shown
    assert "(default: length_decay)" in shown
    short, whole = (printed("-h", *words, common=("steps", "optimizer.clip")) for words in ((), ("all",)))
    for word in ("--steps", "--optimizer.clip", "--help all"):
        assert word in short
    assert "--optimizer.betas" not in short
    assert "--optimizer.betas" in whole


def test_every_setting_of_a_run_is_explained_under_its_field():
    waiting = [RealConfig()]
    while waiting:
        section = waiting.pop()
        values = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
        inner = {name for name, value in values.items() if dataclasses.is_dataclass(value)}
        assert set(values) - inner <= set(field_texts(type(section))), type(section)
        waiting += [values[name] for name in inner]


def test_a_file_overrides_its_base_and_options_override_both(yaml_file, monkeypatch):
    """A base is relative to its file. What is written back needs none."""
    yaml_file("optimizer: {clip: 2.0, betas: [0.1, 0.2]}\nschedule: {decay_period: 3}", "grand.yaml")
    yaml_file("base: grand.yaml\noptimizer: {betas: [0.3, 0.4]}", "parent.yaml")
    child = yaml_file("base: ../parent.yaml\noptimizer: {clip: null}\nsteps: 4\n", "arms/child.yaml")
    monkeypatch.chdir("/")
    config = load(child)
    assert config == Config(
        steps=4, optimizer=Optimizer(1e-4, None, betas=(0.3, 0.4)), schedule=Schedule("constant", 3)
    )
    assert load(child, "--optimizer.clip", "9").optimizer == Optimizer(clip=9.0, betas=(0.3, 0.4))
    assert load(yaml_file(config_to_yaml(config), "elsewhere/config.yaml")) == config


@pytest.mark.parametrize(
    ("arm", "line"),
    [
        ("base: gone.yaml\n", "arm.yaml:1: base: {dir}/gone.yaml does not exist"),
        ("base: round.yaml\n", "round.yaml:1: base: {dir}/arm.yaml leads back to itself"),
        ("base: [a]\n", 'arm.yaml:1: base: expected the name of a file, got ["a"]'),
        ("base: fine.yaml\nbase: fine.yaml\n", "arm.yaml:2: not valid YAML: duplicate key base"),
        ("base: wrong.yaml\nname: x", "wrong.yaml:2: unknown key optimizer.rat"),
        ("optimizer: {base: fine.yaml}\n", "arm.yaml:1: unknown key optimizer.base"),
    ],
)
def test_a_mistake_names_the_file_it_is_in(yaml_file, tmp_path, arm, line):
    yaml_file("base: arm.yaml\n", "round.yaml")
    yaml_file("steps: 2\n", "fine.yaml")
    yaml_file("optimizer:\n  rat: 1\n", "wrong.yaml")
    assert line.format(dir=tmp_path) in refusal(yaml_file(arm, "arm.yaml"))


ODD = ["", "~", "null", "yes", "off", "1e-4", "010", "1:30", "2020-01-01", "<<", "=", "- a", "a: b", "#", "1_000"]
texts = st.text(max_size=20) | st.sampled_from(ODD)
optimizers = st.builds(
    Optimizer, learning_rate=st.floats(min_value=0, exclude_min=True), clip=..., kind=..., nesterov=..., betas=...
)
configs = st.builds(
    Config,
    name=texts,
    steps=st.integers(1, 2**80),
    resume=texts,
    note=st.none() | texts,
    optimizer=optimizers,
    schedule=st.builds(Schedule, kind=..., decay_period=st.integers()),
    rollout=st.builds(Rollout, urls=..., limits=..., template=...),
)


@settings(max_examples=80, deadline=None)
@given(configs)
def test_the_yaml_form_reads_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8")
    back = load(str(path))
    assert back == config or ".nan" in path.read_text()
    assert config_to_yaml(back) == config_to_yaml(config)


def test_the_package_carries_configurations_and_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("quickstart") == find_config("configs/quickstart.yaml") == CONFIGS / "quickstart.yaml"
    assert find_config("paper/qwen3_4b_fp16").is_file()
    (tmp_path / "quickstart").write_text("run: {steps: 3}")
    assert find_config("quickstart") == Path("quickstart")
    with pytest.raises(ConfigError, match="quickstrat: No such file or directory; did you mean quickstart"):
        find_config("quickstrat")
    assert model_directory("configs/toy-base") == model_directory("toy-base") == str(CONFIGS / "toy-base")
    (tmp_path / "configs/toy-base").mkdir(parents=True)
    assert model_directory("configs/toy-base") == "configs/toy-base"
    assert packaged("../pyproject.toml") is None


# ---- the arguments of a program ----


@dataclass(frozen=True)
class Arguments:
    """The arguments of a program."""

    source: Positional[Path]
    """The file
    to read."""
    rest: Positional[tuple[Path, ...] | None] = None
    """More files."""
    scorer: Repeated[str] = ()
    lengths: tuple[int, ...] = (3,)
    kind: Literal["a", "b"] | None = None
    check: bool = True
    """Whether to check."""

    def __post_init__(self) -> None:
        if self.lengths == ():
            raise ValueError("lengths must not be empty")


@dataclass(frozen=True)
class Connected:
    server: str
    """The server."""


def parse(words):
    aliases = {"-s": "--scorer", "--engine": "--kind"}
    return parse_arguments(Arguments, words.split(), prog="prog", description="Says.", aliases=aliases)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("x", {}),
        ("x y z", {"rest": (Path("y"), Path("z"))}),
        ("--scorer a x -s b --scorer=--c", {"scorer": ("a", "b", "--c")}),
        ("x --lengths 1 2 --kind b", {"lengths": (1, 2), "kind": "b"}),
        ("--no-check x --engine=a", {"check": False, "kind": "a"}),
        ("x --kind a --kind none", {}),
    ],
)
def test_words_become_arguments(words, expected):
    assert parse(words) == Arguments(Path("x"), **expected)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "expected SOURCE; prog --help explains it"),
        ("x --scorr a", "unknown option --scorr; did you mean --scorer?"),
        ("x -q", "unknown option -q"),
        ("x --lengths 1 b", "--lengths: expected INT, got b"),
        ("x --kind c", "--kind: expected {a,b}|none, got c"),
        ("x --lengths", "lengths must not be empty"),
    ],
)
def test_a_mistake_in_arguments_is_one_line(words, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        parse(words)


def test_help_has_the_text_of_each_field(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse("x --help")
    shown = capsys.readouterr().out
    assert shown.startswith("usage: prog SOURCE REST ... [--a VALUE ...]\n\nSays.\n")
    assert "  SOURCE PATH\n      The file to read.\n" in shown
    assert "  --check {true,false}\n      Whether to check. (default: true)" in shown
    assert option_words(Arguments) == ["--scorer", "--lengths", "--kind", "--check"]
    with pytest.raises(SystemExit, match="0"):
        parse_arguments(Connected, ["--help"], prog="prog", description="Says.")
    assert capsys.readouterr().out.endswith("  --server STR\n      The server. (required)\n")
