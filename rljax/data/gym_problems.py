"""The problems of reasoning-gym's tasks, which each run makes, always the same ones.

A task is named ``reasoning_gym:NAME``, and a mixture of several ``reasoning_gym:NAME+NAME``. The trainer never imports
the library. It starts this file as a program with a fixed hash seed, on which some tasks depend. One task draws from
Python's global random numbers, and one prints. The program reads one JSON object from stdin: ``path`` (``sys.path``),
``name``, ``options``, ``seed`` and ``size``. It writes one pickle to stdout: the list of entries, or the text of an
error.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "reasoning_gym:"
REWARD = "reasoning_gym"
EVAL_PROBLEMS = 200  # the size of the evaluation split of a task
CHANGING = frozenset({"codeio"})
"""The tasks whose problems differ each time that they are made."""

# The library seeds problem i with the sum of seed and i, so neighbouring seeds would share nearly all problems.
_SEEDS = {"train": 1484405855, "eval": 1982462498}
_HASH_SEED = "0"
_OWN = frozenset({"seed", "size"})  # the settings of the library that other keys of the configuration set


def task_names(task: str) -> tuple[str, ...]:
    """Returns the names of the library's tasks in ``reasoning_gym:NAME+NAME``; () for any other ``task``.

    Raises:
      ValueError: A name is empty or is given twice.
    """
    if not task.startswith(PREFIX):
        return ()
    names = tuple(task.removeprefix(PREFIX).split("+"))
    if not all(name.isidentifier() for name in names) or len(set(names)) < len(names):
        raise ValueError(f"task must be {PREFIX}NAME or {PREFIX}NAME+NAME, each name once, got {task!r}")
    return names


def own_options(name: str, task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the task ``name`` of the library.

    ``options`` belong to the tasks named in ``task`` (``DataConfig.task``); any other task has the library's settings.
    A key ``NAME.SETTING`` is for the task NAME. A key without a point is for each task.
    """
    found = {key: value for key, value in options.items() if "." not in key and name in task_names(task)}
    prefix = f"{name}."
    return found | {key.removeprefix(prefix): value for key, value in options.items() if key.startswith(prefix)}


def gym_problems(
    names: Sequence[str], split: str, *, count: int, options: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the problems of a split, "train" or "eval", whose prompts are chats of one message.

    The splits share no prompt: training problems whose question the evaluation split has are left out. Problems whose
    right answer is an empty text are left out, too. Each of the tasks ``names`` gives the same number of problems, up
    to one. The split "eval" has ``EVAL_PROBLEMS`` problems, without repeats; ``count`` is for training problems alone.
    ``options`` has the settings of each task by its name.

    Raises:
      ValueError: The library refuses a name or a setting, or no problem is left. The message is one line.
    """
    problems: list[dict[str, Any]] = []
    for place, name in enumerate(names):
        settings = json.dumps(options.get(name, {}), sort_keys=True)
        evaluated = _made(name, settings, _SEEDS["eval"], EVAL_PROBLEMS)
        taken = {entry["question"]: entry for entry in reversed(evaluated)}
        whole = count if split == "train" else EVAL_PROBLEMS
        part = whole // len(names) + (place < whole % len(names))
        if split == "eval":
            entries = list(taken.values())[::-1][:part]
        else:
            made = _made(name, settings, _SEEDS["train"], part)
            entries = [entry for entry in made if entry["question"] not in taken]
            if made and not entries:
                raise ValueError(
                    f"{PREFIX}{name} has too few different problems: all {part} are in the evaluation split, too; "
                    "change its settings"
                )
        problems += [_problem(name, settings, entry) for entry in entries if entry["answer"] != ""]
    return problems


def _problem(name: str, settings: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "answer": right_answer(entry),
        "data_source": f"reasoning_gym/{name}",
        "extra_info": {"task": name, "options": settings, "entry": entry},
    }


def right_answer(entry: Mapping[str, Any]) -> str:
    """Returns a right answer of an entry; "" if the library gives none."""
    metadata = entry["metadata"]
    if entry["answer"] is not None:
        return str(entry["answer"])
    if "possible_answer" in metadata:  # graph_color: the colour of each vertex
        return json.dumps(metadata["possible_answer"])
    return str(metadata.get("example_answer") or metadata.get("example_correct_answer") or "")


@functools.lru_cache(maxsize=16)
def _made(name: str, settings: str, seed: int, size: int) -> list[dict[str, Any]]:
    """Returns the entries that the library makes in another process, with a fixed hash seed."""
    if not size:
        return []
    request = {"path": sys.path, "name": name, "options": json.loads(settings), "seed": seed, "size": size}
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": _HASH_SEED},
        check=False,
    )
    if done.returncode:
        raise ValueError(f"{PREFIX}{name} could not be made: its process ended with exit status {done.returncode}")
    made: list[dict[str, Any]] | str = pickle.loads(done.stdout)
    if isinstance(made, str):
        raise ValueError(made)
    return made


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
