"""Builds a configuration, a tree of frozen dataclasses, from its defaults, a YAML file and the command line.

PyYAML reads the file, and pydantic checks each value. A mistake gives the same message in a file and in an option.
Scalars are read as in YAML 1.2. The line ``base: OTHER.yaml`` in a file names another file, relative to its folder,
whose values it overrides. ``__post_init__`` runs on the merged values only: a file may be valid only together with an
option. Every field of the dataclasses has a default. The class attribute ``removed_keys`` has the removed keys that a
file may still hold, each with its default and a remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args

import pydantic
import yaml

from rljax.errors import ConfigError
from rljax.policy.hub import CONFIGS, packaged
from rljax.run.options import HELP, Option, help_text, options_of, read_options

T = TypeVar("T")

COMMAND_LINE = "command line"
ALL = "all"
SIMILAR = 0.7  # the least likeness of a known key to an unknown one for which it is suggested (1: equal)
BASE = "base"
MAX_SHOWN = 80  # the longest value quoted in an error (characters)


class Setting(NamedTuple):
    """A value that a file or an option gives to a key."""

    value: Any  # the value, of the type of the field; None for a section
    place: str  # FILE:LINE, or ``command line``


Settings = dict[str, Setting]
"""The settings by dotted key."""


class KnownKeys(NamedTuple):
    """The keys of a configuration, dotted."""

    defaults: dict[str, Any]  # the default of each key, sections included
    options: dict[str, Option]  # the option of each key that is not a section
    removed: Mapping[str, tuple[Any, str]]  # the keys that were removed: the default, and what a user does instead


def load_config(
    root: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    example: str | None = None,
    common: Collection[str] | None = None,
) -> T:
    """Builds a ``root`` from ``[CONFIG.yaml] [--a.b value ...]``. Options override the file, and the file the defaults.

    ``--help`` prints the options, with the file's values as defaults, and leaves with status 0.

    Args:
      prog: The words by which the program is called, for ``--help``.
      description: The text of ``--help`` above the options.
      example: A configuration to suggest when none is given; None: the file is optional.
      common: The dotted names of the options that ``--help`` prints; ``--help all`` prints the rest, too. None: all.

    Raises:
      ConfigError: Anything is wrong with the arguments, the file or the values.
      SystemExit: The words ask for ``--help``.
    """
    words, file = list(argv), None
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # the form in which Python hands over other bytes
            raise ConfigError(f"{COMMAND_LINE}: {shown(word)} is not UTF-8 text")
    if words and not words[0].startswith("-"):
        file = words.pop(0)
    if HELP & set(argv):
        keys = _keys_of(root)
        values = keys.defaults | {key: one.value for key, one in _read_file(keys, file).items()}
        if common is not None and ALL not in words:
            count = len(keys.options)
            description += f"\n\nThese are the {len(common)} options that most runs set. --help all prints all {count}."
        chosen = None if ALL in words else common
        print(f"usage: {prog} [CONFIG.yaml] [--a.b VALUE ...]\n\n{description.strip()}\n\noptions:")
        print(help_text(root, values, chosen))
        raise SystemExit(0)
    if file is None and example is not None:
        raise ConfigError(f"give a configuration first, as in: {prog} {example} (--help lists the options)")
    return resolve(root, file, words)


def resolve(root: type[T], file: str | None, words: Sequence[str] = ()) -> T:
    """Builds a ``root`` from a file and the options ``--a.b value``. ``file`` is a name for ``find_config``, or None.

    Raises ConfigError if the file, an option or a value is wrong.
    """
    keys = _keys_of(root)
    settings = _read_file(keys, file)
    found, others = read_options(root, words)
    if others:
        _refuse_word(others[0], keys)
    settings |= {key: _checked(key, value, keys.options[key], COMMAND_LINE) for key, value in found.items()}
    return _built(root(), settings)


def find_config(name: str) -> Path:
    """Returns the path of this name, or else the packaged configuration of this name. Raises ConfigError if none."""
    if os.path.isfile(name):
        return Path(name)
    inside = packaged(name)
    if inside is not None and inside.is_file():
        return inside
    if os.path.exists(name):
        return Path(name)  # a directory or a pipe: its reader reports the mistake
    names = [str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("**/*.yaml")]
    similar = difflib.get_close_matches(name.removeprefix("configs/").removesuffix(".yaml"), names, n=1)
    advice = f"; did you mean {similar[0]}?" if similar else ""
    raise ConfigError(f"{name}: No such file or directory{advice}" if name else "the name of a file is empty")


def config_to_yaml(config: Any) -> str:
    """Returns a configuration, defaults included, as YAML that ``load_config`` reads back to an equal value."""
    values = dataclasses.asdict(config)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110)


def suggest(path: str, known: Collection[str]) -> str:
    """Returns the end of a line about an unknown key: the known key most like it, or the keys of its section.

    All keys are dotted paths, and the known ones include sections.
    """
    section, _, name = path.rpartition(".")

    def likeness(key: str) -> float:
        key_section, _, last = key.rpartition(".")
        initials = "".join(word[:1] for word in last.split("_"))
        like = 1.0 if name == initials else difflib.SequenceMatcher(None, name, last).ratio()
        return like + 0.1 * (like >= SIMILAR and key_section == section)

    best = max(known, key=likeness)
    if likeness(best) >= SIMILAR:
        return f"did you mean {best}?"
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    return f"known keys: {', '.join(siblings or [key for key in known if '.' not in key])}"


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, value) of every key of nested settings, sections included."""
    for key, value in values.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")


def shown(value: Any) -> str:
    """Returns a value as an error quotes it: JSON of at most ``MAX_SHOWN`` characters."""
    text = "nothing" if value == [] else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _keys_of(root: type) -> KnownKeys:
    return KnownKeys(dict(dotted(dataclasses.asdict(root()))), options_of(root), getattr(root, "removed_keys", {}))


def _read_file(keys: KnownKeys, name: str | None) -> Settings:
    """Returns the settings of a file; {} without one. Raises ConfigError for wrong keys and types.

    The checks of ``__post_init__`` come later, because an option may mend a value.
    """
    return {} if name is None else dict(_of_file(keys, find_config(name)))


def _of_file(keys: KnownKeys, file: Path, above: tuple[Path, ...] = ()) -> Iterator[tuple[str, Setting]]:
    """Yields the settings of the base of a file, and then its own. The files ``above`` have it as their base."""
    places: dict[str, str] = defaultdict(lambda: str(file))
    document = read_document(file, places)
    if not isinstance(document, dict):
        got = "an empty file" if document is None else shown(document)
        raise ConfigError(f"{file}: expected a mapping, got {got}")
    if BASE in document:
        base = _find_base(document.pop(BASE), places[BASE], file, above)
        yield from _of_file(keys, base, (*above, file.resolve()))
    for key, value in dotted(document):
        place = places[key]
        if key in keys.options:
            yield key, _checked(key, value, keys.options[key], place)
        elif key in keys.removed:
            default, remedy = keys.removed[key]
            if value != default:
                got = f"{key} was removed with the default {shown(default)}, got {shown(value)}"
                raise ConfigError(f"{place}: {got}: {remedy}; delete this key")
        elif isinstance(value, dict) and any(one.startswith(f"{key}.") for one in (*keys.options, *keys.removed)):
            yield key, Setting(None, place)
        elif key in keys.defaults:
            expected = f"a mapping with the keys {', '.join(keys.defaults[key])}"
            raise ConfigError(f"{place}: {key}: expected {expected}, got {shown(value)}")
        else:
            raise ConfigError(f"{place}: unknown key {key}; {suggest(key, keys.defaults)}")


def _find_base(name: Any, place: str, file: Path, above: Collection[Path]) -> Path:
    """Returns the file that the line ``base: NAME`` of ``file`` names. Raises ConfigError if it cannot be its base."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{place}: {BASE}: expected the name of a file, got {shown(name)}")
    base = file.parent / name
    if base.resolve() in (*above, file.resolve()):
        raise ConfigError(f"{place}: {BASE}: {base} leads back to itself")
    if not base.is_file():
        raise ConfigError(f"{place}: {BASE}: {base} does not exist")
    return base


_checker: Callable[[Any], pydantic.TypeAdapter[Any]] = functools.cache(pydantic.TypeAdapter)


def _checked(key: str, value: Any, option: Option, place: str) -> Setting:
    """Returns a value as the type of its field, read as strict JSON: a list is a tuple, and an int may be a float.

    Raises ConfigError if it has another type.
    """
    try:
        return Setting(_checker(option.hint).validate_json(json.dumps(value), strict=True), place)
    except pydantic.ValidationError as error:
        errors = error.errors()
    if errors[0]["type"] in ("missing", "too_long"):  # of a tuple
        expected = f"{len(get_args(option.hint))} items"
    else:  # a union gives one error for each type that it allows
        expected = " or ".join(dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in errors))
    raise ConfigError(f"{place}: {key}: expected {expected}, got {shown(errors[0]['input'])}")


def _built(default: T, settings: Settings, prefix: str = "") -> T:
    """Returns a section in which the settings replace its defaults. Raises ConfigError if a check refuses them."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(default):  # type: ignore[arg-type]
        key, value = prefix + field.name, getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _built(value, settings, f"{key}.")
        elif key in settings:
            changes[field.name] = settings[key].value
    try:
        return dataclasses.replace(default, **changes)  # type: ignore[type-var]
    except ValueError as error:
        section, first = prefix.removesuffix("."), str(error).split(" ")[0]
        if hasattr(default, first) or not prefix:  # a check's message opens with the name of the field
            key, said = prefix + first, f"{prefix}{error}"
        else:
            key, said = section, f"{section}: {error}"
        raise ConfigError(f"{settings[key].place}: {said}" if key in settings else said) from error


def _refuse_word(word: str, keys: KnownKeys) -> NoReturn:
    name = word.removeprefix("--").partition("=")[0]
    path = name.replace("-", "_")
    if not word.startswith("--"):
        said = f"unexpected argument {word!r}"
    elif path in keys.defaults:
        said = f"{path} is a section: set its keys, as in --{name}.KEY VALUE"
    elif path in keys.removed:
        said = f"{path} was removed: {keys.removed[path][1]}; leave this option out"
    else:
        said = f"unknown key {path}; {suggest(path, keys.defaults)}"
    raise ConfigError(f"{COMMAND_LINE}: {said}")


def read_document(file: Path, places: dict[str, str]) -> Any:
    """Returns the document of a YAML file as plain values, and adds FILE:LINE of each dotted key to ``places``."""
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=_Loader)
        _find_keys(node, file, "", places)
        document = None if node is None else _Loader("").construct_document(node)
        return json.loads(json.dumps(document, default=str, ensure_ascii=False).encode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text") from error
    except (RecursionError, LookupError, AttributeError, TypeError) as error:  # their texts name no fault of the file
        reason = "nested too deeply, or a value that is not of its tag"
        raise ConfigError(f"{file}: not valid YAML: {reason}") from error
    except (yaml.YAMLError, ValueError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        raise ConfigError(f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {problem}") from error


def _find_keys(node: yaml.Node | None, file: Path, prefix: str, places: dict[str, str]) -> None:
    """Adds the place of each key of a mapping. Raises YAMLError for a key that is written twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        inner = f"{prefix}{key.value}"
        if inner in places:
            raise yaml.MarkedYAMLError(problem=f"duplicate key {inner}", problem_mark=key.start_mark)
        places[inner] = f"{file}:{key.start_mark.line + 1}"
        _find_keys(value, file, f"{inner}.", places)


# The plain scalars that are more than strings, by the core schema of YAML 1.2.
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_RESOLVERS = {None: [(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{form})\\Z")) for name, form in _SCALARS.items()]}


class _Loader(yaml.SafeLoader):
    """A loader that reads scalars as YAML 1.2 does: 1e-4 is a number; yes, off, 010, dates and 1:30 are strings.

    It refuses aliases, because a few lines of them can repeat a value without end.
    """

    yaml_implicit_resolvers = _RESOLVERS

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Returns the next node of the document. Raises YAMLError if it is an alias."""
        if self.check_event(yaml.AliasEvent):
            problem = f"the alias *{self.peek_event().anchor}; write its value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes exactly the strings that ``_Loader`` would read as something else."""

    yaml_implicit_resolvers = _RESOLVERS
