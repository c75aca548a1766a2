"""A small policy with prompts, the executable of an exact engine, and what checks the samples of engines."""

import contextlib
import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.policy.model import hidden_states, lm_head_table
from rljax.policy.score import segment_ends
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.exact import ExactPass
from rljax.trainer.objective import Objective
from rljax.trainer.state import PrecisionConfig

CONFIG = PolicyConfig(24, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.25)
EXPERTS = dataclasses.replace(CONFIG, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=16)
MESH = make_mesh(MeshConfig(1, 1))
PROMPTS = [np.asarray(p, np.int32) for p in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2])]


@functools.cache
def exact_pass(config, count, limit, *, rows, row_tokens, mesh=MESH):
    """Returns the executable in float32 for ``count`` responses of ``limit`` tokens. It is compiled once."""
    objective, precision = Objective(LossConfig(), CorrectionConfig(), count, limit), PrecisionConfig("float32")
    return ExactPass(config, mesh, precision=precision, objective=objective, rows=rows, row_tokens=row_tokens)


def in_order(responses):
    return sorted(responses, key=lambda r: (r.prompt_index, r.sample_index))


@contextlib.contextmanager
def counted_loops(caplog):
    """Yields a function that returns the number of decoding loops that were compiled in the ``with`` block."""
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        yield lambda: sum("Compiling jit(decode)" in record.getMessage() for record in caplog.records)


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.response, b.response)
        np.testing.assert_array_equal(a["rollout_logprobs"], b["rollout_logprobs"])


@functools.partial(jax.jit, static_argnames="config")
def states(params, config, tokens, segments):
    return hidden_states(params, config, tokens, segment_ends(segments), jnp.arange(tokens.shape[1])[None])[0]


def distributions(params, config, prompts, response, temperature):
    """Returns the log-probability of every token at each position of a response, [t, v], with logits in float64."""
    prompt = prompts[response.prompt_index]
    ids = np.concatenate([prompt, response.response])
    tokens, segments = np.zeros((2, 1, -(-len(ids) // 32) * 32), np.int32)  # so that few lengths are compiled
    tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    hidden = np.asarray(states(params, config, tokens, segments), np.float64)
    rows = hidden[0, len(prompt) - 1 : len(ids) - 1]
    logits = (rows @ np.asarray(lm_head_table(params), np.float64).T) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
