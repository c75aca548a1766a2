"""Options of a command line. Those of a configuration are words for the fields of a tree of dataclasses."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rljax.errors import ConfigError

T = TypeVar("T")
WIDTH = 100  # the characters of a line of help


def parse_arguments(root: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Builds a program's dataclass of arguments from the words of its command line.

    ``--help`` prints ``prog``, ``description`` and the options, and exits with status 0. The positional fields of
    ``root`` have the type ``tyro.conf.Positional``. Raises ConfigError if a word has the wrong type or fits no option.
    """
    import tyro  # takes a tenth of a second
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry, asking = ConstructorRegistry(), False

    @registry.primitive_rule
    def says_its_form(info: Any) -> Any:
        """Gives tyro's own reader of words, with a message that says which form was expected."""
        nonlocal asking
        if asking:
            return None
        asking = True
        try:
            own = registry.get_primitive_spec(info)
        finally:
            asking = False
        if not isinstance(own, PrimitiveConstructorSpec):
            return own

        def read(words: list[str]) -> Any:
            try:
                return own.instance_from_str(words)
            except ValueError as error:
                raise ValueError(f"expected {own.metavar}, got {' '.join(words)}") from error

        return dataclasses.replace(own, instance_from_str=read)

    with _one_line_errors():
        return tyro.cli(root, args=list(argv), prog=prog, description=description, registry=registry)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turns a mistake that tyro prints as a box into a ConfigError of one line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as error:
        if error.code in (0, None):
            raise
        raise ConfigError(_one_line(printed.getvalue())) from None
    except ValueError as error:  # a check of the dataclass
        raise ConfigError(str(error)) from error


def _one_line(box: str) -> str:
    """Returns the message in a box that tyro printed, without the heading and the hint at ``--help``."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    text = "\n".join("" if set(line) <= {"─", "-"} else line or " " for line in lines)
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n")]
    paragraphs = paragraphs if "╭" in box else paragraphs[1:]  # without the box's characters, the heading is one
    message = re.sub(r"^Error parsing (\S+):", r"\1:", paragraphs[0])
    similar = re.search(r"(?:Perhaps you meant|Similar arguments).*?(--[\w.-]+)", " ".join(paragraphs[1:]))
    return f"{message}; did you mean {similar[1]}?" if similar else message


def read_options(root: type, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Reads options ``--a.b value`` for the fields of ``root``, without any check of the values.

    Names may have ``-`` or ``_`` inside. A bare ``--a.flag`` means true, ``none`` empties an optional value, and of a
    repeated option the last one counts. A word that does not have the type of its option stays text.

    Returns the values by dotted name, and the words that are neither an option nor its value. Raises ConfigError if an
    option lacks its value.
    """
    hints, found, others, at = dict(_fields(root)), dict[str, Any](), list[str](), 0
    while at < len(words):
        name, sign, value = words[at].removeprefix("--").partition("=")
        path = name.replace("-", "_")
        if not words[at].startswith("--") or path not in hints:
            others.append(words[at])
            at += 1
            continue
        given = [value] if sign else list(itertools.takewhile(lambda one: one[:2] != "--", words[at + 1 :]))
        members = _members(hints[path])
        if not any(get_origin(one) is tuple for one in members):
            given = given[:1]
            if members == (bool,) and not sign and given and given[0].lower() not in ("true", "false"):
                given = []  # the word after a bare flag is not its value
            if not given and bool not in members:
                raise ConfigError(f"command line: --{name} needs a value")
        found[path] = _value(members, given)
        at += 1 if sign else 1 + len(given)
    return found, others


def read_words(
    kind: type[T], words: Sequence[str], *, paths: str, prog: str, description: str, most: int | None = None
) -> tuple[list[Path], T]:
    """Reads the paths (at least one, and at most ``most``) and the options of a command line.

    It needs no further package. ``kind`` is a dataclass whose fields are the options, with defaults, documented by the
    strings below them. ``--help`` prints the options below ``description`` and leaves with status 0. It calls the paths
    ``paths``. Raises ConfigError if a word is not an option, has the wrong type, or is refused by the dataclass.
    """
    if {"-h", "--help"} & set(words):
        print(f"usage: {prog} {paths} {'' if most == 1 else f'[{paths} ...] '}[options]\n\n{description.strip()}\n")
        print(help_text(kind, {one.name: one.default for one in dataclasses.fields(kind)}))  # type: ignore[arg-type]
        raise SystemExit(0)
    values, others = read_options(kind, words)
    hints = dict(_fields(kind))
    for word in others:
        if word.startswith("--"):
            known = ["--" + name.replace("_", "-") for name in hints]
            similar = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            raise ConfigError(f"unknown option {word}" + (f"; did you mean {similar[0]}?" if similar else ""))
    for name, value in values.items():
        members = _members(hints[name])
        if Path in members and value is not None:
            values[name] = Path(value)
        elif isinstance(value, str) and str not in members:
            raise ConfigError(f"--{name.replace('_', '-')}: expected {_form(hints[name])}, got {value}")
    if not others:
        raise ConfigError(f"expected at least one {paths}")
    if most is not None and len(others) > most:
        raise ConfigError(f"expected at most {most} {paths}, got {len(others)}")
    try:
        return [Path(word) for word in others], kind(**values)
    except ValueError as error:
        raise ConfigError(error) from error


def _fields(root: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the type of each field that is not a section."""
    hints = get_type_hints(root)
    for field in dataclasses.fields(root):
        if dataclasses.is_dataclass(hint := hints[field.name]):
            yield from _fields(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + field.name, hint


def _members(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _value(members: Sequence[Any], words: Sequence[str]) -> Any:
    """Returns the words of an option as a value of one of its types, or as text."""
    word = words[0] if words else ""
    if NoneType in members and [one.lower() for one in words] in (["none"], ["null"], ["~"]):
        return None
    for one in members:
        if get_origin(one) is tuple:
            items = [each for each in get_args(one) if each is not ...]
            kinds = itertools.chain(items, itertools.repeat(items[-1]))
            return [_value(_members(kind), [each]) for kind, each in zip(kinds, words, strict=False)]
        if one is bool and (not words or word.lower() in ("true", "false")):
            return word.lower() != "false"
        if one in (int, float):
            with contextlib.suppress(ValueError):
                return one(word)
    return word


def help_text(root: type, values: Mapping[str, Any], shown: Collection[str] | None = None) -> str:
    """Returns a paragraph for each option of ``root``: its name, its values, and its text with the value it has.

    ``values`` are nested like the sections. Only the options with a dotted name in ``shown`` are there; None: all.
    """
    paragraphs = []
    for path, hint in _fields(root):
        *above, name = path.split(".")
        section, value = root, values
        for one in above:
            section, value = get_type_hints(section)[one], value[one]
        if shown is None or path in shown:
            text = f"{field_texts(section).get(name, '')} (default: {_written(value[name])})".strip()
            lines = textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
            paragraphs.append("\n".join([f"  --{path.replace('_', '-')} {_form(hint)}", *lines]))
    return "\n".join(paragraphs)


def _written(value: Any) -> str:
    """Returns a value as one gives it on a command line."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "nothing"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _form(hint: Any) -> str:
    """Returns the values that an option takes, for its help."""
    names: dict[Any, str] = {NoneType: "none", bool: "{true,false}"}
    forms = []
    for one in _members(hint):
        if get_origin(one) is Literal:
            forms.append("{" + ",".join(map(str, get_args(one))) + "}")
        elif get_origin(one) is tuple:
            items = get_args(one)
            forms.append(f"[{_form(items[0])} ...]" if items[-1] is ... else " ".join(map(_form, items)))
        else:
            forms.append(names.get(one) or one.__name__.upper())
    return "|".join(forms)


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
