"""Splits the mismatch of a server on a TPU into what can be known without a TPU, on a real model and a CPU.

    python experiments/tpu_mismatch.py MODEL --output benchmarks/tpu_mismatch.json
    python experiments/tpu_mismatch.py MODEL --url http://127.0.0.1:8000 --output benchmarks/tpu_mismatch.json

The embedded engine samples responses to small tasks. Programs that differ in one point score the same
tokens, and the gaps between two of them are written for each seed:

- *logits rounded*: the head's logits are rounded to bfloat16 before the softmax, as vLLM's TPU backend does.
- *one pass*: the operands of every product are rounded to bfloat16. A TPU does so with float32 operands unless a
  program asks for more. XLA ignores the setting on a CPU, so the operands are rounded here by hand.

With ``--url`` the vLLM server there also scores the tokens, as prompts. Its weights must be MODEL's. A server of vLLM's
TPU backend on a CPU has every part of a TPU's gap but its attention kernel and its compiler.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from rljax.compare.scorers import score_column
from rljax.distributed.files import write_whole
from rljax.mismatch import mismatch_metrics
from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.head import all_logits, matmul_precision
from rljax.policy.hf import load_params
from rljax.policy.model import cast_params, hidden_states, lm_head_table
from rljax.record.token_dumps import TokenDump
from rljax.rollout.build import load_jax_engine
from rljax.rollout.types import SamplingParams

KEPT = ("logprob_abs_diff_mean", "logprob_abs_diff_max", "k3_kl", "log_ppl_abs_diff", "token_count")
TASKS = (
    "What is {a} + {b} - {c}? Answer with the number only.",
    "Write a short poem about {a} ships and {b} storms.",
    "Write a Python function that returns the first {a} multiples of {b}.",
    "Explain in two sentences why {a} is or is not a prime number.",
)
PROGRAMS = {  # the dtype, whether logits are rounded, and whether products take one pass
    "bfloat16": ("bfloat16", False, False),
    "bfloat16, logits rounded": ("bfloat16", True, False),
    "bfloat16, one pass": ("bfloat16", False, True),
    "float32": ("float32", False, False),
    "float32, one pass": ("float32", False, True),
}
SERVER = "TPU backend, bfloat16"
PAIRS = (
    ("bfloat16", "bfloat16, logits rounded"),
    ("bfloat16", "bfloat16, one pass"),
    ("float32", "float32, one pass"),
    ("float32", "bfloat16"),
    ("bfloat16", SERVER),
    ("bfloat16, logits rounded", SERVER),
)
"""The programs whose gaps are written: the trainer's side, and the server's."""

Score = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Options:
    """The settings of the experiment."""

    model: tyro.conf.Positional[Path]
    """The Hugging Face directory of the model, with its tokenizer."""
    output: Path = Path("tpu_mismatch.json")
    """The file for the result."""
    url: str = ""
    """The address of a vLLM server with these weights in bfloat16; none: no server."""
    seeds: tuple[int, ...] = (0, 1)
    """The seeds of tasks and sampling."""
    prompts: int = 4
    """The number of responses for each seed."""
    new_tokens: int = 32
    """The tokens of a response."""


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """Rounds the operands of every float32 einsum to bfloat16, in functions that are traced in the block.

    The products of two such values are exact in float32, in which they are added up.
    """
    einsum = jnp.einsum

    def rounded(spec: str, *operands: Any, **how: Any) -> Any:
        result = how.pop("preferred_element_type", None) or jnp.result_type(*operands)
        narrow = [x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in operands]
        how.pop("precision", None)
        return einsum(spec, *narrow, preferred_element_type=jnp.float32, **how).astype(result)

    jnp.einsum = rounded
    try:
        yield
    finally:
        jnp.einsum = einsum


def scorer(params: Any, config: PolicyConfig, dtype: str, *, rounds_logits: bool, in_one_pass: bool) -> Score:
    """Returns a function from a sequence [t] to the log-probability of each token but the first, float32 [t - 1]."""

    def run(params: Any, tokens: Any) -> Any:
        rows = (tokens[None], jnp.full((1, len(tokens)), len(tokens)), jnp.arange(len(tokens))[None])
        hidden, _ = hidden_states(params, config, *rows)
        logits = all_logits(hidden[0, :-1], lm_head_table(params))
        if rounds_logits:
            kept = jnp.finfo(dtype)  # XLA may drop two casts in succession
            logits = jax.lax.reduce_precision(logits, kept.nexp, kept.nmant)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], axis=-1)[:, 0]

    cast, compiled = cast_params(params, jnp.dtype(dtype)), jax.jit(run)

    def score(tokens: np.ndarray) -> np.ndarray:
        how = one_pass() if in_one_pass else jax.default_matmul_precision(matmul_precision(dtype))
        padded = np.pad(tokens, (0, -len(tokens) % 64))  # padding follows all tokens, which therefore do not see it
        with how:
            return np.asarray(compiled(cast, padded))[: len(tokens) - 1]

    return score


def prompts_of(model: Path, count: int, seed: int) -> list[np.ndarray]:
    """Returns the token ids of tasks with random numbers, as chats of the model."""
    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(model), np.random.default_rng(seed)
    found = []
    for task in range(count):
        text = TASKS[task % len(TASKS)].format(**dict(zip("abc", rng.integers(2, 100, 3), strict=True)))
        said = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        found.append(np.array(tokenizer(chat)["input_ids"], np.int32))
    return found


def sample(model: Path, options: Options) -> dict[int, TokenDump]:
    """Returns sampled sequences by seed. They go on beyond ends of sequences, and float32 is fast on a CPU."""
    prompts = {seed: prompts_of(model, options.prompts, seed) for seed in options.seeds}
    engine = load_jax_engine(model, "float32", max(len(each) for some in prompts.values() for each in some))
    dumps = {}
    for seed, some in prompts.items():
        sampled = engine.generate(some, 1, SamplingParams(options.new_tokens), seed=seed)
        found = sorted(sampled, key=lambda one: one.prompt_index)
        ids = tuple(np.concatenate([some[one.prompt_index], one.response]) for one in found)
        masks = tuple(
            np.arange(len(all_ids)) >= len(some[one.prompt_index]) for one, all_ids in zip(found, ids, strict=True)
        )
        dumps[seed] = TokenDump(tuple(map(str, range(len(ids)))), ids, masks)
    return dumps


def stacked(vectors: Sequence[np.ndarray], width: int) -> np.ndarray:
    return np.stack([np.pad(vector, (0, width - len(vector))) for vector in vectors])


def main(options: Options) -> None:
    """Samples, scores and writes the gaps."""
    config, dumps = read_config(options.model), sample(options.model, options)
    params = load_params(options.model, config)
    found: dict[int, dict[str, list[np.ndarray]]] = {seed: {} for seed in dumps}
    for program, (dtype, rounds_logits, in_one_pass) in PROGRAMS.items():
        score = scorer(params, config, dtype, rounds_logits=rounds_logits, in_one_pass=in_one_pass)
        for seed, dump in dumps.items():
            found[seed][program] = [np.concatenate([[0], score(ids)]) for ids in dump.token_ids]
    gaps: dict[str, Any] = {}
    for seed, dump in dumps.items():
        if options.url:
            found[seed][SERVER] = score_column(f"vllm:{options.url}", dump)[0]
        width = max(map(len, dump.token_ids))
        mask = stacked(dump.response_mask, width).astype(bool)
        for trainer, server in PAIRS:
            if server in found[seed]:
                columns = (stacked(found[seed][name], width) for name in (trainer, server))
                metrics = mismatch_metrics(*columns, mask)
                gaps.setdefault(f"{trainer} / {server}", {})[str(seed)] = {name: metrics[name] for name in KEPT}
    command = f"python experiments/tpu_mismatch.py {options.model.name}{' --url URL' if options.url else ''}"
    document = {"command": command, "jax": jax.__version__, "device": jax.devices()[0].device_kind, "gaps": gaps}
    write_whole(options.output, json.dumps(document, indent=1) + "\n")
    for pair, seeds in gaps.items():
        means = [each["logprob_abs_diff_mean"] for each in seeds.values()]
        print(f"{pair:<50} mean of abs {np.mean(means):.3g} ({min(means):.3g} to {max(means):.3g}) nats a token")


if __name__ == "__main__":
    main(tyro.cli(Options))
