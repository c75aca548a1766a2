"""A small policy with prompts, the executable of an exact engine, and comparisons of what engines sample."""

import contextlib
import dataclasses
import functools
import logging

import jax
import numpy as np

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
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
