"""Checks of settings, each a ValueError of one line that opens with the name of the field; and JSON of a user."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin, get_type_hints


def check_choice(name: str, value: Any, choices: Any) -> None:
    """``value`` must be one of the values of ``choices``, a ``Literal``."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {get_args(choices)}, got {value!r}")


def check_choices(config: Any) -> None:
    """Every field of the dataclass that is declared as a ``Literal`` must have one of its values."""
    for name, declared in get_type_hints(type(config)).items():
        if get_origin(declared) is Literal:
            check_choice(name, getattr(config, name), declared)


def check_at_least(config: Any, least: int, *names: str) -> None:
    """The fields must not be below ``least``; a number that is not a number is."""
    for name in names:
        if not getattr(config, name) >= least:
            wanted = f"be at least {least}" if least else "not be negative"
            raise ValueError(f"{name} must {wanted}, got {getattr(config, name)}")


def check_positive(config: Any, *names: str) -> None:
    """The fields must be above 0; they may be infinite."""
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be positive, got {getattr(config, name)}")


def check_finite(config: Any, *names: str) -> None:
    """The fields must be finite and not negative."""
    for name in names:
        if not 0.0 <= getattr(config, name) < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, got {getattr(config, name)}")


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text stands for. Raises ValueError, in a user's words, for anything that is not one."""
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text, at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read (nested too deeply)") from error
