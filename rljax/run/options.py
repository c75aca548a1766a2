"""Options of a command line: tyro reads them into dataclasses, and every mistake is one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from types import NoneType
from typing import Any, TypeVar, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, StructConstructorSpec

from rljax.errors import ConfigError

T = TypeVar("T")
_CONF = (tyro.conf.FlagConversionOff,)


def parse_arguments(root: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Builds a program's dataclass of arguments from the words of its command line.

    ``--help`` prints ``prog``, ``description`` and the options, and exits with status 0. The positional fields of
    ``root`` have the type ``tyro.conf.Positional``. Raises ConfigError if a word has the wrong type or fits no option.
    """
    registry = ConstructorRegistry()
    _add_section_rule(registry)
    _add_value_rule(registry, keeps_text=False)
    with _one_line_errors():
        return tyro.cli(root, args=list(argv), prog=prog, description=description, registry=registry)


def read_options(root: type, default: Any, words: Sequence[str], prog: str) -> tuple[dict[str, Any], list[str]]:
    """Reads options ``--a.b value`` over the values of ``default``, an instance of ``root``, without any check of them.

    Names may have ``-`` or ``_`` inside. A bare ``--a.flag`` means true, ``none`` empties an optional value, and of a
    repeated option the last one counts. A word that does not have the type of its option stays text.

    Returns the values of all fields, as nested dictionaries, and the words that are not options. Raises ConfigError if
    an option lacks its value, or has one that is not among its choices.
    """
    registry = ConstructorRegistry()
    _add_section_rule(registry, make=dict)
    _add_yaml_rule(registry)
    _add_value_rule(registry, keeps_text=True)
    with _one_line_errors("command line: "):
        values, unknown = tyro.cli(
            root, prog=prog, args=words, default=default, config=_CONF, registry=registry, return_unknown_args=True
        )
    return dict(values), unknown


def print_help(root: type, default: Any, prog: str, description: str, shown: Collection[str] | None = None) -> None:
    """Prints the options of ``root`` with the values of ``default``, an instance of it, and leaves with status 0.

    Only the options with a dotted name in ``shown`` are printed; None: all.
    """
    registry = ConstructorRegistry()
    _add_section_rule(registry, shown=None if shown is None else _fields_shown(root, shown))
    _add_yaml_rule(registry)
    texts: dict[str, Any] = {"prog": f"{prog} [CONFIG.yaml]", "description": description}
    tyro.cli(root, args=["--help"], default=default, config=_CONF, registry=registry, **texts)


def _fields_shown(root: type, shown: Collection[str]) -> dict[Any, set[str]]:
    """Returns the names of the fields to print, by the dataclass that holds them."""
    hints = get_type_hints(root)
    found: dict[Any, set[str]] = {root: {name.partition(".")[0] for name in shown} & set(hints)}
    for name in found[root]:
        if dataclasses.is_dataclass(hints[name]):
            below = [one.removeprefix(f"{name}.") for one in shown if one.startswith(f"{name}.")]
            found |= _fields_shown(hints[name], below)
    return found


def _over_own(rule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns ``rule`` in a form that may ask tyro for its own answer. While it asks, the result gives no answer."""
    is_asking = False

    def changed(info: Any) -> Any:
        nonlocal is_asking
        if is_asking:
            return None
        is_asking = True
        try:
            return rule(info)
        finally:
            is_asking = False

    return changed


def _add_section_rule(
    registry: ConstructorRegistry,
    *,
    shown: dict[Any, set[str]] | None = None,
    make: Callable[..., Any] | None = None,
) -> None:
    """Adds tyro's own rule of dataclasses, with the help of a field as one paragraph.

    Only the fields in ``shown`` are kept, and ``make`` is called in place of the dataclass; None changes nothing.
    """

    def section(info: Any) -> Any:
        own, kind = registry.get_struct_spec(info), info.type
        if not isinstance(own, StructConstructorSpec) or not dataclasses.is_dataclass(kind):
            return own
        fields = []
        for one in own.fields:
            if shown is None or one.name in shown.get(kind, ()):
                text = (one.helptext() if callable(one.helptext) else one.helptext) or ""
                fields.append(dataclasses.replace(one, helptext=" ".join(text.split())))
        return dataclasses.replace(own, fields=tuple(fields), instantiate=make or own.instantiate)

    registry.struct_rule(_over_own(section))


def _add_yaml_rule(registry: ConstructorRegistry) -> None:
    """Adds the rule of booleans and of nothing, which are written as in YAML: true, false, none."""

    @registry.primitive_rule
    def word(info: Any) -> PrimitiveConstructorSpec[Any] | None:
        if info.type not in (bool, NoneType):
            return None
        is_flag = info.type is bool
        values = {"true": True, "false": False} if is_flag else dict.fromkeys(("none", "null", "~"))

        def read(words: list[str]) -> Any:
            text = " ".join(words)
            if words and text.lower() not in values:
                raise ValueError(f"expected {'true or false' if is_flag else 'none'}, got {text}")
            return values[text.lower()] if words else True

        return PrimitiveConstructorSpec(
            nargs="*" if is_flag else 1,
            metavar="{true,false}" if is_flag else "none",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, info.type),
            str_from_instance=lambda value: [str(value).lower()],
        )


def _add_value_rule(registry: ConstructorRegistry, *, keeps_text: bool) -> None:
    """Adds the rule of words that do not have the type of their option: text for a later check, or a mistake."""

    def value(info: Any) -> Any:
        own = registry.get_primitive_spec(info)
        if not isinstance(own, PrimitiveConstructorSpec):
            return own

        def read(words: list[str]) -> Any:
            try:
                return own.instance_from_str(words)
            except ValueError as error:
                if not keeps_text:
                    raise ValueError(f"expected {own.metavar}, got {' '.join(words)}") from error
                return words[0] if len(words) == 1 else words

        return dataclasses.replace(own, instance_from_str=read)

    registry.primitive_rule(_over_own(value))


@contextlib.contextmanager
def _one_line_errors(prefix: str = "") -> Iterator[None]:
    """Turns a mistake that tyro prints as a box into a ConfigError of one line, which begins with ``prefix``."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as error:
        if error.code in (0, None):
            raise
        raise ConfigError(prefix + _one_line(printed.getvalue())) from None
    except ValueError as error:  # a check of the dataclass
        raise ConfigError(f"{prefix}{error}") from error


def _one_line(box: str) -> str:
    """Returns the message in a box that tyro printed, without the heading and the hint at ``--help``."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    text = "\n".join("" if set(line) <= {"─", "-"} else line or " " for line in lines)
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n")]
    paragraphs = paragraphs if "╭" in box else paragraphs[1:]  # without the box's characters, the heading is one
    message = re.sub(r"^Error parsing (\S+):", r"\1:", paragraphs[0])
    similar = re.search(r"(?:Perhaps you meant|Similar arguments).*?(--[\w.-]+)", " ".join(paragraphs[1:]))
    return f"{message}; did you mean {similar[1]}?" if similar else message
