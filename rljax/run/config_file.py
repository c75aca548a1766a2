"""Builds a configuration, a tree of frozen dataclasses, from its defaults, a YAML file and the command line.

PyYAML reads the file, tyro reads the options, and pydantic checks the merged values and builds the dataclasses. So a
mistake gives the same single line wherever it was written. ``__post_init__`` runs on the merged values only: a file may
be valid only together with an option. Every field of the dataclasses has a default.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pydantic

from rljax.errors import ConfigError
from rljax.policy.hub import CONFIGS, packaged
from rljax.run.yaml_file import BASE, Names, Places, dotted, laid_over, read_yaml, shown, to_yaml

T = TypeVar("T")

COMMAND_LINE = "command line"
HELP = {"-h", "--help"}
ALL = "all"
SIMILAR = 0.7
"""The least likeness of a known key to an unknown one for which it is suggested (1: equal)."""


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
      root: The dataclass of the configuration.
      argv: The words of the command line.
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
    return resolve(root, file, words, prog=prog)[0]


def resolve(root: type[T], file: str | None, words: Sequence[str], *, prog: str) -> tuple[T, Places]:
    """Builds ``root`` from a file and options.

    Args:
      root: The dataclass of the configuration.
      file: The name of a YAML file, or of a configuration that the package carries; None: the defaults alone.
      words: The options ``--a.b value``.
      prog: The words by which the program is called.

    Returns:
      The configuration, and the place of each value that is not a default.

    Raises:
      ConfigError: Anything is wrong with the file, the options or the values.
    """
    defaults, values, places = _read_file(root, file)
    values, option_places = _over_options(root, values, words, prog)
    places |= option_places
    try:
        checker: pydantic.TypeAdapter[T] = _checker(root)  # type: ignore[arg-type]
        return _validate(checker, values), places
    except pydantic.ValidationError as error:
        _refuse(error.errors(), defaults, values, places)


def find_config(name: str) -> Path:
    """Returns the file that a name means: the file itself, or else a configuration that the package carries.

    Raises:
      ConfigError: There is neither. The message suggests a configuration of the package with a similar name.
    """
    if os.path.isfile(name):
        return Path(name)
    inside = packaged(name)
    if inside is not None and inside.is_file():
        return inside
    if os.path.exists(name):
        return Path(name)  # a directory or a pipe: what reads it says what is wrong
    names = [str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("**/*.yaml")]
    similar = difflib.get_close_matches(name.removeprefix("configs/").removesuffix(".yaml"), names, n=1)
    advice = f"; did you mean {similar[0]}?" if similar else ""
    raise ConfigError(f"{name}: No such file or directory{advice}" if name else "the name of a file is empty")


def config_to_yaml(config: Any) -> str:
    """Returns a configuration, defaults included, as YAML that ``load_config`` reads back to an equal value."""
    return to_yaml(dataclasses.asdict(config))


def suggest(path: str, defaults: dict[str, Any]) -> str:
    """Returns the end of a line about an unknown key: the known key most like it, or the keys of its section.

    Args:
      path: The dotted path of the unknown key.
      defaults: The known keys with their values, as nested dictionaries.
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


# --- the file and the values ------------------------------------------------------------------------------------------


def _read_file(root: type, file: str | None) -> tuple[dict[str, Any], dict[str, Any], Places]:
    """Returns the defaults, the values of the file over them, and the places of the latter.

    Raises:
      ConfigError: A value of the file has a wrong type. What ``__post_init__`` refuses is left to the end, because an
        option may mend it.
    """
    defaults = dataclasses.asdict(root())
    if file is None:
        return defaults, dict(defaults), {}
    written, places = read_yaml(find_config(file), BASE not in defaults)
    values = laid_over(defaults, written)
    try:
        _validate(_checker(root), values)
    except pydantic.ValidationError as error:
        wrong = [one for one in error.errors() if one["type"] != "value_error"]
        if wrong:
            _refuse(wrong, defaults, values, places)
    return defaults, values, places


@functools.lru_cache(maxsize=8)
def _checker(root: type) -> pydantic.TypeAdapter[Any]:
    """Returns what checks values of ``root``. Building it takes longer than checking a configuration."""
    return pydantic.TypeAdapter(root)


def _validate(checker: pydantic.TypeAdapter[T], value: Any) -> T:
    """Returns ``value`` as the checker's type, read as strict JSON: a list is a tuple, and an int may be a float."""
    return checker.validate_json(json.dumps(value), strict=True, extra="forbid")


def _at(values: dict[str, Any], names: Names) -> Any:
    """Returns the value to which the names lead."""
    return functools.reduce(dict.__getitem__, names, values)


# --- mistakes ---------------------------------------------------------------------------------------------------------


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


# --- the command line -------------------------------------------------------------------------------------------------


def _over_options(root: type, values: dict[str, Any], words: Sequence[str], prog: str) -> tuple[dict[str, Any], Places]:
    """Returns the values with the options' values in their place, and the places of the options.

    Raises:
      ConfigError: A word is no option.
    """
    if not words:
        return values, {}
    from rljax.run.options import read_options  # tyro takes a tenth of a second

    merged, unknown = read_options(root, _unchecked(root(), values), words, prog)
    if unknown:
        _refuse_word(unknown[0], values)
    before, after = (dict(_leaves(json.loads(json.dumps(one)))) for one in (values, merged))
    return merged, {names: COMMAND_LINE for names, value in after.items() if value != before[names]}


def _refuse_word(word: str, values: dict[str, Any]) -> NoReturn:
    """Raises ConfigError for a word that is no option."""
    name = word.removeprefix("--").partition("=")[0]
    path = name.replace("-", "_")
    if not word.startswith("--"):
        raise ConfigError(f"{COMMAND_LINE}: unexpected argument {word!r}")
    if path in dict(dotted(values)):
        raise ConfigError(f"{COMMAND_LINE}: {path} is a section: set its keys, as in --{name}.KEY VALUE")
    raise ConfigError(f"{COMMAND_LINE}: unknown key {path}; {suggest(path, values)}")


def _leaves(values: dict[str, Any], above: Names = ()) -> Iterator[tuple[Names, Any]]:
    """Yields (names, value) of every value that is no section."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _unchecked(template: Any, values: dict[str, Any]) -> Any:
    """Returns a copy of a dataclass instance with these values, whose ``__post_init__`` did not run."""
    made = copy.copy(template)
    for name, value in values.items():
        plain = tuple(value) if isinstance(value, list) else value
        object.__setattr__(made, name, _unchecked(getattr(made, name), value) if isinstance(value, dict) else plain)
    return made


def _print_help(
    root: type, file: str | None, words: list[str], prog: str, description: str, common: Collection[str] | None
) -> None:
    """Prints the options with the file's values as their defaults, and leaves with status 0."""
    from rljax.run.options import print_help

    _, values, _ = _read_file(root, file)
    if common is not None and ALL not in words:
        count = sum(1 for _ in _leaves(values))
        description += f"\n\nThese are the {len(common)} options that most runs set. --help all prints all {count}, "
        description += "and rljax config KEY explains one."
        print_help(root, _unchecked(root(), values), prog, description, common)
    print_help(root, _unchecked(root(), values), prog, description)
