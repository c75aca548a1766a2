"""Tests of continuous decoding: the sizes of batches, the use of free places, and samples that stay the same."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from small_engines import CONFIG, EXPERTS

from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer
from rljax.rollout.decode_sizes import (
    DecodeSizes,
    batch_sizes,
    cache_room,
    cache_row_bytes,
    padded_rows,
    padded_width,
    prefill_rows,
)
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh

PROMPTS = [np.asarray(p, np.int32) for p in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2], [9, 3, 1])]
LIMIT, WIDTH = 12, 6


def sample(decode_tokens, *, n=4, config=CONFIG, mesh=(1, 1), **asked):
    """Returns the responses, which take LIMIT + WIDTH of the cache's ``decode_tokens`` each, and the parameters."""
    settings = {"mesh": make_mesh(MeshConfig(*mesh)), "with_routes": bool(config.num_experts)}
    engine = JaxEngine(config, jnp.float32, WIDTH, decode_tokens=decode_tokens, **settings)
    params = init_params(config, 0)
    engine.publish(params, 7)
    return list(engine.generate(PROMPTS, n, SamplingParams(LIMIT, 1.0, (0, 1), **asked), seed=0)), params


@pytest.mark.parametrize(
    ("rows", "n", "budget", "ways", "expected"),
    [
        (64, 16, 64, 1, DecodeSizes(64, 16, 4)),  # all of them fit at once
        (64, 16, 40, 1, DecodeSizes(40, 4, 1)),  # an eighth of 40 is 5, which holds 4 of the 16 responses
        (1024, 16, 300, 1, DecodeSizes(288, 16, 2)),
        (64, 16, 20, 8, DecodeSizes(16, 2, 1)),
        (64, 6, 0, 4, DecodeSizes(4, 1, 1)),  # each part of the mesh has at least one response
        (3, 1, 2, 4, DecodeSizes(4, 1, 4)),  # there are fewer responses than parts
    ],
)
def test_the_sizes_of_a_batch(rows, n, budget, ways, expected):
    assert batch_sizes(rows, n, budget, ways) == expected


def test_turns_are_padded_to_few_sizes():
    """Rows are padded to 2^k or 3 * 2^k, widths to 6 * 2^k, but one of the 40 places stays for a response.

    With 4 heads the scores of 256 tokens take 1 MiB, so 1 GiB on each device holds 1024 prompts of them.
    """
    assert [padded_rows(count) for count in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert [padded_width(longest, 6, 40) for longest in (1, 6, 7, 12, 13, 24, 25, 39)] == [6, 6, 12, 12, 24, 24, 39, 39]
    assert [prefill_rows(CONFIG, *form) for form in ((256, 1), (256, 2), (2**14, 1))] == [1024, 2048, 1]


TOPS = {"reported": 4}
CUT = {"top_k": 5, "top_p": 0.9, "reported": 5}
FORMS = [(CONFIG, 1, CUT), (CONFIG, 7, TOPS)]  # test_turn_rounds.py has experts
MORE = [(EXPERTS, n, {}) for n in (1, 7)] + [(CONFIG, 3, CUT), (CONFIG, 16, {})]


@pytest.mark.parametrize(
    ("config", "at_once", "asked"), [*FORMS, *(pytest.param(*form, marks=pytest.mark.harness) for form in MORE)]
)
def test_the_samples_do_not_depend_on_the_budget(config, at_once, asked):
    """The same 20 responses come from one batch and from places that are used again."""
    together, _ = sample(0, config=config, **asked)
    refilled, _ = sample(at_once * (LIMIT + WIDTH), config=config, **asked)
    assert len({response.length for response in together}) > 4
    for a, b in zip(together, refilled, strict=True):
        assert (a.prompt_index, a.sample_index, a.truncated) == (b.prompt_index, b.sample_index, b.truncated)
        np.testing.assert_array_equal(a.ids, b.ids)
        assert a.columns.keys() == b.columns.keys()
        for name, column in a.columns.items():
            close = 6e-6 if "logprobs" in name else 0
            np.testing.assert_allclose(column, b.columns[name], atol=close, rtol=0)


@pytest.mark.mesh
@pytest.mark.parametrize("at_once", [4, pytest.param(12, marks=pytest.mark.harness)])
def test_a_sharded_cache_holds_the_places_of_its_parts(at_once):
    refilled, params = sample(at_once * (LIMIT + WIDTH), mesh=(2, 2, 2))
    full = [r.ids for r in refilled]
    for r, logprobs in zip(refilled, make_scorer(CONFIG, jnp.float32)(params, full), strict=True):
        np.testing.assert_allclose(r["rollout_logprobs"], logprobs[len(PROMPTS[r.prompt_index]) :], atol=2e-5, rtol=0)


def test_the_cache_in_bytes():
    """Qwen3-4B in bfloat16 has keys and values of 36 layers, 8 heads and 128 numbers of 2 bytes each."""
    qwen3_4b = PolicyConfig(151936, 2560, 9728, 36, 32, 8, 128, tie_word_embeddings=True)
    mesh = make_mesh(MeshConfig(1, 1))
    assert cache_row_bytes(qwen3_4b, mesh, 100, jnp.bfloat16, jnp.bfloat16) == 100 * 147_456
    assert cache_row_bytes(qwen3_4b, mesh, 1, jnp.bfloat16, jnp.float8_e4m3fn) == 147_456 / 2
    assert cache_room(1000, 8) == 700
    assert cache_room(None, 2) == cache_room(None, 1) / 2
    assert 0 < cache_room(None, 1) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
