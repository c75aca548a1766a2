"""Options of a command line: words ``--a.b value`` for the fields of a dataclass, and of dataclasses in it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import itertools
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from rljax.errors import ConfigError

T = TypeVar("T")
HELP = {"-h", "--help"}
WIDTH = 100  # the characters of a line of help
_POSITIONAL, _REPEATED = "positional", "repeated"
Positional = Annotated[T, _POSITIONAL]
"""The type of a field that is a word without an option. A tuple takes all words that are left, at least one."""
Repeated = Annotated[tuple[T, ...], _REPEATED]
"""The type of a field to which each use of its option adds one word."""


class Option(NamedTuple):
    """A field that a command line sets."""

    hint: Any  # the type of the field
    marker: str  # "positional", "repeated" or ""
    section: type  # the dataclass that has the field

    @property
    def members(self) -> tuple[Any, ...]:
        """The types in the union that annotates the field, or its one type."""
        return _members(self.hint)

    @property
    def is_list(self) -> bool:
        """Whether the value of the field is a tuple."""
        return any(get_origin(one) is tuple for one in self.members)


def options_of(root: type, prefix: str = "") -> dict[str, Option]:
    """Returns the ``Option`` of each field of ``root`` that is not a section, by its dotted name."""
    hints, found = get_type_hints(root, include_extras=True), dict[str, Option]()
    for field in dataclasses.fields(root):
        hint = hints[field.name]
        hint, *markers = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(hint):
            found |= options_of(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            found[prefix + field.name] = Option(hint, markers[0] if markers else "", root)
    return found


def option_words(root: type) -> list[str]:
    """Returns the words ``--a.b`` of all options of a dataclass."""
    options = options_of(root).items()
    return ["--" + name.replace("_", "-") for name, option in options if option.marker != _POSITIONAL]


def parse_arguments(
    kind: type[T], argv: Sequence[str], *, prog: str, description: str, aliases: Mapping[str, str] | None = None
) -> T:
    """Builds a program's dataclass of arguments from the words of its command line.

    It needs the standard library only. ``kind`` documents its fields by strings below them. ``--help`` prints the
    options below ``description``, and leaves with status 0. ``aliases`` are further names of options. Raises
    ConfigError if a word is not an option, has the wrong type, or is refused by the dataclass.
    """
    options = options_of(kind)
    positional = {name: option for name, option in options.items() if option.marker == _POSITIONAL}
    if HELP & set(argv):
        names = [f"{name.upper()}{' ...' if option.is_list else ''}" for name, option in positional.items()]
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        print(f"usage: {' '.join([prog, *names])} [--a VALUE ...]\n\n{description.strip()}\n\noptions:")
        print(help_text(kind, defaults))
        raise SystemExit(0)
    named = [word.partition("=") for word in argv]
    words = ["".join([(aliases or {}).get(name, name), *rest]) for name, *rest in named]
    values, others = read_options(kind, words, strict=True)
    for word in others:
        if word.startswith("-"):
            similar = difflib.get_close_matches(word.partition("=")[0], option_words(kind), n=1)
            raise ConfigError(f"unknown option {word}" + (f"; did you mean {similar[0]}?" if similar else ""))
    for name, option in positional.items():
        taken, others = (others, []) if option.is_list else (others[:1], others[1:])
        if taken:
            values[name] = _value(option.members, taken, strict=True)
    if others:
        raise ConfigError(f"unexpected argument {others[0]!r}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            shown = field.name.upper() if field.name in positional else f"--{field.name.replace('_', '-')}"
            raise ConfigError(f"expected {shown}; {prog} --help explains it")
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(error) from error


def read_options(root: type, words: Sequence[str], *, strict: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Reads options ``--a.b value`` for the fields of ``root``.

    Names may have ``-`` or ``_`` inside. A bare ``--flag`` means true and ``--no-flag`` false. ``none`` empties an
    optional value. Of a repeated option the last one counts, unless its type is ``Repeated``. A word that does not have
    the type of its option stays text, or is refused if ``strict``.

    Returns the values by dotted name, and the words that are neither an option nor its value. Raises ConfigError if an
    option lacks its value, or if ``strict`` refuses a word.
    """
    options, found, others, at = options_of(root), dict[str, Any](), list[str](), 0
    while at < len(words):
        name, sign, value = words[at].removeprefix("--").partition("=")
        path = name.replace("-", "_")
        if path.startswith("no_") and path[3:] in options and options[path[3:]].members == (bool,):
            path, sign, value = path[3:], "=", "false"
        if not words[at].startswith("--") or path not in options:
            others.append(words[at])
            at += 1
            continue
        option = options[path]
        given = [value] if sign else list(itertools.takewhile(lambda one: one[:2] != "--", words[at + 1 :]))
        if not option.is_list or option.marker == _REPEATED:
            given = given[:1]
            if option.members == (bool,) and not sign and given and given[0].lower() not in ("true", "false"):
                given = []  # the word after a bare flag is not its value
            if not given and bool not in option.members:
                raise ConfigError(f"command line: --{name} needs a value")
        try:
            read = _value(option.members, given, strict=strict)
        except ValueError as error:
            raise ConfigError(f"--{name}: {error}") from error
        found[path] = found.get(path, ()) + read if option.marker == _REPEATED else read
        at += 1 if sign else 1 + len(given)
    return found, others


def _members(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _value(members: Sequence[Any], words: Sequence[str], *, strict: bool) -> Any:
    """Returns the words of an option as a value of one of its types, or as text. Raises ValueError if ``strict``."""
    word = words[0] if words else ""
    if NoneType in members and [one.lower() for one in words] in (["none"], ["null"], ["~"]):
        return None
    for one in members:
        if get_origin(one) is tuple:
            items = [each for each in get_args(one) if each is not ...]
            pairs = zip(itertools.chain(items, itertools.repeat(items[-1])), words, strict=False)
            return tuple(_value(_members(kind), [each], strict=strict) for kind, each in pairs)
        if one is bool and (not words or word.lower() in ("true", "false")):
            return word.lower() != "false"
        if one in (int, float, Path):
            with contextlib.suppress(ValueError):
                return one(word)
        if one is str or (get_origin(one) is Literal and word in get_args(one)):
            return word
    if strict:
        raise ValueError(f"expected {'|'.join(map(_form, members))}, got {word}")
    return word


def help_text(root: type, values: Mapping[str, Any], shown: Collection[str] | None = None) -> str:
    """Returns a paragraph for each option of ``root``: its name, its types, its documentation and its default.

    ``values`` has the defaults by dotted name. Only the options with a dotted name in ``shown`` are there; None: all.
    """
    paragraphs = []
    for path, option in options_of(root).items():
        if shown is None or path in shown:
            text = field_texts(option.section).get(path.rpartition(".")[2], "")
            if option.marker != _POSITIONAL:
                is_required = values[path] is dataclasses.MISSING
                text += " (required)" if is_required else f" (default: {_written(values[path])})"
            lines = textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
            name = path.upper() if option.marker == _POSITIONAL else f"--{path.replace('_', '-')}"
            paragraphs.append("\n".join([f"  {name} {'|'.join(map(_form, option.members))}", *lines]))
    return "\n".join(paragraphs)


def _written(value: Any) -> str:
    """Returns the words that give a value on a command line."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "nothing"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _form(one: Any) -> str:
    """Returns the description of one type of an option, for ``--help``."""
    if get_origin(one) is Literal:
        return "{" + ",".join(map(str, get_args(one))) + "}"
    if get_origin(one) is tuple:
        forms = ["|".join(map(_form, _members(item))) for item in get_args(one) if item is not ...]
        return f"[{forms[0]} ...]" if get_args(one)[-1] is ... else " ".join(forms)
    names: dict[Any, str] = {NoneType: "none", bool: "{true,false}"}
    return names.get(one) or one.__name__.upper()


def field_texts(kind: type) -> dict[str, str]:
    """Returns the documentation of each field of a dataclass, the string below the field, in one line."""
    texts = dict[str, str]()
    for each in reversed(kind.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts
