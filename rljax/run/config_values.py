"""One value of a configuration: the types a field may have, and reading what a YAML file or a shell word gives.

A field is ``int``, ``float``, ``bool``, ``str``, ``None``, ``Literal[...]``, a ``tuple[...]`` of these or a union of
these. Reading is strict (no bool for an int, no int for a str) with one widening: an int is taken for a float.
"""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, Union

_MAX_SHOWN = 80  # characters of a value quoted in an error


class Mismatch(Exception):
    """The value does not have the type asked for."""


class Word(str):
    """One word of the command line: it is read as whatever type is asked for."""


def convert(annotation: Any, value: Any) -> Any:
    """``value`` (a scalar, None, a Word or a list of these) as ``annotation``.

    Raises:
      Mismatch: it is something else.
    """
    arguments = typing.get_args(annotation)
    if _is_union(annotation):
        # None first: on the command line `None` must not become the string of `str | None`.
        for member in sorted(arguments, key=lambda member: member is not type(None)):
            try:
                return convert(member, value)
            except Mismatch:
                continue
        raise Mismatch
    if typing.get_origin(annotation) is tuple:
        return _convert_items(arguments, value)
    if annotation is type(None) and isinstance(value, list) and len(value) == 1 and isinstance(value[0], Word):
        value = value[0]  # the command line gives a list to every type that has a tuple among its members
    if isinstance(value, Word):
        value = _read_word(annotation, value)
    if typing.get_origin(annotation) is Literal:
        for choice in arguments:
            if type(choice) is type(value) and choice == value:
                return choice
        raise Mismatch
    if annotation is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise Mismatch from error
    if type(value) is not annotation:
        raise Mismatch
    return value


def describe(annotation: Any) -> str:
    """What may be written for ``annotation``, for an error message."""
    arguments = typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if _is_union(annotation):
        return " or ".join(describe(member) for member in arguments)
    if typing.get_origin(annotation) is Literal:
        return f"one of {', '.join(str(choice) for choice in arguments)}"
    if typing.get_origin(annotation) is tuple:
        if _is_variadic(arguments):
            return f"a list of {describe(arguments[0])}"
        return f"a list of {len(arguments)} ({', '.join(describe(item) for item in arguments)})"
    return "bool (true or false)" if annotation is bool else annotation.__name__


def takes_list(annotation: Any) -> bool:
    """Whether a list may be written for ``annotation``."""
    if _is_union(annotation):
        return any(takes_list(member) for member in typing.get_args(annotation))
    return typing.get_origin(annotation) is tuple


def check_supported(annotation: Any, where: str) -> None:
    """Raises TypeError, naming ``where``, for a field type that cannot be read."""
    origin = typing.get_origin(annotation)
    if _is_union(annotation) or origin is tuple:
        for member in typing.get_args(annotation):
            if origin is tuple and takes_list(member):
                raise TypeError(f"{where}: a configuration field cannot be a list of lists, got {annotation}")
            if member is not Ellipsis:
                check_supported(member, where)
    elif origin is not Literal and annotation not in (int, float, bool, str, type(None)):
        raise TypeError(f"{where}: a configuration field cannot have the type {annotation}")


def shorten(text: str) -> str:
    """``text`` on one line and at most 80 characters."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def _is_variadic(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 2 and arguments[1] is Ellipsis


def _convert_items(arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise Mismatch
    if _is_variadic(arguments):
        return tuple(convert(arguments[0], item) for item in value)
    if len(arguments) != len(value):
        raise Mismatch
    return tuple(convert(annotation, item) for annotation, item in zip(arguments, value, strict=True))


def _read_word(annotation: Any, word: str) -> Any:
    if typing.get_origin(annotation) is Literal:
        choices = {str(choice): choice for choice in typing.get_args(annotation)}
        return choices.get(word, str(word))
    if annotation is bool and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if annotation is type(None) and word.lower() in ("none", "null"):
        return None
    if annotation in (int, float):
        try:
            return annotation(word)
        except ValueError as error:
            raise Mismatch from error
    return str(word)
