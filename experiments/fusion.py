"""Counts what `rljax.policy.hints.opaque` saves: parts of Qwen3-4B are compiled with and without it, but not run.

    PYTHONPATH=. .venv-compile/bin/python experiments/fusion.py h100:1x8 tpu:v5p:2x2x4 --json benchmarks/fusion.json

Each part is compiled for one device, in bfloat16, with 9,216 tokens: the SwiGLU and the products of queries, keys and
values, each forward and backward with the forward computed again, and the head. A number is the memory traffic of the
compiled program, counted by `rljax.plan.count`. Without `opaque` the arrays go to their readers directly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from rljax.plan.compile import COMPILER_OPTIONS
from rljax.plan.count import count_program
from rljax.plan.hlo import parse_module
from rljax.plan.machines import Machine, parse_machine, topology_devices
from rljax.policy import head, layers
from rljax.policy.config import PolicyConfig

TOKENS, WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 9216, 2560, 9728, 32, 8, 128, 151_936
Part = tuple[Callable[..., Any], list[tuple[int, ...]]]


def swiglu(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """Computes the policy's SwiGLU with these weights."""
    shape = PolicyConfig(VOCAB, WIDTH, INNER, 1, HEADS, KV_HEADS, HEAD_DIM)
    mlp = nnx.eval_shape(lambda: layers.MLP(shape, nnx.Rngs(0)))
    mlp.gate, mlp.up, mlp.down = (nnx.Param(weight) for weight in (gate, up, down))
    return mlp(x, None)[0]


def attention_inputs(x: Any, *weights: Any) -> Any:
    """Computes queries, keys and values."""
    return layers.linear(("btd,dhk->bthk", "btd,dgk->btgk", "btd,dgk->btgk"), x, weights)


def scores(hidden: Any, table: Any) -> Any:
    """Computes the log-probabilities and the entropies of tokens."""
    return head.token_logprobs(hidden, table, jnp.zeros(hidden.shape[0], jnp.int32))[:2]


X = (1, TOKENS, WIDTH)
PARTS: dict[str, Part] = {
    "SwiGLU": (jax.checkpoint(swiglu), [X, (WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]),
    "queries, keys and values": (
        jax.checkpoint(attention_inputs),
        [X, (WIDTH, HEADS, HEAD_DIM), *[(WIDTH, KV_HEADS, HEAD_DIM)] * 2],
    ),
    "head": (scores, [(TOKENS, WIDTH), (VOCAB, WIDTH)]),
}


def traffic(part: Part, machine: Machine) -> int:
    """Compiles the forward and backward of a part, and returns the bytes of its memory traffic."""
    function, shapes = part
    place = SingleDeviceSharding(topology_devices(machine)[0])

    def both(given: list[Any], cotangents: Any) -> Any:
        value, pull = jax.vjp(function, *given)
        return value, pull(cotangents)

    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    like = jax.eval_shape(function, *given)
    cotangents = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place), like)
    jax.clear_caches()  # otherwise the trace of the other variant is used
    compiled = jax.jit(both).lower(given, cotangents).compile(compiler_options=COMPILER_OPTIONS.get(machine.platform))
    return count_program(parse_module(compiled.as_text() or ""), 1).step.memory_bytes


def direct(*arrays: Any) -> tuple[Any, ...]:
    """Returns the arrays, as ``opaque`` does on other backends than CUDA."""
    return arrays


def barrier(*arrays: Any) -> tuple[Any, ...]:
    """Returns the arrays behind a barrier, as ``opaque`` does on CUDA."""
    return tuple(jax.lax.optimization_barrier(arrays))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="+", help="machines to compile for, such as h100:1x8 or tpu:v5p:2x2x4")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    found: dict[str, dict[str, list[int]]] = {}
    print("| machine | part | GB without a barrier | GB with it | ratio |\n|---|---|---|---|---|", flush=True)
    for name in options.machines:
        found[name] = {}
        for part, program in tqdm(PARTS.items(), disable=not sys.stderr.isatty()):
            each = []
            for variant in (direct, barrier):
                with mock.patch.object(layers, "opaque", variant), mock.patch.object(head, "opaque", variant):
                    each.append(traffic(program, parse_machine(name)))
            found[name][part] = each
            without, behind = (size / 1e9 for size in each)
            print(f"| {name} | {part} | {without:.2f} | {behind:.2f} | {behind / without:.2f} |", flush=True)
    if options.json:
        command = f"python experiments/fusion.py {' '.join(options.machines)} --json {options.json}"
        report = {"command": command, "jax": jax.__version__, "bytes": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
