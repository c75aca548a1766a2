"""Compares two engines from their files, without a server or a model.

    pip install '.[train]' && python examples/offline_comparison.py
    python examples/offline_comparison.py TRAINER.parquet#COLUMN ROLLOUT.parquet#COLUMN

Both files have the same sequences with one or more columns of log-probabilities. They are token dumps, JSONL or an
export that docs/compare.md names. Without arguments the program first makes two small dumps: it samples tokens from
logits rounded to bfloat16, and scores them with and without the rounding.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax.compare.importers import read_tokens
from rljax.compare.report import Comparison, compare_columns, to_text
from rljax.compare.scorers import score_column
from rljax.errors import caller_errors, run_cli
from rljax.record.token_dumps import ColumnSource, make_dump, write_dump

PROMPT, RESPONSE, VOCABULARY = 4, 60, 64  # tokens, tokens, ids


def make_files(directory: Path, sequences: int = 32, seed: int = 0) -> tuple[str, str]:
    """Writes a dump of a trainer and a dump of a rollout engine. Returns ``FILE#COLUMN`` of each."""
    rng = np.random.default_rng(seed)
    exact = jnp.asarray(rng.normal(0.0, 3.0, (sequences, RESPONSE, VOCABULARY)), jnp.float32)
    rounded = exact.astype(jnp.bfloat16).astype(jnp.float32)
    responses = jax.random.categorical(jax.random.key(seed), rounded)  # [b, t]
    prompts = rng.integers(VOCABULARY, size=(sequences, PROMPT))
    tokens = np.concatenate([prompts, responses], axis=1)
    mask = np.arange(PROMPT + RESPONSE) >= PROMPT
    written = []
    for name, logits, dtype in (("trainer", exact, "float32"), ("rollout", rounded, "bfloat16")):
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), responses[..., None], axis=-1)[..., 0]
        columns = np.concatenate([np.full((sequences, PROMPT), np.nan), scores], axis=1)
        dump = make_dump(
            [f"sequence {i}" for i in range(sequences)],
            tokens,
            [mask] * sequences,
            {name: columns},
            {name: ColumnSource(engine=name, dtype=dtype, temperature=1.0)},
            {"temperature": 1.0},
        )
        write_dump(directory / f"{name}.parquet", dump)
        written.append(f"{directory / name}.parquet#{name}")
    return written[0], written[1]


def compare(trainer: str, rollout: str) -> Comparison:
    """Compares two ``FILE#COLUMN``. Sequences are matched by their ids, and their tokens must be equal."""
    dump = read_tokens(trainer.rpartition("#")[0])
    for role, place in (("trainer", trainer), ("rollout", rollout)):
        vectors, source = score_column(f"dump:{place}", dump)
        dump = dump.with_column(role, vectors, source)
    return compare_columns(dump, ["trainer", "rollout"])


def main(arguments: Sequence[str]) -> int:
    """Prints the comparison; returns 0 if the pair passes, 1 if it fails, and 2 for wrong arguments."""
    if len(arguments) not in (0, 2) or not all("#" in each for each in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, caller_errors():
        trainer, rollout = arguments or make_files(Path(folder))
        comparison = compare(trainer, rollout)
    print(to_text(comparison))
    return 0 if comparison.passed else 1


if __name__ == "__main__":
    sys.exit(run_cli(main))
