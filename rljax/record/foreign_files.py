"""Recognises files of other projects that hold neither a log nor tokens, so that a message can name them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from rljax.errors import parse_json

_MOST_BYTES = 2**20
_ROW_OF_HISTORY = {"_step", "_runtime", "_timestamp"}
_TEXTS = (
    "a log of texts and scores without token ids and log-probabilities. Text does not give the tokens back: "
    "rljax docs compare has the lines that write them inside its process"
)
SUMMARY = (
    "a summary of W&B: it has only the last value of each metric and is no log. Export the run's history instead, as "
    "CSV or JSONL"
)
TRL_TEXTS = f"the completions of TRL, {_TEXTS}"
VERL_TEXTS = f"the rollout data of verl, {_TEXTS}"


def foreign_kind(path: Path) -> str:
    """Returns a text for a message: the kind of a file or directory, and the file to read instead.

    It knows W&B's summary, verl's rollout data, and TRL's completions by their name; for others it returns "". The
    first files of a directory decide. Raises OSError if a file cannot be read.
    """
    if path.is_dir():
        firsts = (min(path.glob(pattern), default=None) for pattern in ("*.jsonl", "completions_*.parquet"))
        return next(filter(None, (foreign_kind(first) for first in firsts if first is not None)), "")
    if path.suffix == ".parquet":
        return TRL_TEXTS if re.fullmatch(r"completions_\d+\.parquet", path.name) else ""
    row, is_whole = _first_object(path)
    if row.keys() >= {"_wandb"} or path.name == "wandb-summary.json" or (is_whole and row.keys() >= _ROW_OF_HISTORY):
        return SUMMARY
    is_text = all(isinstance(row.get(name), str) for name in ("input", "output"))
    return VERL_TEXTS if is_text and not any(isinstance(value, list) for value in row.values()) else ""


def _first_object(path: Path) -> tuple[dict[str, Any], bool]:
    """Returns the JSON object in a file or in its first line, and whether it is the whole of a .json file.

    The object is empty if there is none.
    """
    with path.open("rb") as file:
        start = file.read(_MOST_BYTES)
    for text, is_whole in ((start, path.suffix == ".json"), (start.partition(b"\n")[0], False)):
        with contextlib.suppress(ValueError):
            found = parse_json(text)
            return (found, is_whole) if isinstance(found, dict) else ({}, False)
    return {}, False
