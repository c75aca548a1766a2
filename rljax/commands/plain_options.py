"""Reads a command line into a dataclass with only the standard library, for commands that need no further package."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from rljax.errors import ConfigError

T = TypeVar("T")


class _Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError for a mistake instead of printing it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_words(
    kind: type[T], words: Sequence[str], *, paths: str, prog: str, description: str, most: int | None = None
) -> tuple[list[Path], T]:
    """Reads the paths (at least one, and at most ``most``) and the options of a command line.

    ``kind`` is a dataclass whose fields are the options, with defaults, documented by the strings below them.
    ``--help`` prints the options below ``description`` and leaves with status 0. It calls the paths ``paths``.

    Raises:
      ConfigError: A word is not an option, has the wrong type, or is refused by the dataclass.
    """
    parser = _Parser(
        prog=prog,
        description=description,
        usage=f"{prog} {paths} {'' if most == 1 else f'[{paths} ...] '}[options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("paths", metavar=paths, nargs="*", type=Path)
    hints, texts = get_type_hints(kind), field_texts(kind)
    options = ["--help"]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        options.append("--" + field.name.replace("_", "-"))
        hint = hints[field.name]
        (one,) = [each for each in get_args(hint) if each is not NoneType] if isinstance(hint, UnionType) else [hint]
        given: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if one is bool else {"type": one}
        if one is not bool:
            given["metavar"] = one.__name__.upper()
        shown = "" if field.default in (None, False) else f" Default: {field.default}."
        text = (texts[field.name] + shown).replace("%", "%%")
        parser.add_argument(options[-1], dest=field.name, default=field.default, help=text, **given)
    found, unknown = parser.parse_known_intermixed_args([with_hyphens(word) for word in words])
    if unknown:
        similar = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
        raise ConfigError(f"unknown option {unknown[0]}" + (f"; did you mean {similar[0]}?" if similar else ""))
    values = vars(found)
    given_paths = values.pop("paths")
    if not given_paths:
        raise ConfigError(f"expected at least one {paths}")
    if most is not None and len(given_paths) > most:
        raise ConfigError(f"expected at most {most} {paths}, got {len(given_paths)}")
    try:
        return given_paths, kind(**values)
    except ValueError as error:
        raise ConfigError(error) from error


def with_hyphens(word: str) -> str:
    """Returns a word of the command line with hyphens in the name of its option: ``--a_b=c`` becomes ``--a-b=c``."""
    name, sign, value = word.partition("=")
    return name.replace("_", "-") + sign + value if word.startswith("--") else word


def field_texts(kind: type) -> dict[str, str]:
    """Returns the string below each field of a dataclass, in one line, by the field's name."""
    texts = {}
    for each in reversed(kind.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts
