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

_BOOLEANS = {"true": True, "false": False}
_NOTHING = {"none", "null", "~"}


def parse_arguments(root: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Builds a program's dataclass of arguments from the words of its command line.

    ``--help`` prints the options and leaves with status 0.

    Args:
      root: The dataclass; its positional fields have the type ``tyro.conf.Positional``.
      argv: The words of the command line.
      prog: The words by which the program is called, for ``--help``.
      description: The text of ``--help`` above the options.

    Raises:
      ConfigError: A word is no option of the program, or a value has the wrong type.
      SystemExit: The words ask for ``--help``.
    """
    registry = ConstructorRegistry()
    _add_section_rule(registry, None, None)
    _add_value_rule(registry, keeps_text=False)
    with _one_line_errors():
        return tyro.cli(root, args=list(argv), prog=prog, description=description, registry=registry)


def read_options(root: type, default: Any, words: Sequence[str], prog: str) -> tuple[dict[str, Any], list[str]]:
    """Reads options ``--a.b value`` over the defaults, without any check of the values.

    Names may have ``-`` or ``_`` inside. A bare ``--a.flag`` means true, ``none`` empties an optional value, and of a
    repeated option the last one counts. A word that does not have the type of its option stays text.

    Args:
      root: The dataclass whose nested fields are the options.
      default: An instance with the default values, whose ``__post_init__`` need not have run.
      words: The words of the command line.
      prog: The words by which the program is called.

    Returns:
      The values of all fields, as nested dictionaries, and the words that are no options.

    Raises:
      ConfigError: An option lacks its value, or has one that is not among its choices.
    """
    registry = ConstructorRegistry()
    _add_section_rule(registry, None, dict)
    _add_yaml_rules(registry)
    _add_value_rule(registry, keeps_text=True)
    with _one_line_errors("command line: "):
        values, unknown = tyro.cli(
            root,
            args=list(words),
            prog=prog,
            default=default,
            config=(tyro.conf.FlagConversionOff,),
            registry=registry,
            return_unknown_args=True,
        )
    return dict(values), unknown


def print_help(root: type, default: Any, prog: str, description: str, shown: Collection[str] | None = None) -> None:
    """Prints the options with their defaults, and leaves with status 0.

    Args:
      root: The dataclass whose nested fields are the options.
      default: An instance with the default values.
      prog: The words by which the program is called.
      description: The text above the options.
      shown: The dotted names of the options to print; None: all of them.
    """
    registry = ConstructorRegistry()
    _add_section_rule(registry, None if shown is None else _fields_shown(root, shown), None)
    _add_yaml_rules(registry)
    tyro.cli(
        root,
        prog=f"{prog} [CONFIG.yaml]",
        description=description,
        args=["--help"],
        default=default,
        config=(tyro.conf.FlagConversionOff,),
        registry=registry,
    )


def field_texts(root: type, default: Any) -> dict[tuple[Any, str], str]:
    """Returns the documentation of each field below a dataclass, by (dataclass that holds it, field's name).

    Args:
      root: The dataclass.
      default: An instance of it.
    """
    found: dict[tuple[Any, str], str] = {}
    registry = ConstructorRegistry()
    _add_section_rule(registry, None, dict, found)
    tyro.cli(root, args=[], default=default, registry=registry)
    return found


def _fields_shown(root: type, shown: Collection[str]) -> dict[Any, set[str]]:
    """Returns the names of the fields to print, by the dataclass that holds them."""
    hints = get_type_hints(root)
    found: dict[Any, set[str]] = {root: {name.partition(".")[0] for name in shown} & set(hints)}
    for name in found[root]:
        if dataclasses.is_dataclass(hints[name]):
            below = [one.removeprefix(f"{name}.") for one in shown if one.startswith(f"{name}.")]
            found |= _fields_shown(hints[name], below)
    return found


def _add_section_rule(
    registry: ConstructorRegistry,
    shown: dict[Any, set[str]] | None,
    make: Callable[..., Any] | None,
    texts: dict[tuple[Any, str], str] | None = None,
) -> None:
    """Adds the rule of dataclasses: tyro's own one with changes.

    The help of a field is one paragraph, without the line breaks of the source. Only the fields ``shown`` are kept
    where that is given, ``make`` takes the place of the dataclass, and ``texts`` receives the help of each field.
    """
    is_asking = False

    @registry.struct_rule
    def section(info: Any) -> Any:
        nonlocal is_asking
        if is_asking:
            return None
        is_asking = True
        own = registry.get_struct_spec(info)
        is_asking = False
        kind = info.type
        if not isinstance(own, StructConstructorSpec) or not dataclasses.is_dataclass(kind):
            return own
        kept = [one for one in own.fields if shown is None or one.name in shown.get(kind, ())]
        helps = [(one.helptext() if callable(one.helptext) else one.helptext) or "" for one in kept]
        helps = [" ".join(text.split()) for text in helps]
        fields = tuple(dataclasses.replace(one, helptext=text) for one, text in zip(kept, helps, strict=True))
        if texts is not None:
            texts.update({(kind, one.name): text for one, text in zip(fields, helps, strict=True)})
        return dataclasses.replace(own, fields=fields, instantiate=make or own.instantiate)


def _add_yaml_rules(registry: ConstructorRegistry) -> None:
    """Adds the rules of booleans and of nothing, which are written as in YAML: true, false, none."""

    @registry.primitive_rule
    def boolean(info: Any) -> PrimitiveConstructorSpec[bool] | None:
        if info.type is not bool:
            return None

        def read(words: list[str]) -> bool:
            if len(words) > 1 or (words and words[0].lower() not in _BOOLEANS):
                raise ValueError(f"expected true or false, got {' '.join(words)}")
            return _BOOLEANS[words[0].lower()] if words else True

        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="{true,false}",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [str(value).lower()],
        )

    @registry.primitive_rule
    def nothing(info: Any) -> PrimitiveConstructorSpec[None] | None:
        if info.type is not NoneType:
            return None

        def read(words: list[str]) -> None:
            if words[0].lower() not in _NOTHING:
                raise ValueError(f"expected none, got {words[0]}")

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="none",
            instance_from_str=read,
            is_instance=lambda value: value is None,
            str_from_instance=lambda value: ["none"],
        )


def _add_value_rule(registry: ConstructorRegistry, *, keeps_text: bool) -> None:
    """Adds the rule of words that do not have the type of their option.

    Args:
      registry: The registry of rules.
      keeps_text: Whether such words stay text, for a check of the whole configuration to refuse; otherwise they are
        refused here.
    """
    is_asking = False

    @registry.primitive_rule
    def value(info: Any) -> Any:
        nonlocal is_asking
        if is_asking:
            return None
        is_asking = True
        own = registry.get_primitive_spec(info)
        is_asking = False
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


@contextlib.contextmanager
def _one_line_errors(prefix: str = "") -> Iterator[None]:
    """Within it, a mistake that tyro prints as a box is raised as a ConfigError of one line, after the prefix."""
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
