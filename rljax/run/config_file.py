"""Reads a configuration: a tree of frozen dataclasses filled from defaults, then a YAML file, then the command line.

``tyro`` splits the command line and draws ``--help``, PyYAML reads the file, and pydantic checks the merged values and
builds the dataclasses, so that a mistake gives the same single line wherever it was written. ``__post_init__`` runs on
the merged values only: a file may be valid only together with an option of the command line. ``base: OTHER.yaml`` in a
file, relative to it, names another file whose values it overrides. Every field of the dataclasses has a default.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import pydantic
import tyro
import yaml
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructTypeInfo,
)

from rljax.errors import ConfigError

T = TypeVar("T")
Names = tuple[str, ...]  # the keys that lead from the root to a value
Places = dict[Names, str]  # where a value was written: "FILE:LINE" or "command line"

COMMAND_LINE = "command line"
BASE = "base"
MAX_SHOWN = 80  # characters of a value quoted in an error
SIMILAR = 0.7  # how much a known key must resemble an unknown one to be suggested (1: equal)


def load_config(root: type[T], argv: Sequence[str], *, prog: str, description: str, example: str | None = None) -> T:
    """Builds ``root`` from ``[CONFIG.yaml] [--a.b value ...]``; precedence default < YAML < command line.

    Options take ``--a.b value`` or ``--a.b=value``, with ``-`` or ``_`` inside names; a bare ``--a.flag`` means true, a
    tuple takes the words up to the next option, ``None`` empties an optional value, and of a repeated option the last
    counts. A word is read as in YAML where its option takes such a value, otherwise as text. ``--help`` prints every
    option, with the file's values as defaults, and leaves with status 0.

    Args:
      root: the dataclass.
      argv: the words of the command line.
      prog: how the program is called, for ``--help``.
      description: what the program does, for ``--help``.
      example: a configuration file to suggest when none is given; None: the file is optional.

    Raises:
      ConfigError: anything wrong with the arguments, the file or the values.
      SystemExit: ``--help``.
    """
    file, options = (None, argv) if not argv or argv[0].startswith("-") else (argv[0], argv[1:])
    if file is None and example is not None and not {"-h", "--help"} & set(options):
        raise ConfigError(f"give a configuration first, as in: {prog} {example} (--help lists the options)")
    checker, defaults = pydantic.TypeAdapter(root), dataclasses.asdict(root())  # type: ignore[call-overload]
    values, places = (defaults, {}) if file is None else _read_yaml(Path(file), BASE not in defaults)
    values = _laid_over(defaults, values)
    try:
        _validate(checker, values)
    except pydantic.ValidationError as error:
        wrong = [one for one in error.errors() if one["type"] != "value_error"]  # the options may yet mend those
        if wrong:
            _refuse(wrong, defaults, values, places)
    for names, value in _read_options(root, options, values, prog, description):
        _at(values, names[:-1])[names[-1]] = value
        places[names] = COMMAND_LINE
    try:
        return _validate(checker, values)
    except pydantic.ValidationError as error:
        _refuse(error.errors(), defaults, values, places)


def config_to_yaml(config: Any) -> str:
    """The configuration, defaults included, as YAML that ``load_config`` reads back to an equal value."""
    values = dataclasses.asdict(config)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110)


# --- values -----------------------------------------------------------------------------------------------------------


def _validate(checker: pydantic.TypeAdapter[T], value: Any) -> T:
    """``value`` as the checker's type. Strict JSON: a list is a tuple and an int a float, and nothing else is taken."""
    return checker.validate_json(json.dumps(value), strict=True, extra="forbid")


def _laid_over(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``values`` in its place, section by section."""
    merged = dict(base)
    for key, value in values.items():
        below = base.get(key)
        merged[key] = _laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _at(values: dict[str, Any], names: Names) -> Any:
    """The value that the names lead to."""
    return functools.reduce(dict.__getitem__, names, values)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def _refuse(errors: Sequence[Any], defaults: dict[str, Any], values: dict[str, Any], places: Places) -> NoReturn:
    """Says the first mistake in one line: where it was written, the dotted path, what is wrong."""
    first, names = errors[0], _names(errors[0]["loc"], values)
    path, shown = ".".join(names), _show(first["input"])
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        field = reason.split(" ")[0]
        if field in _at(defaults, names):  # checks open with the name of the field
            names, path = (*names, field), f"{path}." if path else ""
        else:
            path = f"{path}: " if path else ""
        message = f"{path}{reason}"
    elif first["type"] == "unexpected_keyword_argument":
        message = f"unknown key {path}; {_suggest(path, defaults)}"
    elif first["type"] == "dataclass_type":
        message = f"{path}: expected a mapping with the keys {', '.join(_at(defaults, names))}, got {shown}"
    elif first["type"] in ("missing", "too_long"):  # of a tuple: the fields themselves all have defaults
        message = f"{path}: expected {len(_at(defaults, names))} items, got {shown}"
    else:  # a union gives one error for each type that it allows
        allowed = [error["msg"] for error in errors if _names(error["loc"], values) == names]
        expected = " or ".join(dict.fromkeys(message.removeprefix("Input should be ") for message in allowed))
        message = f"{path}: expected {expected}, got {shown}"
    raise ConfigError(f"{places[names]}: {message}" if names in places else message)


def _names(location: Sequence[str | int], values: Any) -> Names:
    """The part of pydantic's location that names keys; indices of lists and members of unions follow it."""
    names: list[str] = []
    for part in location:
        if not isinstance(values, dict) or part not in values:
            break
        names.append(str(part))
        values = values[part]
    return tuple(names)


def _suggest(path: str, defaults: dict[str, Any]) -> str:
    """Ends the line about an unknown key with the known one most like it, or with its section's keys."""
    section, _, name = path.rpartition(".")
    known = list(_dotted(defaults))

    def likeness(key: str) -> float:
        key_section, _, last = key.rpartition(".")
        initials = "".join(word[:1] for word in last.split("_"))
        like = 1.0 if name == initials else difflib.SequenceMatcher(None, name, last).ratio()
        return like + 0.1 * (like >= SIMILAR and key_section == section)

    best = max(known, key=likeness)
    if likeness(best) >= SIMILAR:
        return f"did you mean {best}?"
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    return f"known keys: {', '.join(siblings or defaults)}"


def _dotted(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted path of every key, sections included."""
    for key, value in values.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")


def _show(value: Any) -> str:
    text = "nothing" if value == [] else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# --- the command line -------------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """What the command line gives for an option: tyro's results hold it beside the defaults of the other options."""

    value: Any


def _read_options(
    root: type, words: Sequence[str], values: dict[str, Any], prog: str, description: str
) -> list[tuple[Names, Any]]:
    """What the words give, as (names, plain value); a value that its option does not take stays words."""
    parsed, unknown = tyro.cli(
        root,
        prog=f"{prog} [CONFIG.yaml]",
        description=description,
        args=words,
        default=_unchecked(root(), values),
        return_unknown_args=True,
        config=(tyro.conf.FlagConversionOff,),
        registry=_registry(),
    )
    if not unknown:
        return list(_given(parsed))
    option = next((word for word in unknown if word.startswith("--")), None)
    if option is None:
        raise ConfigError(f"{COMMAND_LINE}: unexpected argument {unknown[0]!r}")
    name = option[2:].partition("=")[0]
    path = name.replace("-", "_")
    if any(key.startswith(f"{path}.") for key in _dotted(values)):
        raise ConfigError(f"{COMMAND_LINE}: {path} is a section: set its keys, as in --{name}.KEY VALUE")
    raise ConfigError(f"{COMMAND_LINE}: unknown key {path}; {_suggest(path, values)}")


def _registry() -> ConstructorRegistry:
    """Rules by which tyro gives plain dictionaries, unchecked, in which what was given is marked ``_Given``."""
    registry, asking = ConstructorRegistry(), False

    def by_tyro(question: Callable[[Any], Any], info: Any) -> Any:
        nonlocal asking
        asking = True  # the rules below leave this question to tyro's own
        answer = question(info)
        asking = False
        return answer

    @registry.struct_rule
    def section(info: StructTypeInfo) -> StructConstructorSpec | None:
        if asking or not dataclasses.is_dataclass(info.type):
            return None
        own = by_tyro(ConstructorRegistry.get_struct_spec, info)
        fields = [dataclasses.replace(one, helptext=_unwrapped(one.helptext)) for one in own.fields]
        return StructConstructorSpec(instantiate=dict, fields=tuple(fields))

    @registry.primitive_rule
    def value(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if asking or dataclasses.is_dataclass(info.type):
            return None
        own = by_tyro(ConstructorRegistry.get_primitive_spec, info)
        if not isinstance(own, PrimitiveConstructorSpec):
            return None
        reader = functools.partial(_read_words, info.type)
        return dataclasses.replace(own, nargs="*", instance_from_str=reader, choices=None)

    return registry


def _unwrapped(documentation: str | Callable[[], str | None] | None) -> Callable[[], str]:
    """A field's documentation without the line breaks of the source."""
    return lambda: " ".join(((documentation() if callable(documentation) else documentation) or "").split())


def _read_words(annotation: Any, words: list[str]) -> _Given:
    """The words as the first of these that the type takes: YAML values, text, a single one of either."""
    checker: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
    scalars = [_read_scalar(word) for word in words]
    for plain in [scalars, words, *(scalars + words if len(words) == 1 else []), *([] if words else [True])]:
        try:
            _validate(checker, plain)
        except pydantic.ValidationError:
            continue
        return _Given(plain)
    return _Given(words[0] if len(words) == 1 else words)


def _read_scalar(word: str) -> Any:
    """The word as a plain scalar of YAML; Python's None is null, too."""
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, word, (True, False))
    return None if word.lower() == "none" else loader.construct_object(yaml.ScalarNode(tag, word))


def _given(parsed: dict[str, Any], names: Names = ()) -> Iterator[tuple[Names, Any]]:
    for key, value in parsed.items():
        if isinstance(value, dict):
            yield from _given(value, (*names, key))
        elif isinstance(value, _Given):
            yield (*names, key), value.value


def _unchecked(template: Any, values: dict[str, Any]) -> Any:
    """A copy of a dataclass instance with these values, whose ``__post_init__`` did not run: tyro's defaults."""
    made = copy.copy(template)
    for name, value in values.items():
        plain = tuple(value) if isinstance(value, list) else value
        object.__setattr__(made, name, _unchecked(getattr(made, name), value) if isinstance(value, dict) else plain)
    return made


# --- the file ---------------------------------------------------------------------------------------------------------


def _read_yaml(file: Path, may_have_base: bool, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Places]:
    """The values of a file over those of its base, and where each key stands; ``above`` are the files that led here."""
    places: Places = {}
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=_Loader)
        _find_keys(node, file, (), places)
        values = None if node is None else json.loads(json.dumps(_Loader("").construct_document(node), default=str))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        raise ConfigError(f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {problem}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # text that is not UTF-8, a number that is none, a value inside itself
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping, got {'an empty file' if values is None else _show(values)}")
    if not may_have_base or BASE not in values:
        return values, places
    name, where = values.pop(BASE), places[BASE,]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: {BASE}: expected the name of a file, got {_show(name)}")
    base, chain = file.parent / name, (*above, file.resolve())
    if base.resolve() in chain:
        raise ConfigError(f"{where}: {BASE}: {base} leads back to itself")
    if not base.is_file():
        raise ConfigError(f"{where}: {BASE}: {base} does not exist")
    below, its_places = _read_yaml(base, may_have_base, chain)
    return _laid_over(below, values), its_places | places


def _find_keys(node: yaml.Node | None, file: Path, names: Names, places: Places) -> None:
    """Adds where each key of a mapping stands. Raises YAMLError for a key that stands there twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        inner = (*names, str(key.value))
        if inner in places:
            raise yaml.MarkedYAMLError(problem=f"duplicate key {'.'.join(inner)}", problem_mark=key.start_mark)
        places[inner] = f"{file}:{key.start_mark.line + 1}"
        _find_keys(value, file, inner, places)


# Which plain scalars are more than strings: the core schema of YAML 1.2.
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_RESOLVERS = {None: [(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{form})\\Z")) for name, form in _SCALARS.items()]}


class _Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does: 1e-4 is a number; yes, off, 010, dates and 1:30 are strings."""

    yaml_implicit_resolvers = _RESOLVERS


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the strings that _Loader would read as something else."""

    yaml_implicit_resolvers = _RESOLVERS
