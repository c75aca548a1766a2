"""Keeps the rows of a study in one Parquet file, with a line for each arm, seed and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from rljax.distributed.files import replacing
from rljax.record.rows import Row, is_accuracy

COLUMNS = (
    *("step", "reward/mean", "response_length/mean", "response_length/truncated_fraction"),
    *("schedule/learning_rate", "schedule/surge_step", "schedule/decay_period"),
    *("mismatch/log_ppl_abs_diff", "mismatch/kl", "mismatch/k3_kl", "mismatch/logprob_abs_diff_mean"),
    *("mismatch/extreme_rate", "mismatch_self/log_ppl_abs_diff"),
    *("policy/entropy", "policy/reference_kl", "optimizer/grad_norm", "optimizer/grad_noise"),
    "optimizer/skipped_updates",
    *("is/token_fraction_above", "is/sequence_effective_sample_size", "time/step_s"),
)
"""The metrics in the file, besides the accuracies of evaluations. Missing values are null."""

INTEGERS = {"step", "schedule/surge_step", "schedule/decay_period", "optimizer/skipped_updates"}
"""The columns that are int32; the others are float32."""

Runs = Mapping[tuple[str, int], Sequence[Row]]  # the rows of each (arm, seed)


def write_table(path: Path, runs: Runs) -> None:
    """Writes the file, with one rename at the end."""
    names = [*COLUMNS, *sorted({key for rows in runs.values() for row in rows for key in row if is_accuracy(key)})]
    lines = [(arm, seed, row) for (arm, seed), rows in runs.items() for row in rows]
    columns: dict[str, pyarrow.Array] = {
        "arm": pyarrow.array([arm for arm, _, _ in lines]).dictionary_encode(),
        "seed": pyarrow.array([seed for _, seed, _ in lines], pyarrow.int32()),
    }
    for name in names:
        kind, to = (pyarrow.int32(), int) if name in INTEGERS else (pyarrow.float32(), np.float32)
        values = [row.get(name) for _, _, row in lines]
        columns[name] = pyarrow.array([None if value is None else to(value) for value in values], kind)
    floats = [name for name, column in columns.items() if column.type == pyarrow.float32()]
    with replacing(path) as partial:
        # Signs and exponents apart from the digits take two thirds of the space.
        split = {"use_dictionary": ["arm"], "use_byte_stream_split": floats}
        pyarrow.parquet.write_table(pyarrow.table(columns), partial, compression="zstd", **split)


def read_table(path: Path) -> dict[tuple[str, int], list[Row]]:
    """Reads a file that ``write_table`` wrote; null becomes None.

    Raises:
      ValueError: The file cannot be read.
    """
    try:
        lines = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    runs: dict[tuple[str, int], list[Row]] = {}
    for line in lines:
        run = (line.pop("arm"), line.pop("seed"))
        runs.setdefault(run, []).append(line)
    return runs
