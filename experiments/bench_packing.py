"""Measures which share of the computed places hold a token, for rows of several lengths and mixes of responses.

    python experiments/bench_packing.py --json benchmarks/packing.json

A mix is 64 prompts with 16 responses each, as in arXiv 2602.01826 (table 1, figure 6). Its lengths have a long tail,
their mean grows from about 1,000 tokens through the surge to 3,500, and some are cut off at 8,192. Other mixes are
harder. The lengths are drawn from lognormal and normal distributions with seeds; recorded lengths of such a run are not
available. ``row_share`` counts the rows alone, ``share`` the whole micro-batches that a step computes. Both are means
over the seeds. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.trainer.packing import max_micro_batches
from rljax.trainer.rows import first_fit, lay_out_rows

PROMPTS, GROUP, LONGEST_PROMPT, LONGEST_RESPONSE = 64, 16, 1024, 8192
COUNT, LONGEST = PROMPTS * GROUP, LONGEST_PROMPT + LONGEST_RESPONSE
# The tokens of a row and the rows of a micro-batch. A row fits one or two of the longest sequences, or three or four of
# the longest responses with a usual prompt. All lengths are multiples of 1,024 tokens.
SHAPES = ((9216, 4), (9216, 8), (9216, 16), (18432, 4), (18432, 8), (25600, 4), (33792, 4))


def lognormal(mean: float, sigma: float) -> Callable[[np.random.Generator], np.ndarray]:
    """Returns a function that draws lengths of that mean, before they are cut off."""
    return lambda rng: rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, COUNT)


def cut_off(
    share: float, others: Callable[[np.random.Generator], np.ndarray]
) -> Callable[[np.random.Generator], np.ndarray]:
    """Returns a function that draws the same lengths, but a share of the responses never ends."""
    return lambda rng: np.where(rng.random(COUNT) < share, np.inf, others(rng))


MIXES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "short, mean 300": lognormal(300, 0.6),
    "before the surge, mean 1,000": lognormal(1000, 0.8),
    "in the surge, mean 2,000": lognormal(2000, 0.9),
    "after the surge, mean 3,500": lognormal(4200, 1.0),
    "30% cut off": cut_off(0.3, lognormal(2500, 0.8)),
    "half cut off, the others near 5,000": cut_off(0.5, lambda rng: rng.normal(5000, 1200, COUNT)),
    "all cut off": cut_off(1.0, lognormal(1000, 1.0)),
}


def responses_of(mix: str, rng: np.random.Generator) -> np.ndarray:
    """Draws the lengths of the responses of a batch, cut off at the limit."""
    return np.clip(np.ceil(MIXES[mix](rng)), 1, LONGEST_RESPONSE).astype(int)


def draw(mix: str, seed: int) -> tuple[list[int], float, float]:
    """Returns the lengths with their prompts, the mean response length and the share of responses cut off."""
    rng = np.random.default_rng(seed)
    responses = responses_of(mix, rng)
    prompts = np.clip(rng.lognormal(np.log(120), 0.5, PROMPTS), 20, LONGEST_PROMPT).astype(int)
    lengths = (responses + np.repeat(prompts, GROUP)).tolist()
    return lengths, float(responses.mean()), float((responses == LONGEST_RESPONSE).mean())


def measure(lengths: Sequence[int], row_tokens: int, rows: int) -> dict[str, float]:
    """Returns the shares of one batch, and the processor seconds of its layout."""
    micro, total = max_micro_batches(COUNT, LONGEST, row_tokens, rows), sum(lengths)
    longest_first = sorted(range(COUNT), key=lambda i: (-lengths[i], i))
    count = len(first_fit(lengths, longest_first, row_tokens))
    start = time.process_time()
    layout = lay_out_rows(lengths, [True] * COUNT, (micro, rows, row_tokens))
    seconds = time.process_time() - start
    shares = {"row_share": total / (count * row_tokens), "share": total / (layout.used * rows * row_tokens)}
    return shares | {"processor_s": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args(arguments)
    cases: list[dict[str, Any]] = []
    print("| lengths | mean | cut off | row x rows | row share | share |\n|---|---|---|---|---|---|")
    for mix in MIXES:
        drawn = [draw(mix, seed) for seed in range(options.seeds)]
        mean, cut = (float(np.mean([one[i] for one in drawn])) for i in (1, 2))
        for tokens, rows in SHAPES:
            measured = [measure(lengths, tokens, rows) for lengths, _, _ in drawn]
            means = {key: float(np.mean([each[key] for each in measured])) for key in measured[0]}
            cases.append({"lengths": mix, "mean": mean, "cut_off": cut, "row_tokens": tokens, "rows": rows} | means)
            shares = " | ".join(f"{means[key]:.1%}" for key in ("row_share", "share"))
            print(f"| {mix} | {mean:,.0f} | {cut:.0%} | {tokens:,} x {rows} | {shares} |")
    if options.json:
        record = {"command": shlex.join(["python", *sys.argv]), "seeds": options.seeds, "cases": cases}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
