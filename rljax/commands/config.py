"""Prints the settings that a run would use, or explains one of them.

rljax config CONFIG.yaml [--a.b value ...]              every setting, as YAML
rljax config --show KEY[,KEY...] [CONFIG.yaml] [...]    some values, one a line
rljax config KEY [CONFIG.yaml] [...]                    one key: its type, default, source, and what refuses it
rljax config SECTION                                    the keys of a section, such as rollout
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import rljax
from rljax.errors import ConfigError
from rljax.policy.hub import packaged
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml, dotted, resolve, shown, suggest
from rljax.run.options import field_texts

PROG = "rljax config"
SHOW = "--show"
KEY = re.compile(r"[\w.]+(?<!\.yaml)")
WIDTH = 100  # characters of a line of an explanation
# The text of a rule, by the function of rljax.errors that checks it.
CHECKS = {"check_at_least": "at least {}", "check_positive": "above 0", "check_finite": "finite and not negative"}


def main(argv: Sequence[str]) -> int:
    """Prints settings or an explanation; returns the exit status."""
    words = list(argv)
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    keys: list[str] | None = None
    if words and words[0] == SHOW:
        if len(words) < 2:
            raise ConfigError(f"{SHOW} needs a key, as in: {PROG} {SHOW} rollout.dtype quickstart")
        keys, words = words[1].split(","), words[2:]
    known_values = dataclasses.asdict(Config())
    known = dict(dotted(known_values))
    key = words.pop(0) if keys is None and words and words[0] in known else None
    file = words.pop(0) if words and not words[0].startswith("-") else None
    if key is None and file is not None and not os.path.exists(file) and not packaged(file) and KEY.fullmatch(file):
        raise ConfigError(f"{file} is neither a key nor a configuration; {suggest(file, known_values)}")
    config, places = resolve(Config, file, words)
    if keys is not None:
        print("\n".join(str(value_of(config, one)) for one in keys))
    elif key is None:
        print(config_to_yaml(config), end="")
    elif isinstance(known[key], dict):
        print("\n".join(section_lines(key)))
    else:
        source = places.get(tuple(key.split(".")), "the default")
        print("\n".join(explanation(key, known[key], value_of(config, key), source)))
    return 0


def value_of(config: Config, key: str) -> Any:
    """Returns the value of a dotted key, which may also be a property. Raises ConfigError for an unknown key."""
    try:
        return functools.reduce(getattr, key.split("."), config)
    except AttributeError as error:
        raise ConfigError(f"unknown key {key}; {suggest(key, dataclasses.asdict(config))}") from error


def section_of(key: str) -> tuple[type, str]:
    """Returns the dataclass that holds a dotted key, and the field's name in it."""
    *above, name = key.split(".")
    kind: type = functools.reduce(lambda outer, one: get_type_hints(outer)[one], above, Config)
    return kind, name


def section_lines(key: str) -> list[str]:
    """Returns a line for each key of a section, with the first sentence of the key's documentation."""
    kind, name = section_of(key)
    section = get_type_hints(kind)[name]
    texts, lines = field_texts(section), []
    for field in dataclasses.fields(section):
        first = texts.get(field.name, "").partition(". ")[0].rstrip(".")
        lines.append(textwrap.shorten(f"{key}.{field.name}: {first}", WIDTH, placeholder=" ..."))
    return lines


def explanation(key: str, default: Any, value: Any, source: str) -> list[str]:
    """Returns the lines that explain a dotted key: documentation, type, default, value, and the rules for values.

    ``source`` names the place from which the value comes.
    """
    kind, name = section_of(key)
    declared = inspect.get_annotations(kind)[name]
    rows = [("type", declared.__name__ if isinstance(declared, type) else str(declared)), ("default", shown(default))]
    rows += [("value", f"{shown(value)} ({source})"), *(("refused", text) for text in refusals(key))]
    lines = textwrap.wrap(field_texts(kind).get(name, ""), WIDTH - 2)
    for head, text in rows:
        lines += textwrap.wrap(f"{head:<9}{text}", WIDTH - 2, subsequent_indent=" " * 9)
    return [key, *(f"  {line}" for line in lines)]


def refusals(key: str) -> list[str]:
    """Returns the rules that refuse values of a key, taken from the package's source.

    They are the checks of the dataclass that holds the key, and the texts of errors in any module that name the key.
    """
    kind, name = section_of(key)
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    found = [f"unless it is {text}" for text in _checks(tree, name)]
    found += [text for text in _raised(tree) if re.match(rf"{name}\b", text)]
    for source in _package_sources():
        if key in source:
            found += [text for text in _errors_of(source) if re.search(rf"(?<![\w.]){re.escape(key)}\b", text)]
    return list(dict.fromkeys(found))


@functools.cache
def _errors_of(source: str) -> tuple[str, ...]:
    return tuple(_raised(ast.parse(source)))


@functools.cache
def _package_sources() -> tuple[str, ...]:
    paths = sorted(Path(str(rljax.__path__[0])).rglob("*.py"))
    return tuple(path.read_text(encoding="utf-8") for path in paths)


def _checks(tree: ast.AST, name: str) -> Iterator[str]:
    """Yields the rules of the calls ``check_...(self, ..., "name")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CHECKS:
            constants = [one.value for one in node.args if isinstance(one, ast.Constant)]
            if name in constants:
                yield CHECKS[node.func.id].format(ast.unparse(node.args[1]))


def _raised(tree: ast.AST) -> Iterator[str]:
    """Yields the texts of the errors that are raised, with ``...`` for each value in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            words = [str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts]
            yield "".join(words)
