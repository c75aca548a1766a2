"""YAML files of settings: reading, with the place of each key, and writing.

Scalars are read as YAML 1.2 does. ``base: OTHER.yaml`` in a file, relative to it, names another file whose values the
file overrides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rljax.errors import ConfigError

Names = tuple[str, ...]
"""The keys that lead from the root of the settings to a value."""
Places = dict[Names, str]
"""The place at which each value was written, as ``FILE:LINE`` or ``command line``."""

BASE = "base"
MAX_VALUES = 100_000
"""The largest number of values in a file when its aliases are written out."""
MAX_SHOWN = 80
"""The longest value quoted in an error (characters)."""


def read_yaml(file: Path, may_have_base: bool, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Places]:
    """Reads a file over its base.

    Args:
      file: The YAML file.
      may_have_base: Whether the key ``base`` names another file. False where the settings have a key of that name.
      above: The resolved paths of the files that named this one as their base.

    Returns:
      The values as nested dictionaries, and the place of each key.

    Raises:
      ConfigError: The file, or its base, cannot be read or is no mapping of keys to values.
    """
    places: Places = {}
    values = _read_document(file, places)
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
    below, its_places = read_yaml(base, may_have_base, chain)
    return laid_over(below, values), its_places | places


def to_yaml(values: Mapping[str, Any]) -> str:
    """Returns nested settings as YAML text that ``read_yaml`` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110)


def laid_over(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` with ``values`` in their place, section by section."""
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


def _read_document(file: Path, places: Places) -> Any:
    """Returns the one document of a file as plain values, and adds the place of each key to ``places``."""
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=_Loader)
        if _written_out(node, {}) > MAX_VALUES:
            raise ValueError(f"its aliases repeat values more than {MAX_VALUES} times")
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
        raise ConfigError(f"{file}: not valid YAML: nested too deeply, or a value inside itself") from error
    except (LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file}: not valid YAML: a value that is not of its tag (!!bool, !!timestamp)") from error
    except ValueError as error:  # a malformed number, or a value inside itself
        raise ConfigError(f"{file}: not valid YAML: {error}") from error


def _written_out(node: Any, known: dict[int, int]) -> int:
    """Returns the number of values in a node when its aliases are written out.

    Args:
      node: A node of the file, or None.
      known: The numbers of the nodes that were counted before, by their ``id``.
    """
    if id(node) not in known:
        known[id(node)] = 0  # a node inside itself adds nothing
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = (part for one in inner for part in (one if isinstance(one, tuple) else (one,)))
        known[id(node)] = 1 + sum(_written_out(part, known) for part in below)
    return known[id(node)]


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
    """A loader that reads scalars as YAML 1.2 does: 1e-4 is a number; yes, off, 010, dates and 1:30 are strings."""

    yaml_implicit_resolvers = _RESOLVERS


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes exactly the strings that ``_Loader`` would read as something else."""

    yaml_implicit_resolvers = _RESOLVERS
