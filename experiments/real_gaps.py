"""Measures the mismatch of a real model by dtype, engine, position and probability, on text that it did not write.

    python experiments/real_gaps.py texts MODEL OUT
    rljax compare OUT/tokens-256.parquet --serve --model MODEL --lengths 256 1024 --batch-size 4 --out OUT
    python experiments/real_gaps.py tables MODEL OUT --json FILE

For a server with an 8-bit cache, these commands come before the last one:

    rljax compare OUT/tokens-256.parquet --model MODEL --scorer vllm-decode:URL --out OUT
    mv OUT/tokens.parquet OUT/tokens-256.parquet

``texts`` cuts pieces of this repository's documentation: 16 tokens as a prompt, and 256 or 1,024 more as the response.
``rljax compare`` scores them with every engine, in each dtype. ``tables`` reads the columns of log-probabilities, and
adds the trainer's in 16 bits with a head in float32.

The gap of a token is |trainer - rollout| (nats), and k3 is exp(x) - x - 1 of x = trainer - rollout. The ratio of two
dtypes is the median over the pieces. Its interval has at least 95% coverage: it is the widest pair of order statistics
that the sign test rejects at no smaller level, and assumes nothing about the distribution.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.data.tokenizer import load_tokenizer
from rljax.errors import ConfigError, run_cli
from rljax.policy.families import read_config
from rljax.policy.head import matmul_precision
from rljax.policy.hf import load_params
from rljax.policy.model import cast_params
from rljax.policy.score import packed_logprobs
from rljax.record.token_dumps import TokenDump, make_dump, read_dump, write_dump

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *("algorithms", "architecture", "attention", "benchmarks", "compare", "data", "diagnose", "environments"),
    *("exact", "families", "metrics", "mismatch", "pods", "schedule", "sharding", "staleness"),
)
LENGTHS, PROMPT = (256, 1024), 16
DTYPES = ("bfloat16", "float16", "float32")
HEAD = "float32 head"
POSITIONS = (1, 65, 257)  # the first positions of the buckets, from 1
PROBABILITIES = (0.0, 0.1, 0.5, 0.9)  # the lower ends of the buckets
Pieces = list[np.ndarray]  # the numbers of the response tokens of each piece, float64 [r]


def texts(model: Path, out: Path) -> None:
    """Writes a dump of pieces without columns for each length, ``tokens-LENGTH.parquet``."""
    tokenizer = load_tokenizer(model)
    pages = {name: tokenizer.encode((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")) for name in PAGES}
    for length in LENGTHS:
        size = PROMPT + length
        long = {name: ids[:size] for name, ids in pages.items() if len(ids) >= size}
        mask = [False] * PROMPT + [True] * length
        write_dump(out / f"tokens-{length}.parquet", make_dump(list(long), list(long.values()), [mask] * len(long), {}))
        print(f"{out / f'tokens-{length}.parquet'}: {len(long)} pieces of {length} tokens")


def of_responses(dump: TokenDump, column: str) -> Pieces:
    """Returns the log-probabilities of a column at the response tokens."""
    pairs = zip(dump.logprobs[column], dump.response_mask, strict=True)
    return [np.asarray(vector[mask], np.float64) for vector, mask in pairs]


def with_float32_head(model: Path, dump: TokenDump, dtype: str) -> Pieces:
    """Computes the trainer's log-probabilities in ``dtype``, with the head's product in float32."""
    policy = read_config(model)

    @jax.jit
    def score(params: Any, tokens: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(matmul_precision(dtype)):
            rows = (tokens, jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
            return packed_logprobs(cast_params(params, dtype), policy, *rows, lm_head_dtype=jnp.float32).logprobs

    params = load_params(model, policy)
    found = [np.asarray(score(params, ids[None])[0], np.float64) for ids in dump.token_ids]
    return [vector[mask] for vector, mask in zip(found, dump.response_mask, strict=True)]


def k3(x: np.ndarray) -> np.ndarray:
    """Returns k3 of log-ratios."""
    return np.expm1(x) - x


def gaps(trainer: Pieces, rollout: Pieces) -> dict[str, Any]:
    """Returns the mean gap and k3 over all tokens, and of each piece."""
    apart = [a - b for a, b in zip(trainer, rollout, strict=True)]
    whole = np.concatenate(apart)
    each = {
        "mean_of_pieces": [float(np.abs(x).mean()) for x in apart],
        "k3_of_pieces": [float(k3(x).mean()) for x in apart],
    }
    numbers = {"mean": np.abs(whole).mean(), "k3": k3(whole).mean(), "largest": np.abs(whole).max()}
    return {name: float(value) for name, value in numbers.items()} | {"tokens": whole.size} | each


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, and the ends of its interval with at least 95% coverage (sign test)."""
    ordered, n = sorted(values), len(values)
    outside = [2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range(n // 2)]
    left_out = sum(share <= 0.05 for share in outside)
    if not left_out:
        raise ConfigError(f"{n} pieces allow no interval of 95%; give at least 6")
    return float(np.median(ordered)), ordered[left_out - 1], ordered[n - left_out]


def buckets(trainer: Pieces, rollout: Pieces) -> Iterator[tuple[str, float, float, int]]:
    """Yields the name, mean gap, k3 and tokens of each bucket of positions and of the trainer's probabilities."""
    apart = np.concatenate([a - b for a, b in zip(trainer, rollout, strict=True)])
    positions = np.concatenate([np.arange(1, len(x) + 1) for x in trainer])
    for values, edges, name in (
        (positions, POSITIONS, "position from"),
        (np.exp(np.concatenate(trainer)), PROBABILITIES, "probability from"),
    ):
        which = np.digitize(values, edges) - 1
        for i, edge in enumerate(edges):
            if (inside := which == i).any():
                yield (
                    f"{name} {edge}",
                    float(np.abs(apart[inside]).mean()),
                    float(k3(apart[inside]).mean()),
                    int(inside.sum()),
                )


def measured(model: Path, dump: TokenDump) -> dict[str, Any]:
    """Returns the gaps of all pairs of a trainer's dtype and an engine, the ratios of dtypes, and the buckets."""
    known = {name: of_responses(dump, name) for name in dump.first_runs}
    trainers = {dtype: known[f"jax:{dtype}"] for dtype in DTYPES if f"jax:{dtype}" in known}
    for dtype in [name for name in trainers if name != "float32"]:
        trainers[f"{dtype}, {HEAD}"] = with_float32_head(model, dump, dtype)
    engines = {name: numbers for name, numbers in known.items() if not name.startswith("jax:")}
    pairs = {f"{t} | {e}": gaps(trainer, engine) for t, trainer in trainers.items() for e, engine in engines.items()}
    ratios = {}
    for engine in sorted({name.partition(":")[0] for name in engines}):
        found = [pairs.get(f"{dtype} | {engine}:{dtype}") for dtype in DTYPES[:2]]
        if None not in found:
            for kind in ("mean", "k3"):
                values = [a / b for a, b in zip(*(each[f"{kind}_of_pieces"] for each in found if each), strict=True)]
                ratios[f"{kind}, {engine}"] = median_interval(values)
    split = {
        f"{dtype} | {name}": list(buckets(trainers[dtype], numbers))
        for name, numbers in engines.items()
        if (dtype := name.partition(":")[2]) in trainers
    }
    return {"pairs": pairs, "bfloat16_over_float16": ratios, "buckets": split}


def show(length: int, found: dict[str, Any]) -> None:
    """Prints the tables of one length: every pair of dtypes with vLLM, the ratios, and the buckets with vLLM."""
    pairs = {tuple(name.split(" | ")): f"{row['mean']:.2g} ({row['k3']:.1e})" for name, row in found["pairs"].items()}
    served = list(dict.fromkeys(engine for _, engine in pairs if engine.startswith("vllm:")))
    print(f"\n{length} tokens: mean gap (k3)\n\n| trainer | {' | '.join(served)} |\n|---" + "|---" * len(served) + "|")
    for trainer in dict.fromkeys(name for name, _ in pairs if not name.endswith(HEAD)):
        print(f"| {trainer} | {' | '.join(pairs[trainer, engine] for engine in served)} |")
    engines = dict.fromkeys(engine for _, engine in pairs)
    decodes = [engine for engine in engines if re.match(r"\S*(decode|forced):bfloat16", engine)]
    if any("fp8" in name for name in decodes):
        print("\n| decode | bfloat16 trainer |\n|---|---|")
        print("\n".join(f"| {name} | {pairs['bfloat16', name]} |" for name in decodes))
    print("\n| bfloat16 / float16 | median of the pieces | 95% |\n|---|---|---|")
    for name, (middle, low, high) in found["bfloat16_over_float16"].items():
        print(f"| {name} | {middle:.3g} | {low:.3g} to {high:.3g} |")
    split = {
        name.replace(" | ", ", "): {row[0]: row[1] for row in rows}
        for name, rows in found["buckets"].items()
        if "| vllm:" in name
    }
    print("\n| mean gap | " + " | ".join(split) + " |\n|---" + "|---" * len(split) + "|")
    for bucket in next(iter(split.values()), {}):
        print(f"| {bucket} | " + " | ".join(f"{rows[bucket]:.2g}" for rows in split.values()) + " |")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["texts", "tables"])
    parser.add_argument("model", type=Path, help="directory of the model")
    parser.add_argument("out", type=Path, help="directory of the bench")
    parser.add_argument("--json", type=Path, help="file for the numbers of the tables")
    options = parser.parse_args(argv)
    if options.what == "texts":
        texts(options.model, options.out)
        return 0
    document = {}
    for length in LENGTHS:
        if (path := options.out / f"tokens-{length}.parquet").exists():
            document[str(length)] = measured(options.model, read_dump(path))
            show(length, document[str(length)])
    if options.json:
        command = f"python experiments/real_gaps.py tables models/{options.model.name} OUT --json {options.json.name}"
        numbers = {"command": command, "model": options.model.name, "lengths": document}
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main, sys.argv[1:]))
