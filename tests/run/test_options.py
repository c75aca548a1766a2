"""The arguments of a program: words without an option, repeated options, switches, and mistakes in one line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from rljax.errors import ConfigError
from rljax.run.options import Positional, Repeated, option_words, parse_arguments


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
        ("x --check false --check", {}),
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
        ("x --scorer", "command line: --scorer needs a value"),
        ("x --lengths", "lengths must not be empty"),
    ],
)
def test_a_mistake_is_one_line(words, said):
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert str(caught.value) == said


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
