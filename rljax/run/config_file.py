"""Builds a configuration, a tree of frozen dataclasses, from its defaults, a YAML file and the command line.

PyYAML reads the file, and pydantic checks the merged values and builds the dataclasses. So a mistake gives the same
single line wherever it was written. Scalars are read as YAML 1.2 does. In a file the line ``base: OTHER.yaml``,
relative to it, names another file whose values the file overrides. ``__post_init__`` runs on the merged values only: a
file may be valid only together with an option. Every field of the dataclasses has a default. The class attribute
``removed_keys`` has the keys that a file may still hold, each with its default and a remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pydantic
import yaml

from rljax.errors import ConfigError
from rljax.policy.hub import CONFIGS, packaged
from rljax.run.options import help_text, read_options

T = TypeVar("T")
Names = tuple[str, ...]  # the keys that lead from the root of the settings to a value
Removed = tuple[Any, str]  # the default of a key that is no more, and what a user does instead
Places = dict[Names, str]  # the place at which each value was written, as ``FILE:LINE`` or ``command line``

COMMAND_LINE = "command line"
HELP = {"-h", "--help"}
ALL = "all"
SIMILAR = 0.7  # the least likeness of a known key to an unknown one for which it is suggested (1: equal)
BASE = "base"
MAX_SHOWN = 80  # the longest value quoted in an error (characters)


def load_config(
    root: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    example: str | None = None,
    common: Collection[str] | None = None,
) -> T:
    """Builds ``root`` from ``[CONFIG.yaml] [--a.b value ...]``; an option overrides the file, and the file a default.

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
    words, file, wants_help = list(argv), None, bool(HELP & set(argv))
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # the form in which Python hands over other bytes
            raise ConfigError(f"{COMMAND_LINE}: {shown(word)} is not UTF-8 text")
    if words and not words[0].startswith("-"):
        file = words.pop(0)
    if file is None and example is not None and not wants_help:
        raise ConfigError(f"give a configuration first, as in: {prog} {example} (--help lists the options)")
    if wants_help:
        _print_help(root, file, words, prog, description, common)
    return resolve(root, file, words)[0]


def resolve(root: type[T], file: str | None, words: Sequence[str]) -> tuple[T, Places]:
    """Builds ``root`` from a file and the options ``--a.b value``; ``file`` is a name for ``find_config``, or None.

    Returns the configuration, and the place of each value that the file or an option sets. Raises ConfigError if the
    file, an option or a value is wrong.
    """
    defaults, values, places = _read_file(root, file)
    values, option_places = _over_options(root, values, words)
    places |= option_places
    try:
        checker: pydantic.TypeAdapter[T] = _checker(root)  # type: ignore[arg-type]
        return _validate(checker, values), places
    except pydantic.ValidationError as error:
        _refuse(error.errors(), defaults, values, places)


def find_config(name: str) -> Path:
    """Returns the file of this name, or else a configuration in the package. Raises ConfigError if there is neither."""
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


def suggest(path: str, defaults: dict[str, Any]) -> str:
    """Returns the end of a line about an unknown key: the known key most like it, or the keys of its section.

    The key is a dotted path, and the known keys have their default values in nested dictionaries.
    """
    section, _, name = path.rpartition(".")
    known = dict(dotted(defaults))

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


def laid_over(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` with its entries replaced by those of ``values``, section by section."""
    merged = dict(base)
    for key, value in values.items():
        below = base.get(key)
        merged[key] = laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


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


def _read_file(root: type, file: str | None) -> tuple[dict[str, Any], dict[str, Any], Places]:
    """Returns the defaults, the defaults with the file's values in their place, and the places of the file's values.

    Raises ConfigError for wrong keys and types. The checks of ``__post_init__`` come later, because an option may mend
    a value.
    """
    defaults = dataclasses.asdict(root())
    if file is None:
        return defaults, dict(defaults), {}
    written, places = _read_yaml(find_config(file), BASE not in defaults)
    values = laid_over(defaults, _without_removed(written, defaults, getattr(root, "removed_keys", {}), places))
    try:
        _validate(_checker(root), values)
    except pydantic.ValidationError as error:
        wrong = [one for one in error.errors() if one["type"] != "value_error"]
        if wrong:
            _refuse(wrong, defaults, values, places)
    return defaults, values, places


def _without_removed(
    values: Mapping[str, Any],
    known: Any,
    removed: Mapping[str, Removed],
    places: Places,
    names: Names = (),
) -> dict[str, Any]:
    """Returns the section ``names`` of a file without the keys that rljax had before, and without sections of them.

    Raises ConfigError if such a key has another value than its default.
    """
    kept: dict[str, Any] = {}
    for name, value in values.items():
        inner, is_known = (*names, name), isinstance(known, dict) and name in known
        key = ".".join(inner)
        if not is_known and key in removed:
            default, remedy = removed[key]
            if value != default:
                got = f"{key} was removed with the default {shown(default)}, got {shown(value)}"
                raise ConfigError(f"{places[inner]}: {got}: {remedy}; delete this key")
        elif isinstance(value, dict):
            section = _without_removed(value, known[name] if is_known else None, removed, places, inner)
            if section or is_known or not value:
                kept[name] = section
        else:
            kept[name] = value
    return kept


@functools.lru_cache(maxsize=8)
def _checker(root: type) -> pydantic.TypeAdapter[Any]:
    """Returns pydantic's checker of ``root``. It is cached, because building it takes longer than a check."""
    return pydantic.TypeAdapter(root)


def _validate(checker: pydantic.TypeAdapter[T], value: Any) -> T:
    """Returns ``value`` as the checker's type, read as strict JSON: a list is a tuple, and an int may be a float."""
    return checker.validate_json(json.dumps(value), strict=True, extra="forbid")


def _at(values: dict[str, Any], names: Names) -> Any:
    return functools.reduce(dict.__getitem__, names, values)


def _refuse(errors: Sequence[Any], defaults: dict[str, Any], values: dict[str, Any], places: Places) -> NoReturn:
    """Raises ConfigError for the first mistake, in one line: its place, the dotted path, what is wrong."""
    first, names = errors[0], _names(errors[0]["loc"], values)
    path, got = ".".join(names), shown(first["input"])
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        field = reason.split(" ")[0]
        if field in _at(defaults, names):  # a check's message opens with the name of the field
            names, path = (*names, field), f"{path}." if path else ""
        else:
            path = f"{path}: " if path else ""
        message = f"{path}{reason}"
    elif first["type"] == "unexpected_keyword_argument":
        message = f"unknown key {path}; {suggest(path, defaults)}"
    elif first["type"] == "dataclass_type":
        message = f"{path}: expected a mapping with the keys {', '.join(_at(defaults, names))}, got {got}"
    elif first["type"] in ("missing", "too_long"):  # a tuple has them; the fields themselves all have defaults
        message = f"{path}: expected {len(_at(defaults, names))} items, got {got}"
    else:  # a union gives one error for each type that it allows
        allowed = [error["msg"] for error in errors if _names(error["loc"], values) == names]
        expected = " or ".join(dict.fromkeys(message.removeprefix("Input should be ") for message in allowed))
        message = f"{path}: expected {expected}, got {got}"
    raise ConfigError(f"{places[names]}: {message}" if names in places else message)


def _names(location: Sequence[str | int], values: Any) -> Names:
    """Returns the part of pydantic's location that names keys; indices of lists and members of unions follow it."""
    names: list[str] = []
    for part in location:
        if not isinstance(values, dict) or part not in values:
            break
        names.append(str(part))
        values = values[part]
    return tuple(names)


def _over_options(root: type, values: dict[str, Any], words: Sequence[str]) -> tuple[dict[str, Any], Places]:
    """Returns the values with the options in their place, and the places of the options' values."""
    found, others = read_options(root, words)
    if others:
        _refuse_word(others[0], values, getattr(root, "removed_keys", {}))
    before = dict(dotted(json.loads(json.dumps(values))))
    places: Places = {}
    for key, value in found.items():
        names = tuple(key.split("."))
        values = laid_over(values, functools.reduce(lambda below, name: {name: below}, reversed(names), value))
        if value != before[key]:
            places[names] = COMMAND_LINE
    return values, places


def _refuse_word(word: str, values: dict[str, Any], removed: Mapping[str, Removed]) -> NoReturn:
    name = word.removeprefix("--").partition("=")[0]
    path = name.replace("-", "_")
    if not word.startswith("--"):
        raise ConfigError(f"{COMMAND_LINE}: unexpected argument {word!r}")
    if path in dict(dotted(values)):
        raise ConfigError(f"{COMMAND_LINE}: {path} is a section: set its keys, as in --{name}.KEY VALUE")
    if path in removed:
        raise ConfigError(f"{COMMAND_LINE}: {path} was removed: {removed[path][1]}; leave this option out")
    raise ConfigError(f"{COMMAND_LINE}: unknown key {path}; {suggest(path, values)}")


def _print_help(
    root: type, file: str | None, words: list[str], prog: str, description: str, common: Collection[str] | None
) -> None:
    """Prints the options with the file's values as their defaults, and leaves with status 0."""
    _, values, _ = _read_file(root, file)
    if common is not None and ALL not in words:
        count = sum(not isinstance(value, dict) for _, value in dotted(values))
        description += f"\n\nThese are the {len(common)} options that most runs set. --help all prints all {count}."
    else:
        common = None
    print(f"usage: {prog} [CONFIG.yaml] [--a.b VALUE ...]\n\n{description.strip()}\n\noptions:")
    print(help_text(root, values, common))
    raise SystemExit(0)


def _read_yaml(file: Path, may_have_base: bool, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Places]:
    """Reads a file over its base; ``above`` are the files that named this one."""
    places: Places = {}
    values = read_document(file, places)
    if not isinstance(values, dict):
        got = "an empty file" if values is None else shown(values)
        raise ConfigError(f"{file}: expected a mapping, got {got}")
    if not may_have_base or BASE not in values:
        return values, places
    name, where = values.pop(BASE), places[BASE,]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: {BASE}: expected the name of a file, got {shown(name)}")
    base, chain = file.parent / name, (*above, file.resolve())
    if base.resolve() in chain:
        raise ConfigError(f"{where}: {BASE}: {base} leads back to itself")
    if not base.is_file():
        raise ConfigError(f"{where}: {BASE}: {base} does not exist")
    below, its_places = _read_yaml(base, may_have_base, chain)
    return laid_over(below, values), its_places | places


def read_document(file: Path, places: Places) -> Any:
    """Returns the one document of a file as plain values, and adds the place of each key to ``places``."""
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=_Loader)
        _find_keys(node, file, (), places)
        document = None if node is None else _Loader("").construct_document(node)
        return json.loads(json.dumps(document, default=str, ensure_ascii=False).encode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        raise ConfigError(f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {problem}") from error
    except UnicodeError as error:  # an escape such as "\ud800" ends here, too
        raise ConfigError(f"{file}: not valid YAML: text that is not UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: not valid YAML: nested too deeply") from error
    except (LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file}: not valid YAML: a value that is not of its tag (!!bool, !!timestamp)") from error
    except ValueError as error:  # a malformed number
        raise ConfigError(f"{file}: not valid YAML: {error}") from error


def _find_keys(node: yaml.Node | None, file: Path, names: Names, places: Places) -> None:
    """Adds the place of each key of a mapping. Raises YAMLError for a key that is written twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        inner = (*names, str(key.value))
        if inner in places:
            raise yaml.MarkedYAMLError(problem=f"duplicate key {'.'.join(inner)}", problem_mark=key.start_mark)
        places[inner] = f"{file}:{key.start_mark.line + 1}"
        _find_keys(value, file, inner, places)


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
        """Returns the next node of the document."""
        if self.check_event(yaml.AliasEvent):
            problem = f"the alias *{self.peek_event().anchor}; write its value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes exactly the strings that ``_Loader`` would read as something else."""

    yaml_implicit_resolvers = _RESOLVERS
