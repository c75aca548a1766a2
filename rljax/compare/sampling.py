"""New responses to the prompts of a dump, drawn by the embedded engine, with the log-probabilities it drew them at."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from rljax.compare.dump import ColumnSource, TokenDump, make_dump
from rljax.compare.scorers import weights_hash
from rljax.policy.config import read_config
from rljax.policy.hf import load_params
from rljax.rollout.jax_engine import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh


def sample_responses(
    dump: TokenDump,
    model: str | Path,
    dtype: str,
    *,
    n: int = 1,
    max_response_tokens: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
) -> TokenDump:
    """Draws ``n`` responses to each prompt of ``dump`` and returns them as a dump with one column.

    Args:
      dump: its prompts are what stands before the first response token; its columns are not carried over.
      model: Hugging Face directory.
      dtype: float32, bfloat16 or float16; of weights and cache.
      n: responses a prompt, named ``<sequence id>/<number>``.
      max_response_tokens: a response ends here or with an end-of-sequence token of the model (tokens).
      temperature: of the draw and of the column; positive.
      seed: of the draw.

    Returns:
      A dump with the column ``jax-decode:DTYPE``.

    Raises:
      ValueError: a sequence has no prompt, or a token outside the vocabulary; n or temperature is not positive.
    """
    if n < 1 or not temperature > 0.0:
        raise ValueError(f"n and temperature must be positive, got {n} and {temperature}")
    config = read_config(model)
    prompts = []
    for name, ids, mask in zip(dump.sequence_ids, dump.token_ids, dump.response_mask, strict=True):
        prompt = ids[: int(np.argmax(mask))] if mask.any() else ids
        if len(prompt) < 1 or prompt.max() >= config.vocab_size:
            raise ValueError(f"sequence {name!r} has no prompt of tokens below {config.vocab_size}, got {prompt[:8]}")
        prompts.append(prompt)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    engine = JaxEngine(config, dtype, max(map(len, prompts)), mesh=mesh)
    engine.publish(load_params(model, config), 0)
    sampling = SamplingParams(max_response_tokens, temperature, config.stop_token_ids)
    responses = list(engine.generate(prompts, n, sampling, seed=seed))
    engine.close()
    column = f"jax-decode:{dtype}"
    fronts = [prompts[response.prompt_index] for response in responses]
    return make_dump(
        [f"{dump.sequence_ids[response.prompt_index]}/{response.sample_index}" for response in responses],
        [np.concatenate([front, r.token_ids]).tolist() for front, r in zip(fronts, responses, strict=True)],
        [[False] * len(front) + [True] * r.length for front, r in zip(fronts, responses, strict=True)],
        {column: [[None] * len(front) + r.logprobs.tolist() for front, r in zip(fronts, responses, strict=True)]},
        {column: ColumnSource(f"jax {jax.__version__} decode", dtype, weights_hash(model), temperature)},
        {"temperature": temperature, "max_response_tokens": max_response_tokens, "seed": seed},
    )
