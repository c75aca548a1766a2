"""The program that makes the problems of a reasoning-gym task, in a process of its own.

Some tasks depend on Python's hash seed, one draws from Python's global random numbers, and one prints. So the trainer
starts this program with a fixed hash seed. It reads one JSON object from stdin: ``path`` (``sys.path``), ``name``,
``options``, ``seed`` and ``size``. It writes one pickle to stdout: the list of entries, or the text of an error.
"""

from __future__ import annotations

import difflib
import json
import os
import pickle
import random
import sys
from typing import Any

CHANGING = frozenset({"codeio"})
"""The tasks whose problems differ each time that they are made."""

_OWN = frozenset({"seed", "size"})  # the settings of the library that other keys of the configuration set


def make(name: str, options: dict[str, Any], seed: int, size: int) -> list[dict[str, Any]]:
    """Makes ``size`` entries of a task: ``question``, ``answer`` (None: the library gives none) and ``metadata``.

    ``name`` is the task's name in the library, and ``options`` are its own settings.

    Raises:
      ValueError: The library is missing, there is no such task or setting, or the task refuses its settings.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        from rljax.errors import install_words

        raise ValueError(f"reasoning_gym:{name} needs reasoning-gym ({error}): {install_words('gym')}") from error
    from tqdm import tqdm

    if name in CHANGING:
        raise ValueError(f"reasoning_gym:{name} makes other problems each time: choose another task")
    if name not in DATASETS or name == "composite":
        similar = difflib.get_close_matches(name, set(DATASETS) - CHANGING - {"composite"}, n=3, cutoff=0.5)
        advice = f"; did you mean {' or '.join(similar)}?" if similar else ""
        raise ValueError(f"reasoning_gym has no task {name!r}{advice}")
    fields = DATASETS[name][1].__dataclass_fields__
    for key in options:
        if key not in fields or key in _OWN:
            known = ", ".join(field for field in fields if field not in _OWN)
            raise ValueError(f"reasoning_gym:{name} has no setting {key!r} of its own; its settings: {known}")
    random.seed(seed)
    try:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
        places = tqdm(range(size), desc=f"making {name}", unit="problem", delay=2.0, leave=False, disable=None)
        return [dataset[place] for place in places]
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"reasoning_gym:{name} cannot be made with {options}: {reason}") from error


def main() -> None:
    """Answers the request on stdin."""
    request = json.load(sys.stdin)
    sys.path[:] = request.pop("path")
    answer = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a task prints does not belong to the answer
    try:
        made: list[dict[str, Any]] | str = make(**request)
    except ValueError as error:
        made = str(error)
    with os.fdopen(answer, "wb") as out:
        pickle.dump(made, out)


if __name__ == "__main__":
    main()
