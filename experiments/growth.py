"""Measures how the cost of rljax's own work grows: with steps, sequences, tokens, layers, width, servers, processes.

    python experiments/growth.py --json benchmarks/growth.json

A case runs one piece of work at four sizes or more, each twice the size before. Its exponent is the slope of a line
through log(cost) and log(size), with its 95% interval. The cost is the least processor time of this process over the
rounds, or a count that is named. ``work`` is the exponent of the work itself. It is 1 if each token or row is read
once, and 0 if nothing should depend on the size. A case grows too fast if the whole interval is above ``work``. Costs
that do not depend on the size make exponents smaller. Cases that the JSON file has are not measured again. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_top_parse import PROMPT, make_rows, own_reply
from growth_systems import MOST_TRACKERS, exchange, feed, publish_to, sample_from
from scipy import stats

from rljax.compare.report import compare_columns
from rljax.data.prompts import DataConfig
from rljax.plan.dry_run import dry_run
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import load_params, save_params
from rljax.policy.model import abstract_params
from rljax.record.figure import plot_report
from rljax.record.rows import read_rows
from rljax.record.token_dumps import dump_of_responses, read_dump, write_dump
from rljax.record.writers import Recorder
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.servers.wire import Request, check_completion
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.run.config import Config, ModelConfig
from rljax.trainer.packing import TrainSequence, max_micro_batches, pack
from rljax.trainer.rows import lay_out_rows
from rljax.view.measure import choose_columns, measure
from rljax.view.page import Page
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import open_weight_directory
from rljax.weights.sums import array_checksum

ROOT = Path(__file__).parents[1]
SHAPE = PolicyConfig(256, 64, 128, 2, 4, 2, 16, tie_word_embeddings=True)
KEYS, LONGEST, VOCABULARY = 150, 8192, 151_936
Work = Callable[[], object]
Make = Callable[[int, Path], Work | contextlib.AbstractContextManager[Work]]


@dataclass(frozen=True)
class Case:
    """A piece of work whose cost is measured at several sizes."""

    what: str
    against: str  # the unit of the size
    sizes: Sequence[int]
    make: Make  # a function of the size and an empty directory; it returns the work, or opens it
    work: float = 1.0  # the exponent of the work itself
    returns_cost: bool = False  # whether the work returns its processor seconds, which another process measured


def doubling(largest: int, count: int = 5) -> list[int]:
    """Returns sizes up to ``largest``, each twice the one before."""
    return [largest >> power for power in reversed(range(count))]


# --- the record of a run ----------------------------------------------------------------------------------------------


def rows_up_to(step: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for one, numbers in enumerate(rng.normal(size=(step, KEYS)).tolist(), 1):
        lengths = {"response_length/mean": 100.0 + one, "schedule/learning_rate": 1e-6, "reward/mean": 0.5}
        yield {"step": one} | lengths | {f"mismatch/number_{i}": x for i, x in enumerate(numbers)}


def run_of(steps: int, directory: Path) -> Path:
    """Writes the record of a run with so many rows."""
    lines = (json.dumps(row) + "\n" for row in rows_up_to(steps))
    (directory / "metrics.jsonl").write_text("".join(lines))
    return directory


def write_columns(keys: int, directory: Path, first: int = 1) -> Work:
    recorder = Recorder(directory, 10**6, first_step=first, progress=False)
    row, following = dict.fromkeys((f"mismatch/number_{i}" for i in range(keys)), 0.5), iter(range(first, 10**6))
    return lambda: [recorder.write({"step": next(following)} | row) for _ in range(100)]


def write_rows(step: int, directory: Path) -> Work:
    return write_columns(KEYS, run_of(step, directory), step + 1)


# --- sequences --------------------------------------------------------------------------------------------------------


def dump_of(count: int, tokens: int, path: Path, *, ragged: bool = False) -> Path:
    """Writes a dump of so many responses, each with a prompt of 8 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * tokens, count) if ragged else np.full(count, tokens)
    ids = [rng.integers(0, 256, length).astype(np.int32) for length in lengths]
    rollout = [-rng.exponential(0.5, length).astype(np.float32) - np.float32(0.1) for length in lengths]
    trainer = [one + rng.normal(0, 0.01, len(one)).astype(np.float32) for one in rollout]
    prompts = [np.arange(8, dtype=np.int32)] * count
    names = [f"s{i}" for i in range(count)]
    return write_dump(path, dump_of_responses(names, prompts, ids, {"rollout": rollout, "trainer": trainer}, {}, {}))


def view(count: int, directory: Path) -> Work:
    path = dump_of(count, LONGEST, directory / "tokens.parquet")

    def work() -> str:
        dump, page = read_dump(path), Page("dump", None, [], "")
        page.add("dump", dump, measure(dump, choose_columns(dump)), tokens=300_000, alternatives=5)
        return page.text()

    return work


def compare(count: int, directory: Path) -> Work:
    path = dump_of(count, 16, directory / "tokens.parquet", ragged=True)
    return lambda: compare_columns(read_dump(path))


def parse(k: int) -> Make:
    def make(tokens: int, _: Path) -> Work:
        body, wire = own_reply(make_rows(np.random.default_rng(0), tokens), k), VllmBackend()
        request = Request(PROMPT, SamplingParams(tokens, reported=k), vocab_size=VOCABULARY)
        return lambda: check_completion("", wire.completion(ROLLOUTS, body, request), request, VOCABULARY)

    return make


def sequences_of(lengths: Sequence[int]) -> list[TrainSequence]:
    prompt = np.arange(16, dtype=np.int32)
    kinds = {length: (np.zeros(length, np.int32), np.zeros(length, np.float32)) for length in set(lengths)}
    return [TrainSequence(prompt, *kinds[length], 1.0, True) for length in lengths]


def pack_rows(lengths: Sequence[int], row_tokens: int) -> Work:
    sequences, longest = sequences_of(lengths), max(lengths) + 16
    micro = max_micro_batches(len(lengths), longest, row_tokens, 8)
    return lambda: pack(sequences, row_tokens=row_tokens, rows_per_micro_batch=8, micro_batches=micro)


def lay_out(count: int, _: Path) -> Work:
    """Lays out the mix that fills rows worst, in which half of the responses are cut off."""
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(count) < 0.5, LONGEST, np.clip(rng.normal(5000, 1200, count), 1, LONGEST))
    shape = max_micro_batches(count, 9216, 18432, 8), 8, 18432
    return lambda: lay_out_rows(lengths.astype(int).tolist(), [True] * count, shape)


# --- weights ----------------------------------------------------------------------------------------------------------


def publish_changed(changed: int, directory: Path) -> Work:
    """Writes deltas of a tensor of 2^24 elements, of which ``changed`` differ each time."""
    old = np.zeros(2**24, np.float16)
    files = open_weight_directory(PublishConfig(store="http"), str(directory), anchor_every=10**6)
    state = {"version": 0, "weights": old}
    sums = array_checksum(old)

    def work() -> None:
        state["version"] += 1
        weights = state["weights"].copy()
        weights[:: 2**24 // changed] += np.float16(1)
        state["weights"] = weights
        files.write([("weights", weights)], state["version"], {"weights": sums})

    return work


def load(shape: PolicyConfig, directory: Path) -> Work:
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract_params(shape))
    save_params(directory, params, shape, "bfloat16")
    return lambda: load_params(directory, shape)


def plan(layers: int, directory: Path) -> Work:
    config = json.loads((ROOT / "rljax/configs/toy-base/config.json").read_text())
    config["num_hidden_layers"] = layers
    config.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(config))
    rollout, data = RolloutConfig(engine="vllm", max_response_tokens=64), DataConfig(max_prompt_tokens=64)
    return lambda: dry_run(Config(model=ModelConfig(path=str(directory)), rollout=rollout, data=data))


def make_cases() -> list[Case]:
    """Returns all cases."""
    return [
        Case("100 rows are written", "rows before", doubling(20_000, 4), write_rows, 0),
        Case("a run that goes on reads its rows", "rows", doubling(20_000, 4), reading),
        Case("report.png", "rows", doubling(20_000, 4), lambda n, d: _plot(run_of(n, d))),
        Case("`rljax compare` reads and judges a dump", "sequences", doubling(100_000, 4), compare),
        Case("`rljax view` of responses of 8,192 tokens", "sequences", doubling(1000, 4), view),
        Case("a reply is read, k = 0", "tokens", doubling(LONGEST), parse(0)),
        Case("a reply is read, k = 20", "tokens", doubling(LONGEST), parse(20)),
        Case("128 responses are packed", "tokens of each", doubling(LONGEST), lambda n, _: pack_rows([n] * 128, 9216)),
        Case(
            "responses of 500 tokens are packed", "sequences", doubling(4096), lambda n, _: pack_rows([500] * n, 9216)
        ),
        Case("the worst mix is laid out in rows", "sequences", doubling(4096), lay_out),
        Case("a delta of 2^24 weights is written", "changed weights", doubling(2**22, 6), publish_changed),
        Case("weights are read", "layers", doubling(64), lambda n, d: load(replace(SHAPE, num_layers=n), d)),
        Case("weights are read", "width", doubling(1024, 4), lambda n, d: load(wide(n), d), 2),
        Case("`--dry-run`", "layers", doubling(256), plan),
        Case("100 rows are written", "columns", doubling(1200, 4), write_columns),
        Case("1,000 rows are given to trackers", "trackers", doubling(MOST_TRACKERS, 4), track),
        Case("1,024 responses are sampled and read", "servers", doubling(8, 4), sample_from, 0),
        Case("a tiny policy is published and verified", "servers", doubling(8, 4), publish_to),
        Case("process 0 sends 1 MiB in a step", "other processes", doubling(8, 4), exchange, returns_cost=True),
    ]


def track(count: int, directory: Path) -> Work:
    return feed(count, run_of(1000, directory), 1000)


def wide(width: int) -> PolicyConfig:
    """Returns a policy whose weights are nearly all in matrices of ``width`` x ``width``."""
    return replace(
        SHAPE, hidden_size=width, intermediate_size=2 * width, num_heads=width // 16, num_kv_heads=width // 16
    )


def reading(rows: int, directory: Path) -> Work:
    path = run_of(rows, directory) / "metrics.jsonl"
    return lambda: read_rows(path)


def _plot(run: Path) -> Work:
    return lambda: plot_report([run], run / "report.png")


# --- the program ------------------------------------------------------------------------------------------------------


def cost(case: Case, size: int, rounds: int) -> float:
    """Returns the least processor seconds of the work at a size."""
    with tempfile.TemporaryDirectory() as directory:
        made = case.make(size, Path(directory))
        with made if isinstance(made, contextlib.AbstractContextManager) else contextlib.nullcontext(made) as work:
            if case.returns_cost:
                return min(float(work()) for _ in range(rounds))  # type: ignore[arg-type]
            work()
            times = []
            for _ in range(rounds):
                start = time.process_time()
                work()
                times.append(time.process_time() - start)
    return min(times)


def fit(sizes: Sequence[int], costs: Sequence[float]) -> tuple[float, float]:
    """Returns the slope of log(cost) over log(size), and the half of its 95% interval."""
    line = stats.linregress(np.log(sizes), np.log(costs))
    return float(line.slope), float(line.stderr * stats.t.ppf(0.975, len(sizes) - 2))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each size")
    parser.add_argument("--only", default="", help="measure the cases whose line has this text")
    parser.add_argument("--shrink", type=int, default=1, help="a factor by which all sizes are smaller")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    known = options.json is not None and options.json.exists()
    found = {name_of(one): one for one in (json.loads(options.json.read_text())["cases"] if known else ())}
    command = shlex.join(["python", *sys.argv])
    print("| what | against | sizes | seconds | exponent | of the work |\n|---|---|---|---|---|---|")
    for case in make_cases():
        name = f"{case.what}, {case.against}"
        if options.only not in name:
            continue
        if name not in found:
            found[name] = measure_case(case, options.rounds, options.shrink)
        print(line_of(found[name]), flush=True)
        if options.json:
            result = {"command": command, "machine": platform.machine(), "cases": [*found.values()]}
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def name_of(found: dict[str, Any]) -> str:
    return f"{found['what']}, {found['against']}"


def measure_case(case: Case, rounds: int, shrink: int) -> dict[str, Any]:
    """Measures a case at all its sizes, divided by ``shrink``."""
    sizes = [max(1, size // shrink) for size in case.sizes]
    costs = [cost(case, size, rounds) for size in sizes]
    slope, half = fit(sizes, costs)
    numbers = {"sizes": sizes, "seconds": costs, "exponent": slope, "half_interval": half, "work": case.work}
    return {"what": case.what, "against": case.against, **numbers}


def line_of(found: dict[str, Any]) -> str:
    """Returns the line of the table."""
    sizes, costs = found["sizes"], found["seconds"]
    ends = f"{sizes[0]:,} - {sizes[-1]:,} | {costs[0]:.3g} - {costs[-1]:.3g}"
    exponent = f"{found['exponent']:.2f} ± {found['half_interval']:.2f}"
    return f"| {found['what']} | {found['against']} | {ends} | {exponent} | {found['work']:g} |"


if __name__ == "__main__":
    main()
