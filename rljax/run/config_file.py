"""Reads a configuration: a tree of frozen dataclasses filled from defaults, then a YAML file, then the command line.

PyYAML reads the file, ``tyro`` draws ``--help``, and pydantic checks the merged values and
builds the dataclasses, so that a mistake gives the same single line wherever it was written. ``__post_init__`` runs on
the merged values only: a file may be valid only together with an option of the command line. ``base: OTHER.yaml`` in a
file, relative to it, names another file whose values it overrides. Every field of the dataclasses has a default.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import difflib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import pydantic
import yaml

from rljax.errors import ConfigError
from rljax.policy.hub import CONFIGS, packaged

T = TypeVar("T")
Names = tuple[str, ...]  # the keys that lead from the root to a value
Places = dict[Names, str]  # where a value was written: "FILE:LINE" or "command line"

COMMAND_LINE = "command line"
HELP = {"-h", "--help"}
BASE = "base"
MAX_VALUES = 100_000  # of a file with its aliases written out
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
    for word in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # how Python hands over other bytes
            raise ConfigError(f"{COMMAND_LINE}: {_show(word)} is not UTF-8 text")
    file, options = (None, argv) if not argv or argv[0].startswith("-") else (argv[0], argv[1:])
    if file is None and example is not None and not HELP & set(options):
        raise ConfigError(f"give a configuration first, as in: {prog} {example} (--help lists the options)")
    checker: pydantic.TypeAdapter[T] = _checker(root)  # type: ignore[arg-type]
    defaults = dataclasses.asdict(root())  # type: ignore[call-overload]
    values, places = (defaults, {}) if file is None else _read_yaml(find_config(file), BASE not in defaults)
    values = _laid_over(defaults, values)
    try:
        _validate(checker, values)
    except pydantic.ValidationError as error:
        wrong = [one for one in error.errors() if one["type"] != "value_error"]  # the options may yet mend those
        if wrong:
            _refuse(wrong, defaults, values, places)
    if HELP & set(options):
        _print_help(root, values, prog, description)
    for names, value in _read_options(root, options, values):
        _at(values, names[:-1])[names[-1]] = value
        places[names] = COMMAND_LINE
    try:
        return _validate(checker, values)
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
    raise ConfigError(f"{name}: No such file or directory{f'; did you mean {similar[0]}?' if similar else ''}")


def config_to_yaml(config: Any) -> str:
    """The configuration, defaults included, as YAML that ``load_config`` reads back to an equal value."""
    values = dataclasses.asdict(config)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110)


# --- values -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _checker(root: type) -> pydantic.TypeAdapter[Any]:
    """What checks values of ``root``. To build it takes longer than to check a configuration."""
    return pydantic.TypeAdapter(root)


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


def dotted(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every key of nested settings, sections included."""
    for key, value in values.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")


def _show(value: Any) -> str:
    text = "nothing" if value == [] else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# --- the command line -------------------------------------------------------------------------------------------------

_OPTION = re.compile(r"--?[A-Za-z]")  # -3 is a value


def _read_options(root: type, words: Sequence[str], values: dict[str, Any]) -> Iterator[tuple[Names, Any]]:
    """What the words give, as (names, plain value); a value that its option does not take stays words."""
    waiting, known = collections.deque(words), dict(dotted(values))
    while waiting:
        word = waiting.popleft()
        name, equals, text = word.removeprefix("--").partition("=")
        given = [text] if equals else []
        while waiting and not equals and not _OPTION.match(waiting[0]):
            given.append(waiting.popleft())
        path = name.replace("-", "_")
        if not word.startswith("--"):
            raise ConfigError(f"{COMMAND_LINE}: unexpected argument {word!r}")
        if path not in known:
            raise ConfigError(f"{COMMAND_LINE}: unknown key {path}; {_suggest(path, values)}")
        if isinstance(known[path], dict):
            raise ConfigError(f"{COMMAND_LINE}: {path} is a section: set its keys, as in --{name}.KEY VALUE")
        *above, last = names = tuple(path.split("."))
        section = functools.reduce(lambda outer, key: get_type_hints(outer)[key], above, root)
        yield names, _read_words(get_type_hints(section)[last], given)


def _read_words(annotation: Any, words: list[str]) -> Any:
    """The words as the first of these that the type takes: YAML values, text, a single one of either."""
    checker: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
    scalars = [_read_scalar(word) for word in words]
    for plain in [scalars, words, *(scalars + words if len(words) == 1 else []), *([] if words else [True])]:
        try:
            _validate(checker, plain)
        except pydantic.ValidationError:
            continue
        return plain
    return words[0] if len(words) == 1 else words


def _read_scalar(word: str) -> Any:
    """The word as a plain scalar of YAML; Python's None is null, too."""
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, word, (True, False))
    try:
        return None if word.lower() == "none" else loader.construct_object(yaml.ScalarNode(tag, word))
    except ValueError:  # more digits than Python reads
        return word


def _print_help(root: type, values: dict[str, Any], prog: str, description: str) -> None:
    """Prints every option with its value, and leaves with status 0."""
    import tyro  # a quarter of a second, which no run waits for

    registry, asking = tyro.constructors.ConstructorRegistry(), False

    @registry.struct_rule
    def section(info: Any) -> Any:
        """Tyro's own rule, but the documentation of a field is without the line breaks of the source."""
        nonlocal asking
        if asking:
            return None
        asking = True
        own = registry.get_struct_spec(info)
        asking = False
        if not isinstance(own, tyro.constructors.StructConstructorSpec):
            return own
        texts = [(one.helptext() if callable(one.helptext) else one.helptext) or "" for one in own.fields]
        pairs = zip(own.fields, texts, strict=True)
        fields = tuple(dataclasses.replace(one, helptext=" ".join(text.split())) for one, text in pairs)
        return dataclasses.replace(own, fields=fields)

    tyro.cli(
        root,
        prog=f"{prog} [CONFIG.yaml]",
        description=description,
        args=["--help"],
        default=_unchecked(root(), values),
        config=(tyro.conf.FlagConversionOff,),
        registry=registry,
    )


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
        if _written_out(node, {}) > MAX_VALUES:
            raise ValueError(f"its aliases repeat values more than {MAX_VALUES} times")
        _find_keys(node, file, (), places)
        document = None if node is None else _Loader("").construct_document(node)
        values = json.loads(json.dumps(document, default=str, ensure_ascii=False).encode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        raise ConfigError(f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {problem}") from error
    except UnicodeError as error:  # also an escape such as "\ud800"
        raise ConfigError(f"{file}: not valid YAML: text that is not UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: not valid YAML: nested too deeply, or a value inside itself") from error
    except (LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file}: not valid YAML: a value that is not of its tag (!!bool, !!timestamp)") from error
    except ValueError as error:  # a number that is none, a value inside itself
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


def _written_out(node: Any, known: dict[int, int]) -> int:
    """How many values a node has with its aliases written out; ``known``: those of the nodes seen, by ``id``."""
    if id(node) not in known:
        known[id(node)] = 0  # of a node inside itself
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = (part for one in inner for part in (one if isinstance(one, tuple) else (one,)))
        known[id(node)] = 1 + sum(_written_out(part, known) for part in below)
    return known[id(node)]


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
