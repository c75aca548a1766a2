"""``base: OTHER.yaml``: a configuration that holds only what differs from another file."""

from dataclasses import dataclass, field

import pytest

from rljax.errors import ConfigError
from rljax.run.config_file import config_to_yaml, load_config


@dataclass(frozen=True)
class Inner:
    rate: float = 1.0
    names: tuple[str, ...] = ()
    limit: int | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class HasBase:
    base: str = "own"


def load(path, *options, root=Outer):
    return load_config(root, [str(path), *options], prog="test", description="")


def write(directory, **files):
    for name, text in files.items():
        (directory / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.yaml").write_text(text)
    return directory


def test_a_file_is_laid_over_its_base_and_the_command_line_over_both(tmp_path):
    write(
        tmp_path,
        grand="inner: {rate: 2.0, names: [a, b], limit: 7}\nother: {rate: 3.0}\n",
        parent="base: grand.yaml\ninner: {names: [c]}\n",
        child="base: parent.yaml\ninner: {limit: null}\nother: {limit: 4}\n",
    )
    expected = Outer(Inner(2.0, ("c",), None), Inner(3.0, (), 4))
    assert load(tmp_path / "child.yaml") == expected
    assert load(tmp_path / "child.yaml", "--inner.rate", "9").inner == Inner(9.0, ("c",), None)


def test_the_name_is_relative_to_the_file_not_to_the_caller(tmp_path, monkeypatch):
    (tmp_path / "arms").mkdir()
    write(tmp_path, setup="inner: {rate: 5.0}\n")
    (tmp_path / "arms/one.yaml").write_text("base: ../setup.yaml\n")
    monkeypatch.chdir("/")
    assert load(tmp_path / "arms/one.yaml").inner.rate == 5.0


def test_what_is_written_back_needs_no_base(tmp_path):
    write(tmp_path, setup="inner: {rate: 5.0}\n", arm="base: setup.yaml\nother: {limit: 2}\n")
    config = load(tmp_path / "arm.yaml")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.yaml").write_text(config_to_yaml(config))
    assert load(tmp_path / "elsewhere/config.yaml") == config


@pytest.mark.parametrize(
    ("arm", "line"),
    [
        ("base: gone.yaml\n", "arm.yaml:1: base: {dir}/gone.yaml does not exist"),
        ("inner: {rate: 1.0}\nbase: arm.yaml\n", "arm.yaml:2: base: {dir}/arm.yaml leads back to itself"),
        ("base: round.yaml\n", "round.yaml:1: base: {dir}/arm.yaml leads back to itself"),
        ("base: [a]\n", "arm.yaml:1: base: expected the name of a file, got ['a']"),
        ("base: 3\n", "arm.yaml:1: base: expected the name of a file, got 3"),
        ("base:\n", "arm.yaml:1: base: expected the name of a file, got null"),
        ("base: fine.yaml\nbase: fine.yaml\n", "arm.yaml:2: unknown key base"),
        ("base: wrong.yaml\n", "wrong.yaml:1: unknown key inner.rat (value 1)"),
        ("inner: {base: fine.yaml}\n", "arm.yaml:1: unknown key inner.base"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file_it_is_in(tmp_path, arm, line):
    write(tmp_path, arm=arm, round="base: arm.yaml\n", fine="inner: {rate: 2.0}\n", wrong="inner: {rat: 1}\n")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "arm.yaml")
    assert line.format(dir=tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_configuration_with_a_key_of_that_name_keeps_it(tmp_path):
    write(tmp_path, arm="base: mine\n")
    assert load(tmp_path / "arm.yaml", root=HasBase) == HasBase("mine")
