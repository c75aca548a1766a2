"""Models the seconds of one training step on 1 to 32 nodes of 8 H100 as a sum of parts; docs/scale.md explains them.

    python experiments/scale_model.py --json benchmarks/scale.json

Nothing here ran on an H100. A part is bytes or operations divided by a rate of ``scale_rates.py``. Operations and
collectives come from the compiled step (benchmarks/compile.json), host work from bench_host.py
(benchmarks/host_side.json), and the share of full rows from bench_packing.py (benchmarks/packing.json). This program
measures the one thread that writes weights, in memory. Servers and trainers have separate GPUs and work in turn. The
table shows the fastest way to share the nodes. Prints Markdown.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_packing import draw, responses_of
from compile_table import kernel_flops
from safetensors.numpy import load_file
from scale_rates import (
    CHANGED,
    DECODING,
    DELTA_BYTES,
    NEMO,
    NEMO_STEPS,
    NETWORK,
    PCIE,
    PEAK,
    STORAGE,
    TRAINING_TOKENS,
    Decoding,
    PublishedStep,
    Rate,
)

from rljax.plan.compile import model_flops
from rljax.policy.config import PolicyConfig
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import open_weight_directory
from rljax.weights.sums import array_checksum

ROOT = Path(__file__).parents[1]
CARDS, ROW_TOKENS, LONGEST_ROWS = 8, 9216, 1024  # the packed batch has a row for each response
PLACE_BYTES = 30  # bytes of a position in the packed batch: five int32, two float32 and two masks (PackedBatch)
CHECKPOINT_EVERY = 20  # steps, the value of configs/paper/setup.yaml
LLAMA = PolicyConfig(128256, 4096, 14336, 32, 32, 8, 128)  # the model of torchtitan's table
MIXES = {"before the surge, mean 1,000": "short", "after the surge, mean 3,500": "long"}
NODES = (1, 2, 8, 32)
OVERLAPPED = ("parse and decode replies", "checkpoint, in the background")


class Model(NamedTuple):
    """A policy and the layout of its trainer; ``rows`` are names in benchmarks/compile.json by number of trainer GPUs.

    The row of 0 GPUs is for every multiple of ``fsdp``, because all replicas have equal micro-batches.
    """

    name: str
    parameters: float
    fsdp: int
    rows: dict[int, str]


MODELS = (
    Model("8B", 8_190_735_360, 8, {4: "8B, lean", 0: "8B, 64 H100, mesh.replica 8"}),
    Model("32B", 32_762_123_264, 16, {0: "32B, 64 H100, mesh.replica 4"}),
)


# --- the parts, in seconds --------------------------------------------------------------------------------------------


def token_seconds(decoding: Decoding) -> Callable[[int], float]:
    """Returns a function from the number of requests to a server's seconds for one more token of each.

    It interpolates between the published points; outside of them the nearest point counts.
    """
    counts = [count for count, _ in decoding.points]
    seconds = [count / rate for count, rate in decoding.points]
    return lambda running: float(np.interp(running, counts, seconds))


def decode_seconds(lengths: Sequence[int], limit: int, seconds: Callable[[int], float]) -> float:
    """Models the seconds of one server for responses of these lengths; at most ``limit`` run at a time."""
    waiting, running = list(reversed(lengths)), list[int]()  # running: the server's token count at each response's end
    now, spent = 0, 0.0
    while waiting or running:
        while waiting and len(running) < limit:
            heapq.heappush(running, now + waiting.pop())
        end = running[0]
        spent += (end - now) * seconds(len(running))
        now = end
        while running and running[0] == now:
            heapq.heappop(running)
    return spent


def rollout_seconds(lengths: Sequence[int], gpus: int, decoding: Decoding) -> float:
    """Models the seconds of the slowest server; all servers have the same number of responses."""
    servers, limit = gpus // decoding.gpus, int(decoding.points[-1][0])
    return max(decode_seconds(lengths[i::servers], limit, token_seconds(decoding)) for i in range(servers))


def trained_share() -> float:
    """Returns the share of a card's peak that the published training run used, counted by ``model_flops``."""
    flops = model_flops(LLAMA, 1, [8192]) / 8192 * TRAINING_TOKENS.value
    return flops / PEAK.value


def step_seconds(row: dict[str, Any], rows: int, gpus: int, fsdp: int, share: float) -> float:
    """Models the seconds of the update: the products and collectives of each micro-batch, then the rest.

    Products run at a share of the peak. The sum of the gradients over replicas is a ring over the cards' adapters.
    """
    flops = sum(row["flops_per_micro_batch"].values()) + kernel_flops(row)
    micro = flops / (PEAK.value * share) + row["roofline"]["micro_batch_s"]["links"]
    replicas = max(1, gpus // fsdp)
    across = sum(one["bytes"] for one in row["collectives"] if one["per"] == "step" and one["across_nodes"])
    once = row["roofline"]["step_s"]["memory"] + all_reduce_seconds(across, replicas)
    return math.ceil(rows / gpus) * micro + once


def all_reduce_seconds(size: float, members: int) -> float:
    """Models the seconds of a ring over the network, in which every member sends twice (n - 1) / n of the bytes."""
    return 2 * size * (members - 1) / members / NETWORK.value


def publish_seconds(size: float, write: float, read: float) -> float:
    """Models a publish: one process gathers the 16-bit weights and writes them, then all servers read them at once."""
    return size / PCIE.value + size / min(write, STORAGE.value) + size / min(read, STORAGE.value)


def sharded_publish_seconds(size: float, writers: int) -> float:
    """Models a publish in which each trainer node writes its part and each server node reads all, at storage's rate."""
    return size / (writers * STORAGE.value) + size / STORAGE.value


def checkpoint_seconds(parameters: float, fsdp: int) -> tuple[float, float]:
    """Models a checkpoint of float32 masters and moments: the copy to the hosts, and the write in the background."""
    size = 12 * parameters
    return size / fsdp / PCIE.value, size / (max(1, fsdp // CARDS) * STORAGE.value)


# --- a step -----------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The measurements of other programs, from benchmarks/, and the rates of the writer and the reader."""

    compiled: dict[str, Any]
    host: dict[str, Any]
    packing: dict[str, Any]
    write: float
    read: float


def layouts(nodes: int, model: Model) -> Iterator[tuple[int, int]]:
    """Yields (GPUs that train, GPUs that serve): half of one node, or whole nodes with a power of two for training."""
    if nodes == 1:
        yield from ([(4, 4)] if 4 in model.rows else [])
        return
    for power in range(nodes.bit_length()):
        trainer = CARDS * 2**power
        if trainer < CARDS * nodes and trainer % model.fsdp == 0:
            yield trainer, CARDS * nodes - trainer


def step_parts(model: Model, mix: str, layout: tuple[int, int], inputs: Inputs) -> dict[str, float]:
    """Models the seconds of each part of a step."""
    trainer, servers = layout
    responses, tokens = responses_of(mix, np.random.default_rng(0)).tolist(), sum(draw(mix, 0)[0])
    measured = inputs.host["cases"][0]  # the case without the likeliest tokens
    host = {name: part["processor_s"] * tokens / measured["tokens"] for name, part in measured["parts"].items()}
    batch = LONGEST_ROWS * ROW_TOKENS * PLACE_BYTES
    copied, written = checkpoint_seconds(model.parameters, min(model.fsdp, trainer))
    row = inputs.compiled[model.rows.get(trainer, model.rows[0])]
    return {
        "rollout": rollout_seconds(responses, servers, DECODING[model.name, MIXES[mix]]),
        "parse and decode replies": host["replies read and checked"] + host["texts for the rewards"],
        "pack": host["advantages and sequences"] + host["rows and masks"],
        "broadcast": 2 * batch / NETWORK.value + batch / PCIE.value,
        "step": step_seconds(row, rows_of(tokens, mix, inputs), trainer, model.fsdp, trained_share()),
        "publish": publish_seconds(2 * model.parameters, inputs.write, inputs.read),
        "checkpoint": copied / CHECKPOINT_EVERY,
        "checkpoint, in the background": written,
    }


def rows_of(tokens: int, mix: str, inputs: Inputs) -> int:
    """Returns the number of rows that the tokens fill."""
    shares = [
        one["row_share"] for one in inputs.packing["cases"] if (one["lengths"], one["row_tokens"]) == (mix, ROW_TOKENS)
    ]
    return math.ceil(tokens / (ROW_TOKENS * shares[0]))


def total(parts: dict[str, float]) -> float:
    """Sums the seconds of a step.

    Work in the background counts only as far as it takes longer than the foreground.
    """
    replies = max(0.0, parts["parse and decode replies"] - parts["rollout"])
    waited = sum(seconds for name, seconds in parts.items() if name not in OVERLAPPED) + replies
    hidden = CHECKPOINT_EVERY * waited
    return waited + max(0.0, parts["checkpoint, in the background"] - hidden) / CHECKPOINT_EVERY


def best_step(model: Model, mix: str, nodes: int, inputs: Inputs) -> dict[str, Any] | None:
    """Returns the parts of the fastest layout; None if the trainer's state does not fit half of the nodes."""
    candidates: list[dict[str, Any]] = []
    for layout in layouts(nodes, model):
        parts = step_parts(model, mix, layout, inputs)
        candidates.append({"trainer_gpus": layout[0], "server_gpus": layout[1], "parts": parts, "total": total(parts)})
    if not candidates:
        return None
    best = min(candidates, key=lambda one: one["total"])
    counted = {name: seconds for name, seconds in best["parts"].items() if name not in OVERLAPPED}
    together = best["total"] - counted["rollout"] - counted["step"] + max(counted["rollout"], counted["step"])
    return best | {"limit": max(counted, key=lambda name: counted[name]), "total_if_rollout_hid_the_step": together}


def against_published(one: PublishedStep, model: Model, inputs: Inputs) -> dict[str, Any]:
    """Models a published step of another framework, with rollout and update in turn on the same GPUs.

    All responses have the mean length.
    """
    kind = "short" if one.mean_tokens < 2000 else "long"
    rollout = rollout_seconds([one.mean_tokens] * one.responses, one.gpus, DECODING[model.name, kind])
    rows = math.ceil(one.responses * one.mean_tokens / ROW_TOKENS)
    step = step_seconds(inputs.compiled[model.rows[0]], rows, one.gpus, model.fsdp, trained_share())
    return {**one._asdict(), "rollout": rollout, "step": step, "share": (rollout + step) / one.seconds}


# --- the program ------------------------------------------------------------------------------------------------------


def measure_files(tensors: int = 8, elements: int = 2**25, rounds: int = 5) -> tuple[float, float]:
    """Measures the bytes per second that one thread writes as a version of the policy, and reads back, in memory.

    Seconds are processor time with the kernel's work, because other programs may run at the same time.
    """
    arrays = {f"t{i}": np.full(elements, i, np.float16) for i in range(tensors)}
    sums = {name: array_checksum(array) for name, array in arrays.items()}
    size, times = tensors * elements * 2, list[tuple[float, float]]()
    files = open_weight_directory(PublishConfig(), None)
    try:
        for version in range(rounds):
            start = time.process_time()
            written = files.write(arrays.items(), version, sums)
            middle = time.process_time()
            for path in sorted(written.path.glob("*.safetensors")):
                load_file(path)
            times.append((middle - start, time.process_time() - middle))
            files.drop_old()
    finally:
        files.close()
    write, read = (statistics.median(each) for each in zip(*times, strict=True))
    return size / write, size / read


def read_inputs(write: float, read: float) -> Inputs:
    compiled, host, packing = (
        json.loads((ROOT / f"benchmarks/{name}.json").read_text()) for name in ("compile", "host_side", "packing")
    )
    return Inputs(compiled, host, packing, write, read)


def steps_table(steps: list[dict[str, Any]]) -> str:
    """Formats a line for each model, length mix and number of nodes."""
    shown = ("rollout", "pack", "broadcast", "step", "publish", "checkpoint")
    lines = [
        f"| | nodes | GPUs: train + serve | {' | '.join(shown)} | s a step | limit | hidden: replies | checkpoint |",
        "|---" * (len(shown) + 7) + "|",
    ]
    for one in steps:
        name = f"{one['model']}, {one['mix'].partition(',')[0]}"
        if "parts" not in one:
            lines.append(f"| {name} | {one['nodes']} | does not fit |" + " |" * (len(shown) + 4))
            continue
        parts = one["parts"]
        cells = [name, str(one["nodes"]), f"{one['trainer_gpus']} + {one['server_gpus']}"]
        cells += [f"{parts[part]:.3g}" for part in shown]
        cells += [f"{one['total']:.0f}", one["limit"], *(f"{parts[part]:.2g}" for part in OVERLAPPED)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def publish_variants(model: Model, inputs: Inputs) -> dict[str, float]:
    """Models the seconds of a publish now, and of two variants."""
    size = 2 * model.parameters
    delta = CHANGED.value * model.parameters * DELTA_BYTES.value
    return {
        "one writer, as it is": publish_seconds(size, inputs.write, inputs.read),
        "each of 4 trainer nodes writes its part": sharded_publish_seconds(size, 4),
        "changed weights alone, one writer": publish_seconds(delta, inputs.write, inputs.read),
    }


def rates_used(inputs: Inputs) -> dict[str, Rate]:
    """Returns the rates of the sums, without the servers' points."""
    here = "this program, one thread, in memory (/dev/shm), by the processor's time, on a shared machine of 2 cores"
    return {
        "share of the peak that training reaches": Rate(trained_share(), "share", "published", TRAINING_TOKENS.source),
        "16-bit products": PEAK,
        "network": NETWORK,
        "between a card and its host": PCIE,
        "shared storage": STORAGE,
        "weights written": Rate(inputs.write, "B/s", "measured", here),
        "weights read": Rate(inputs.read, "B/s", "measured", here),
        "weights changed by a step": CHANGED,
        "a changed weight in a delta": DELTA_BYTES,
    }


def show(record: dict[str, Any]) -> None:
    """Prints the tables of docs/scale.md."""
    print(steps_table(record["steps"]), "\n\n| rate | | | from |\n|---|---|---|---|")
    for name, rate in record["rates"].items():
        print(f"| {name} | {rate['value']:.4g} {rate['unit']} | {rate['kind']} | {rate['source']} |")
    variants = list(record["publish_s"]["8B"])
    print(f"\n| a publish, s | {' | '.join(variants)} |\n|---{'|---' * len(variants)}|")
    for name, seconds in record["publish_s"].items():
        print(f"| {name} | {' | '.join(f'{seconds[variant]:.2g}' for variant in variants)} |")
    print("\n| | GPUs | responses x tokens | published s | rollout + step here | share |\n|---|---|---|---|---|---|")
    for one in record["against_published"]["steps"]:
        both = f"{one['rollout']:.0f} + {one['step']:.0f}"
        batch = f"{one['responses']:,} x {one['mean_tokens']:,}"
        print(f"| {one['model']} | {one['gpus']} | {batch} | {one['seconds']} | {both} | {one['share']:.0%} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    inputs = read_inputs(*measure_files())
    of_name = {model.name: model for model in MODELS}
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "steps": [
            {"model": model.name, "mix": mix, "nodes": nodes, **(best_step(model, mix, nodes, inputs) or {})}
            for model in MODELS
            for mix in MIXES
            for nodes in NODES
        ],
        "rates": {name: rate._asdict() for name, rate in rates_used(inputs).items()},
        "decoding": {" ".join(key): one._asdict() for key, one in DECODING.items()},
        "publish_s": {model.name: publish_variants(model, inputs) for model in MODELS},
        "against_published": {
            "source": NEMO,
            "steps": [against_published(one, of_name[one.model], inputs) for one in NEMO_STEPS],
        },
    }
    show(record)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
