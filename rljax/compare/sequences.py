"""Renames the fields of other projects' token files to rljax's names, and splits batches into sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rljax.data.files import FileRow

Line = tuple[Path, int, FileRow]
"""A file, the number of a line, and the JSON object in this line."""

_FIELDS = {
    "token_ids": "input_ids tokens",
    "prompt_ids": "prompt_token_ids prompt_tokens prompts",
    "response_ids": "completion_ids completion_token_ids response_token_ids response_tokens output_tokens output_ids "
    "responses",
    "response_mask": "token_loss_mask tool_mask completion_mask loss_mask loss_masks output_masks action_mask "
    "loss_weights",
    "prompt_mask": "prompt_masks",
}
_OF_TOKENS = {
    "logprobs/rollout": "rollout_logprobs rollout_log_probs sampling_per_token_logps sampler_per_token_logps "
    "sampling_logprobs sampler_logprobs generation_logprobs generator_logprobs inference_logprobs behavior_logprobs "
    "policy_logprobs response_logprobs infer_logprobs logprobs",  # logprobs: open-instruct, TRL's server
    "logprobs/trainer": "trainer_logprobs trainer_log_probs old_per_token_logps old_log_probs old_logprobs "
    "prev_logprobs current_logprobs policy_logprobs log_probs action_log_probs",
    "values/advantage": "advantages advantage loss_weights",
    "values/entropy": "entropy entropies",
}
"""The names in other projects of the fields of a sequence, and of the numbers of its tokens, by rljax's names.

In each table a name is used once: ``policy_logprobs`` are the trainer's beside ``behavior_logprobs``.
"""
_OTHERS = "sequence_id target_ids input_lengths sample_loss_mask response_length response_lengths"
COLUMNS = {*_FIELDS, *_OF_TOKENS, *" ".join([*_FIELDS.values(), *_OF_TOKENS.values(), _OTHERS]).split()}
"""The names of all fields that are read of a sequence, except those under ``logprobs`` and ``values``."""
IDS = {"token_ids", "response_ids", *" ".join([_FIELDS["token_ids"], _FIELDS["response_ids"]]).split()}
"""The names of the fields with the token ids of a sequence or of its response."""


def renamed(record: FileRow) -> FileRow:
    """Returns a record with our names of fields, and all numbers of its tokens under ``logprobs`` and ``values``."""
    known = {name: value for name, value in record.items() if value is not None}
    lists = {name: value for name, value in known.items() if isinstance(value, list)}
    flat = {name: value for name, value in lists.items() if name.startswith(("logprobs/", "values/"))}
    for found, table in ((known, _FIELDS), (flat, _OF_TOKENS)):
        used = set[str]()
        for own, names in table.items():
            free = (name for name in names.split() if name in lists and name not in used)
            if own not in lists and (name := next(free, "")):
                found[own] = lists[name]
                used.add(name)
    if "logprobs" in lists and flat.get("logprobs/rollout") is lists["logprobs"]:
        known["logprobs"] = {}
    nested = {kind: dict(known.get(kind, {})) for kind in ("logprobs", "values")}
    for name, value in flat.items():
        kind, _, own = name.partition("/")
        nested[kind].setdefault(own, value)
    return known | nested


def sequences_of(lines: Iterable[Line]) -> Iterator[Line]:
    """Yields each sequence in our names. A line with a batch gives one sequence for each row, without its padding.

    Raises ValueError if ``logprobs`` is neither an object nor a list, ``values`` no object, or the mask of a batch no
    list. The message names the line.
    """
    for file, number, line in lines:
        try:
            record = renamed(line)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}:{number}: logprobs and values must be objects of lists by name") from error
        ids = record.get("token_ids", record.get("response_ids"))
        if not (isinstance(ids, list) and ids and isinstance(ids[0], list)):
            yield file, number, _of_levanter(_of_trl(record))
            continue
        try:
            rows = [_of_levanter(_without_padding(_of_trl(_row(record, len(ids), i)))) for i in range(len(ids))]
        except TypeError as error:
            raise ValueError(f"{file}:{number}: the mask of a batch must be a list for each sequence") from error
        yield from ((file, number, row) for row in rows)


def _row(batch: FileRow, count: int, i: int) -> FileRow:
    """Returns one row of a batch of ``count`` rows."""
    return {
        name: value[i]
        if isinstance(value, list) and len(value) == count
        else (_row(value, count, i) if isinstance(value, dict) else value)
        for name, value in batch.items()
        if name != "sequence_id"
    }


def _of_trl(record: FileRow) -> FileRow:
    """Returns a sequence whose mask leaves out padding. TRL's tool mask is 1 there, and its completion mask 0."""
    tool, completion = record.get("tool_mask"), record.get("completion_mask")
    if not isinstance(tool, list) or not isinstance(completion, list) or len(tool) != len(completion):
        return record
    if record.get("response_mask") != tool:
        return record
    return record | {"response_mask": [a and b for a, b in zip(tool, completion, strict=True)]}


def _of_levanter(record: FileRow) -> FileRow:
    """Returns a sequence with all its tokens and marks.

    The numbers of Levanter's older batches belong to ``target_ids``. Where only ``loss_weights`` mark the response,
    they are 0 elsewhere.
    """
    targets, weights = record.get("target_ids"), record.get("loss_weights")
    if weights is not None and record.get("response_mask") == weights:
        record = record | {"response_mask": [bool(weight) for weight in weights]}
    if not isinstance(targets, list) or "token_ids" not in record:
        return record
    return record | {"token_ids": record["token_ids"][:1] + targets, "response_length": len(targets)}


def _without_padding(row: FileRow) -> FileRow:
    """Returns a row of a batch that ends with its last response token."""
    mask = row.get("response_mask", [])
    width, end = len(mask), max((i + 1 for i, mark in enumerate(mask) if mark), default=0)

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(each) for name, each in value.items()}
        return value[: max(end, 1)] if isinstance(value, list) and len(value) == width else value

    separate = ("prompt_ids", "prompt_mask")
    return {name: value if name in separate else kept(value) for name, value in row.items()}
