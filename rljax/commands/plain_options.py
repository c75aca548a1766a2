"""Reads a command line into a dataclass with only the standard library, for commands that need no further package."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import itertools
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
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
    texts, options = field_texts(kind), ["--help"]
    for name, hint in get_type_hints(kind).items():
        default, option = getattr(kind, name), "--" + name.replace("_", "-")
        (one,) = [each for each in get_args(hint) or [hint] if each is not NoneType]
        form: dict[str, Any] = {"type": one, "metavar": one.__name__.upper()}
        form = {"action": argparse.BooleanOptionalAction} if one is bool else form
        shown = "" if default in (None, False) else f" Default: {default}."
        text = (texts[name] + shown).replace("%", "%%")
        parser.add_argument(option, dest=name, default=default, help=text, **form)
        options.append(option)
    # The name of an option may have underscores: --a_b=c is --a-b=c.
    names = [re.sub(r"^--[^=]*", lambda found: found[0].replace("_", "-"), word) for word in words]
    found, unknown = parser.parse_known_intermixed_args(names)
    if unknown:
        similar = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
        raise ConfigError(f"unknown option {unknown[0]}" + (f"; did you mean {similar[0]}?" if similar else ""))
    values = vars(found)
    given = values.pop("paths")
    if not given or (most is not None and len(given) > most):
        expected = "at least one" if not given else f"at most {most}"
        raise ConfigError(f"expected {expected} {paths}, got {len(given)}")
    try:
        return given, kind(**values)
    except ValueError as error:
        raise ConfigError(error) from error


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
