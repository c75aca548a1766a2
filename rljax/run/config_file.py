"""Reads a configuration: a tree of frozen dataclasses filled from defaults, then a YAML file, then the command line.

Both sources go through one strict reader, so a wrong key, type or choice gives the same single line wherever it was
written, and ``__post_init__`` runs on the merged values only: a file that is complete only together with an option of
the command line is fine. ``base: OTHER.yaml`` in a file, relative to it, is another file that it is laid over.
``tyro`` draws ``--help`` from the same dataclasses, with the file's values as defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro
import yaml

from rljax.errors import ConfigError
from rljax.run.config_values import Mismatch, Word, check_supported, convert, describe, shorten, takes_list

T = TypeVar("T")

_MISSING = object()
_COMMAND_LINE = "command line"
_BASE = "base"


# --- what a program calls ---------------------------------------------------------------------------------------------


def load_config(root: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Builds ``root`` from ``[CONFIG.yaml] [--a.b value ...]``; precedence default < YAML < command line.

    Options take ``--a.b value`` or ``--a.b=value``, with ``-`` or ``_`` inside names; a bare ``--a.flag`` means true, a
    tuple takes the words up to the next option (or ``--a.b=x,y``), ``None`` empties an optional value, and of a
    repeated option the last counts. ``--help`` prints every option and leaves with status 0.

    Raises:
      ConfigError: anything wrong with the arguments, the file or the values.
      SystemExit: ``--help``.
    """
    if "--help" in argv or "-h" in argv:
        _print_help(root, argv, prog, description)
    file, options = _read_arguments(root, argv)
    values = _read_yaml(root, file) if file is not None else {}
    for path, value in options:
        _set_nested(values, path, value)
    return _build(root, values, _MISSING, "")


def config_to_yaml(config: Any) -> str:
    """The whole configuration, defaults included, as YAML that ``load_config`` reads back to an equal value."""
    return yaml.dump(_to_plain(config), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110)


# --- the dataclasses --------------------------------------------------------------------------------------------------


def _field_types(section: type) -> dict[str, Any]:
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _leaves(section: type, prefix: str = "") -> dict[str, Any]:
    """Dotted path -> type of every value under ``section``."""
    found: dict[str, Any] = {}
    for name, annotation in _field_types(section).items():
        if _is_section(annotation):
            found |= _leaves(annotation, f"{prefix}{name}.")
        else:
            check_supported(annotation, prefix + name)
            found[prefix + name] = annotation
    return found


def _set_nested(values: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value


def _build(section: type, values: dict[str, Any], base: Any, path: str) -> Any:
    """``section`` with ``values`` laid over ``base`` (an instance, or _MISSING for the class's own defaults)."""
    if base is not _MISSING and not values:
        return base
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        if not field.init:
            continue
        annotation, child = _field_types(section)[field.name], _join(path, field.name)
        default = _default_of(field) if base is _MISSING else getattr(base, field.name)
        if _is_section(annotation):
            arguments[field.name] = _build(annotation, values.get(field.name, {}), default, child)
        elif field.name in values or default is not _MISSING:
            arguments[field.name] = values.get(field.name, default)
        else:
            option = child.replace("_", "-")
            raise ConfigError(f"{child}: missing, expected {describe(annotation)} (in the file or as --{option})")
    try:
        return section(**arguments)
    except ValueError as error:
        # Checks open with the field's name: then its dotted path is the start of the line.
        names_a_field = str(error).split(" ")[0] in arguments
        raise ConfigError(f"{path}{'.' if names_a_field else ': '}{error}" if path else error) from error


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return _MISSING if field.default_factory is dataclasses.MISSING else field.default_factory()


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    return [_to_plain(item) for item in value] if isinstance(value, tuple) else value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- errors -----------------------------------------------------------------------------------------------------------


def _convert_or_say(annotation: Any, value: Any, where: str, path: str, shown: str) -> Any:
    try:
        return convert(annotation, value)
    except Mismatch:
        raise ConfigError(f"{where}: {path}: expected {describe(annotation)}, got {shorten(shown)}") from None


def _refuse_key(root: type, path: str, where: str, shown: str) -> NoReturn:
    leaves = list(_leaves(root))
    section, _, name = path.rpartition(".")
    within = [leaf for leaf in leaves if leaf.rpartition(".")[0] == section]
    siblings = within if section and within else list(_field_types(root))
    close = [
        *_alike(name, siblings, cutoff=0.7),
        *_alike(name, leaves, cutoff=1.0),
        *(leaf for leaf in [*siblings, *leaves] if "".join(word[0] for word in _last(leaf).split("_")) == name),
        *_alike(name, leaves, cutoff=0.75),
    ]
    hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(siblings)}"
    raise ConfigError(f"{where}: unknown key {path} (value {shorten(shown)}); {hint}")


def _alike(name: str, paths: Sequence[str], *, cutoff: float) -> list[str]:
    """The paths whose last part is most like ``name``, best first."""
    names = difflib.get_close_matches(name, [_last(path) for path in paths], cutoff=cutoff)
    return sorted((path for path in paths if _last(path) in names), key=lambda path: names.index(_last(path)))


def _last(path: str) -> str:
    return path.rpartition(".")[2]


# --- the command line -------------------------------------------------------------------------------------------------


def _read_arguments(root: type, argv: Sequence[str]) -> tuple[str | None, list[tuple[str, Any]]]:
    """The configuration file, if one is named, and the options in order as (dotted path, value)."""
    leaves, file, options, words = _leaves(root), None, [], list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if file is not None:
                raise ConfigError(f"{_COMMAND_LINE}: unexpected argument {word!r} after the configuration {file!r}")
            file = word
            continue
        name, equals, text = word[2:].partition("=")
        path = name.replace("-", "_")
        annotation = leaves.get(path)
        many = takes_list(annotation)
        attached = text.split(",") if many else [text]
        given = attached if equals else _take_words(annotation, words)
        shown = repr(" ".join(given))
        if annotation is None:
            if any(leaf.startswith(path + ".") for leaf in leaves):
                raise ConfigError(f"{_COMMAND_LINE}: {path} is a section: set its keys, as in --{name}.KEY VALUE")
            _refuse_key(root, path, _COMMAND_LINE, shown)
        value = [Word(item) for item in given]
        if not value and not many:
            raise ConfigError(f"{_COMMAND_LINE}: {path}: expected {describe(annotation)}, got nothing")
        read = _convert_or_say(annotation, value if many else value[0], _COMMAND_LINE, path, shown)
        options.append((path, read))
    return file, options


def _take_words(annotation: Any, words: list[str]) -> list[str]:
    """Removes from the front of ``words`` those that belong to an option of this type."""
    taken: list[str] = []
    while words and not words[0].startswith("--") and (takes_list(annotation) or not taken):
        if annotation is bool and words[0].lower() not in ("true", "false"):
            break
        taken.append(words.pop(0))
    return ["true"] if annotation is bool and not taken else taken


def _print_help(root: type, argv: Sequence[str], prog: str, description: str) -> NoReturn:
    rest = [word for word in argv if word not in ("--help", "-h")]
    defaults: dict[str, Any] = {}
    with suppress(ConfigError):  # whoever cannot get the configuration right is shown the classes' own defaults
        defaults["default"] = load_config(root, rest, prog=prog, description=description)
    tyro.cli(
        root,
        prog=f"{prog} [CONFIG.yaml]",
        description=description,
        args=["--help"],
        config=(tyro.conf.FlagConversionOff,),
        **defaults,
    )
    raise SystemExit(0)


# --- the file ---------------------------------------------------------------------------------------------------------


def _read_yaml(root: type, file: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a file, laid over those of its base; ``above`` are the files that lead to this one."""
    node = _compose(root, file)
    base = None if _BASE in _field_types(root) else _take_base(node, file)
    values = _read_section(root, root, node, file, "")
    if base is None:
        return values
    where, path = base
    chain = (*above, Path(file).resolve())
    if path.resolve() in chain:
        raise ConfigError(f"{where}: {_BASE}: {path} leads back to itself")
    if not path.is_file():
        raise ConfigError(f"{where}: {_BASE}: {path} does not exist")
    return _laid_over(_read_yaml(root, str(path), chain), values)


def _take_base(node: yaml.Node, file: str) -> tuple[str, Path] | None:
    """Removes ``base`` from a file's mapping; returns where it stands and the file that it names."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    for key, value in pairs:
        if key.value == _BASE:
            if value.tag != "tag:yaml.org,2002:str" or not value.value:
                raise ConfigError(f"{_at(file, key)}: {_BASE}: expected the name of a file, got {_show(value)}")
            pairs.remove((key, value))
            return _at(file, key), Path(file).parent / value.value
    return None


def _laid_over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``values`` in its place, section by section."""
    merged = dict(base)
    for key, value in values.items():
        merged[key] = _laid_over(base.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def _compose(root: type, file: str) -> yaml.Node:
    try:
        node: yaml.Node | None = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        raise ConfigError(f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {problem}") from error
    if node is None:
        raise ConfigError(
            f"{file}: expected a mapping with the keys {', '.join(_field_types(root))}, got an empty file"
        )
    return node


def _read_section(root: type, section: type, node: yaml.Node, file: str, path: str) -> dict[str, Any]:
    annotations = _field_types(section)
    if not isinstance(node, yaml.MappingNode):
        prefix = f"{path}: " if path else ""
        known = ", ".join(annotations)
        raise ConfigError(f"{_at(file, node)}: {prefix}expected a mapping with the keys {known}, got {_show(node)}")
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, where = str(key_node.value), _at(file, key_node)
        child = _join(path, key)
        if key in lines:
            raise ConfigError(f"{where}: duplicate key {child} (value {_show(value_node)}), first on line {lines[key]}")
        if key not in annotations or not isinstance(key_node, yaml.ScalarNode):
            _refuse_key(root, child, where, _show(value_node))
        lines[key] = key_node.start_mark.line + 1
        if _is_section(annotations[key]):
            values[key] = _read_section(root, annotations[key], value_node, file, child)
        else:
            check_supported(annotations[key], child)
            value = _plain_value(value_node, where, child)
            values[key] = _convert_or_say(annotations[key], value, where, child, _show(value_node))
    return values


def _plain_value(node: yaml.Node, where: str, path: str) -> Any:
    """A scalar, or a list of what its items are; anything else stays a node, which no type accepts."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain_value(item, where, path) if isinstance(item, yaml.ScalarNode) else item for item in node.value]
    if not isinstance(node, yaml.ScalarNode):
        return node
    try:
        return _Loader("").construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: {path}: cannot read {shorten(node.value)!r} as {node.tag}: {error}") from error


def _at(file: str, node: yaml.Node) -> str:
    return f"{file}:{node.start_mark.line + 1}"


def _show(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(_show(item) if isinstance(item, yaml.ScalarNode) else '...' for item in node.value)}]"
    if node.tag == "tag:yaml.org,2002:null":
        return "null"
    return repr(node.value) if node.tag == "tag:yaml.org,2002:str" else node.value


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Which plain scalars are more than strings, by first character: the core schema of YAML 1.2."""
    digits, sign = "0123456789", "-+"
    table = (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)", list(sign + digits)),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?", list(sign + digits + ".")),
        ("float", r"[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list(sign + digits + ".")),
    )
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, pattern, first_characters in table:
        for first in first_characters:
            resolvers.setdefault(first, []).append((f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})\\Z")))
    return resolvers


class _Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does: 1e-4 is a number; yes, off, 010, dates and 1:30 are strings."""

    yaml_implicit_resolvers = _resolvers()
    yaml_constructors: typing.ClassVar[dict[Any, Any]] = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:int": lambda loader, node: int(loader.construct_scalar(node)),
    }


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the strings that _Loader would read as something else."""

    yaml_implicit_resolvers = _resolvers()
