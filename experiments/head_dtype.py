"""Measures the mismatch with a vLLM server and with the embedded engine under ``precision.lm_head_dtype: float32``.

    python experiments/head_dtype.py --output benchmarks/head_dtype.json

One server has its LM head in the model's dtype, another has ``--head-dtype float32``. Each samples responses to the toy
task. The trainer's forward pass scores the same tokens with its head in the compute dtype, in float32, and in float32
with the float32 master weights of the table, which no server has. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.data.encoding import prompt_ids
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.errors import caller_errors, run_cli
from rljax.mismatch import mismatch_metrics
from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.head import matmul_precision, token_logprobs
from rljax.policy.hf import load_params
from rljax.policy.model import Params, cast_params, hidden_states, lm_head_table
from rljax.rollout.build import connect
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh

HEADS = ("model", "float32")
METRICS = ("logprob_abs_diff_mean", "logprob_abs_diff_max", "k3_kl")


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def trainer_logprobs(params: Params, config: PolicyConfig, tokens: jax.Array, *, dtype: str) -> dict[str, jax.Array]:
    """Scores each token after the first, by the dtype of the trainer's head, float32 [b, t - 1]."""
    with jax.default_matmul_precision(matmul_precision(dtype)):
        compute = cast_params(params, dtype)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = hidden_states(compute, config, tokens, jnp.ones_like(tokens), positions)
        tables = {
            "compute": (lm_head_table(compute), None),
            "float32": (lm_head_table(compute), jnp.float32),
            "float32 masters": (lm_head_table(params), jnp.float32),
        }
        return {
            name: token_logprobs(hidden[:, :-1], table, tokens[:, 1:], dtype=head)[0]
            for name, (table, head) in tables.items()
        }


@contextlib.contextmanager
def opened(engine: str, path: str, dtype: Any, head: Any, params: Params, max_tokens: int) -> Iterator[RolloutEngine]:
    """Opens an engine with the policy of ``path`` and an LM head in the dtype ``head``."""
    policy = read_config(path)
    with contextlib.ExitStack() as stack:
        made: RolloutEngine
        if engine == "vllm":
            config = ServerConfig(path, str(vllm_python()), dtype, head, max_model_len=max_tokens)
            made = connect([stack.enter_context(start(config)).url])
        else:
            head_dtype = jnp.float32 if head == "float32" else None
            mesh = make_mesh(MeshConfig(), jax.devices()[:1])
            made = JaxEngine(policy, dtype, max_tokens, mesh=mesh, lm_head_dtype=head_dtype)
            made.publish(params, 0)
        yield stack.enter_context(contextlib.closing(made))


def measure(options: argparse.Namespace, engine: str, dtype: str, head: str) -> dict[str, dict[str, float]]:
    """Measures the mismatch of one engine's samples, by the dtype of the trainer's head."""
    policy, tokenizer = read_config(options.path), load_tokenizer(options.path)
    params = load_params(options.path, policy)
    prompts = [prompt_ids(problem, tokenizer) for problem in addition_problems("eval", options.problems)]
    longest = max(map(len, prompts)) + options.max_response_tokens
    sampling = SamplingParams(options.max_response_tokens, 1.0, policy.stop_token_ids or (tokenizer.eos_token_id,))
    with opened(engine, options.path, dtype, head, params, longest) as made:
        responses = list(made.generate(prompts, options.group_size, sampling, seed=options.seed))
    tokens = np.zeros((len(responses), longest), np.int32)
    rollout, mask = np.zeros((len(responses), longest - 1), np.float32), np.zeros((len(responses), longest - 1), bool)
    for row, response in enumerate(responses):
        first = len(prompts[response.prompt_index])
        whole = np.concatenate([prompts[response.prompt_index], response.token_ids])
        tokens[row, : len(whole)] = whole
        rollout[row, first - 1 : len(whole) - 1] = response.logprobs
        mask[row, first - 1 : len(whole) - 1] = True
    scored = jax.device_get(trainer_logprobs(params, policy, tokens, dtype=dtype))
    by_head = {name: mismatch_metrics(logprobs, rollout, mask) for name, logprobs in scored.items()}
    return {name: {key: metrics[key] for key in (*METRICS, "token_count")} for name, metrics in by_head.items()}


def main(argv: Sequence[str]) -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="configs/toy-base", help="directory of a policy of the toy task")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"], help="dtypes of engine and trainer")
    parser.add_argument("--engines", nargs="+", default=["vllm", "jax"], choices=["vllm", "jax"], help="engines")
    parser.add_argument("--problems", type=int, default=64, help="prompts (64)")
    parser.add_argument("--group-size", type=int, default=8, help="responses to each prompt (8)")
    parser.add_argument("--max-response-tokens", type=int, default=36, help="longest response, in tokens (36)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    cases = []
    print(f"| engine | dtype | engine's head | trainer's head | {' | '.join(METRICS)} | of model / compute |")
    print("|---|---|---|---|---|---|---|---|")
    for engine in options.engines:
        for dtype in options.dtypes:
            base = None
            for head in HEADS:
                with caller_errors(RuntimeError):
                    by_head = measure(options, engine, dtype, head)
                for trainer_head, metrics in by_head.items():
                    base = base or metrics["logprob_abs_diff_mean"]
                    ratio = metrics["logprob_abs_diff_mean"] / base
                    names = {"engine": engine, "dtype": dtype, "engine_head": head, "trainer_head": trainer_head}
                    cases.append(names | metrics | {"ratio": ratio})
                    values = " | ".join(f"{metrics[name]:.2e}" for name in METRICS)
                    print(f"| {' | '.join(names.values())} | {values} | {ratio:.3f} |", flush=True)
    if options.output is not None:
        settings = {name: value for name, value in vars(options).items() if name != "output"}
        options.output.write_text(json.dumps({"settings": settings, "cases": cases}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
