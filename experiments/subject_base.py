"""Fits a base of about 0.9M parameters on written solutions of both families, and saves it in bfloat16.

    python experiments/subject_data.py runs/subject-data
    python experiments/subject_base.py runs/subject-data/base-0.jsonl runs/subject-base-0 --seed 0

It takes about 6 minutes on one core. experiments/subject_task.py describes the solutions.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from subject_task import ALPHABET, Mistakes, solution
from tqdm import tqdm

from rljax.data.toy import EOS, build_tokenizer
from rljax.distributed.files import replacing
from rljax.errors import run_cli
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.model import Params, init_params
from rljax.policy.score import packed_logprobs
from rljax.run.options import Positional, parse_arguments

# The fields are those of rljax.policy.config.SIZES: 4 layers of width 128, 4 query and 2 key-value heads of 32.
POLICY = PolicyConfig(
    *(len(ALPHABET), 128, 448, 4, 4, 2, 32),
    tie_word_embeddings=True,
    initializer_range=0.05,
    max_position_embeddings=1024,
    eos_token_id=len(ALPHABET) - 2,
    pad_token_id=len(ALPHABET) - 1,
)


@dataclass(frozen=True)
class Arguments:
    """The options of the program."""

    problems: Positional[Path]
    """The JSONL file of problems to solve."""
    out: Positional[Path]
    """The directory to write; one that holds a model is kept."""
    seed: int = 0
    """The seed of the weights and of the solutions."""
    steps: int = 800
    """The total number of AdamW steps."""
    settle_steps: int = 150
    """The number of last steps with the share ``worked``."""
    rows: int = 16
    """The number of packed rows of a step."""
    row_tokens: int = 128
    """The length of a row, in tokens."""
    learning_rate: float = 2e-3
    """The peak learning rate, with warm-up and cosine decay."""
    worked: float = 0.015
    """The share of worked solutions in the last steps."""
    practice: float = 0.6
    """The share of worked solutions before that."""
    wrong_direct: float = 0.85
    """The share of direct answers that are wrong."""
    wrong_step: float = 0.1
    """The share of worked solutions with a wrong step."""
    wrong_letters: float = 0.75
    """The share of a word's letters in a wrong direct answer."""


def packed_rows(
    rng: np.random.Generator, problems: Sequence[Mapping[str, str]], mistakes: Mistakes, rows: int, row_tokens: int
) -> tuple[np.ndarray, ...]:
    """Fills rows with solutions of random problems.

    Returns:
      Tokens, segment ids, positions, and whether a token belongs to a solution: four arrays [rows, row_tokens].
    """
    tokens, segments, positions = (np.zeros((rows, row_tokens), np.int32) for _ in range(3))
    mask = np.zeros((rows, row_tokens), bool)
    index = {character: i for i, character in enumerate(ALPHABET)}
    for row in range(rows):
        start, segment = 0, 1
        while True:
            problem = problems[int(rng.integers(len(problems)))]
            text = problem["prompt"] + solution(rng, problem, mistakes) + EOS
            end = start + len(text)
            if end > row_tokens:
                break
            tokens[row, start:end] = [index[character] for character in text]
            segments[row, start:end] = segment
            positions[row, start:end] = range(len(text))
            mask[row, start + len(problem["prompt"]) : end] = True
            start, segment = end, segment + 1
    return tokens, segments, positions, mask


def fit(arguments: Arguments, batches: Iterator[tuple[np.ndarray, ...]]) -> Params:
    """Fits the policy from scratch on one batch for each step."""
    params = init_params(POLICY, arguments.seed)
    peak = arguments.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, 50, arguments.steps, peak * 0.05)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    state = tx.init(params)

    def loss(
        params: Params, tokens: jax.Array, segments: jax.Array, positions: jax.Array, mask: jax.Array
    ) -> jax.Array:
        return -jnp.sum(packed_logprobs(params, POLICY, tokens, segments, positions).logprobs * mask) / jnp.sum(mask)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, *batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    bar = tqdm(range(arguments.steps), desc="fitting the base", mininterval=2.0)
    for i in bar:
        params, state, value = step(params, state, *next(batches))
        if i % 20 == 0:
            bar.set_postfix(loss=f"{float(value):.3f}")
    return params


def main(argv: Sequence[str]) -> int:
    """Fits and saves; returns the exit status."""
    arguments = parse_arguments(Arguments, argv, prog="python experiments/subject_base.py", description=__doc__ or "")
    if (arguments.out / "model.safetensors").is_file():
        print(f"{arguments.out} is already there")
        return 0
    problems = [json.loads(line) for line in arguments.problems.read_text(encoding="utf-8").splitlines()]
    rng = np.random.default_rng(arguments.seed)

    def batches() -> Iterator[tuple[np.ndarray, ...]]:
        for i in range(arguments.steps):
            settled = i >= arguments.steps - arguments.settle_steps
            worked = arguments.worked if settled else arguments.practice
            mistakes = Mistakes(worked, arguments.wrong_direct, arguments.wrong_step, arguments.wrong_letters)
            yield packed_rows(rng, problems, mistakes, arguments.rows, arguments.row_tokens)

    params = fit(arguments, batches())
    with replacing(arguments.out) as partial:
        save_params(partial, params, POLICY, jnp.bfloat16)
        build_tokenizer(ALPHABET).save(partial)
        (partial / "generation_config.json").write_text(json.dumps({"eos_token_id": POLICY.eos_token_id}))
    print(f"wrote {arguments.out}: {sum(x.size for x in jax.tree.leaves(params)) / 1e6:.2f}M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
