"""Fits the base model of a toy task and saves it as an ordinary HF directory.

    python tools/make_toy_base.py runs/toy-base [--seed 0]
    python tools/make_toy_base.py runs/swaps-base --task swaps

It takes about 2 minutes on 2 cores. The directory has config.json, model.safetensors (float32) and a tokenizer, and
loads with transformers.AutoModelForCausalLM. rljax/data/toy.py and tools/toy_texts.py describe the texts.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from toy_texts import TASKS, ToyBaseConfig, toy_config
from tqdm import tqdm

from rljax.data.toy import build_tokenizer
from rljax.distributed.files import replacing
from rljax.errors import run_cli
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.model import Params, init_params
from rljax.policy.score import packed_logprobs


def _loss(params: Params, config: PolicyConfig, tokens: jax.Array, lengths: jax.Array, prompt: int) -> jax.Array:
    """Returns the mean negative log-probability of the response tokens."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (index < lengths[:, None]).astype(jnp.int32)
    logprobs = packed_logprobs(params, config, tokens, segments, index).logprobs
    mask = (index >= prompt) & (segments > 0)
    return -jnp.sum(logprobs * mask) / jnp.sum(mask)


def fit(config: ToyBaseConfig, task: str = "addition") -> Params:
    """Fits the policy from scratch; the same config gives the same weights on the same machine."""
    texts = TASKS[task]
    policy = toy_config(len(texts.alphabet))
    params = init_params(policy, config.seed)
    rate = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, 50, config.steps, config.learning_rate * 0.05)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    opt_state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, opt_state: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(_loss)(params, policy, tokens, lengths, texts.prompt_tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.default_rng(config.seed)
    bar = tqdm(range(config.steps), desc="fitting the toy base", mininterval=2.0)
    for i in bar:
        settled = i >= config.steps - config.settle_steps
        tokens, lengths = texts.sample_batch(rng, config, settled=settled)
        params, opt_state, loss = step(params, opt_state, tokens, lengths)
        if i % 50 == 0:
            bar.set_postfix(loss=f"{float(loss):.3f}")
    return params


@dataclass(frozen=True)
class Arguments:
    """The arguments of the command.

    Attributes:
      out: The HF directory to write; a model in it is kept unless ``overwrite`` is set.
      config: The settings of the fit.
      task: The toy task; each has its own problems and reward.
      overwrite: Whether to fit again if the directory has a model.
    """

    out: tyro.conf.Positional[Path]
    config: Annotated[ToyBaseConfig, tyro.conf.arg(name="")] = field(default_factory=ToyBaseConfig)
    task: Literal["addition", "swaps", "calculator"] = "addition"
    overwrite: bool = False


def main(argv: Sequence[str]) -> int:
    """Fits and saves the base; returns the exit status."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    out = arguments.out
    if (out / "model.safetensors").is_file() and not arguments.overwrite:
        print(f"{out} is already there (use --overwrite to fit it again)")
        return 0
    params = fit(arguments.config, arguments.task)
    alphabet = TASKS[arguments.task].alphabet
    policy = toy_config(len(alphabet))
    with replacing(out) as partial:  # an interrupted run leaves no directory that looks like a model
        save_params(partial, params, policy)
        build_tokenizer(alphabet).save(partial)
        (partial / "generation_config.json").write_text(json.dumps({"eos_token_id": policy.eos_token_id}))
        if out.exists():
            shutil.rmtree(out)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
