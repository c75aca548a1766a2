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
    repeats,
)
from rljax.rollout.decoding import Queue
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh

PROMPTS = [np.asarray(p, np.int32) for p in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2], [9, 3, 1])]
LIMIT, WIDTH = 12, 6


def sample(decode_tokens, *, n=4, config=CONFIG, mesh=(1, 1), greedy=False, **asked):
    """Returns the responses of an engine with ``decode_tokens`` in its cache.

    A response takes LIMIT + WIDTH of them.
    """
    engine = JaxEngine(
        config,
        jnp.float32,
        WIDTH,
        mesh=make_mesh(MeshConfig(*mesh)),
        with_routes=bool(config.num_experts),
        decode_tokens=decode_tokens,
    )
    params = init_params(config, 0)
    engine.publish(params, 7)
    sampling = SamplingParams(LIMIT, 0.0 if greedy else 1.0, (0, 1), **asked)
    return list(engine.generate(PROMPTS, n, sampling, seed=0)), params


@pytest.mark.parametrize(
    ("rows", "n", "budget", "ways", "expected"),
    [
        (64, 16, 64, 1, DecodeSizes(64, 16, 4)),  # all of them fit at once
        (64, 16, 40, 1, DecodeSizes(40, 4, 1)),  # an eighth of 40 is 5, which holds 4 of the 16 responses
        (1024, 16, 300, 1, DecodeSizes(288, 16, 2)),
        (64, 16, 20, 8, DecodeSizes(16, 2, 1)),
        (64, 16, 3, 1, DecodeSizes(3, 1, 1)),
        (64, 6, 0, 4, DecodeSizes(4, 1, 1)),  # each part of the mesh has at least one response
        (6, 3, 5, 4, DecodeSizes(4, 1, 1)),
        (3, 1, 2, 4, DecodeSizes(4, 1, 4)),  # there are fewer responses than parts
        (12, 1, 46, 8, DecodeSizes(16, 1, 16)),  # 4 slots stay free
    ],
)
def test_the_sizes_of_a_batch(rows, n, budget, ways, expected):
    assert batch_sizes(rows, n, budget, ways) == expected


def test_turns_are_padded_to_few_sizes():
    """Rows are padded to 2^k or 3 * 2^k.

    Widths are padded to 6 * 2^k, but one of the 40 places stays for a response.
    """
    assert [padded_rows(count) for count in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert [padded_width(longest, 6, 40) for longest in (1, 6, 7, 12, 13, 24, 25, 39)] == [6, 6, 12, 12, 24, 24, 39, 39]
    assert padded_width(5, 6, 6) == 5


@pytest.mark.parametrize(
    ("prompts", "expected"), [("aaabbb", 3), ("aaaaaabbb", 3), ("aaaabb", 2), ("aaab", 1), ("aba", 1), ("aaa", 3)]
)
def test_neighbours_with_equal_prompts_are_counted(prompts, expected):
    assert repeats([np.asarray([1, ord(letter)], np.int32) for letter in prompts]) == expected


def test_prompts_are_computed_at_once_as_scores_fit():
    """With 4 heads the scores of 256 tokens take 1 MiB, so 1 GiB on each device holds 1024 of them."""
    assert [prefill_rows(CONFIG, 256, ways) for ways in (1, 2)] == [1024, 2048]
    assert prefill_rows(CONFIG, 2**14, 1) == 1


def test_a_group_of_prompts_is_no_larger_than_asked():
    prompts, lengths = np.zeros((5, 2), np.int32), np.ones(5, np.int32)
    queue = Queue(prompts, lengths, 1, DecodeSizes(4, 1, 4), most=2)
    groups = list(queue.admitted(np.arange(4)))
    assert [rows.tolist() for _, _, rows, _, _ in groups] == [[[0], [1]], [[2], [3]]]


def test_free_places_go_to_the_next_responses_in_order():
    prompts, lengths = np.asarray([[0, 5], [6, 7]], np.int32), np.asarray([1, 2], np.int32)
    queue = Queue(prompts, lengths, 3, DecodeSizes(4, 1, 2))
    assert queue.enough == 4
    ((_, of_units, rows, into, numbers),) = queue.admitted(np.arange(4))
    assert rows.tolist() == [[0], [1], [2], [3]]
    assert into.tolist() == [[0], [1], [2], [3]]
    assert of_units.tolist() == [1, 1, 1, 2]
    assert numbers.tolist() == [0, 0, 0, 1]
    assert (queue.left, queue.enough) == (2, 2)
    assert list(queue.admitted(np.asarray([2]))) == []
    ((taken, _, rows, into, numbers),) = queue.admitted(np.asarray([1, 3]))
    assert taken.tolist() == [[6, 7], [6, 7]]
    assert (rows.tolist(), into.tolist(), numbers.tolist()) == ([[4], [5]], [[1], [3]], [1, 1])
    assert (queue.left, queue.enough) == (0, 4)


def test_a_last_group_is_filled_with_rows_that_go_nowhere():
    prompts, lengths = np.zeros((5, 2), np.int32), np.ones(5, np.int32)
    queue = Queue(prompts, lengths, 1, DecodeSizes(4, 1, 2))
    next(queue.admitted(np.arange(4)))
    ((_, _, rows, into, numbers),) = queue.admitted(np.asarray([2, 3]))
    assert (rows.tolist(), into.tolist(), numbers.tolist()) == ([[4], [0]], [[2], [4]], [4, 5])


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


def test_greedy_samples_do_not_depend_on_the_budget():
    together, refilled = sample(0, greedy=True, n=1)[0], sample(2 * (LIMIT + WIDTH), greedy=True, n=1)[0]
    for a, b in zip(together, refilled, strict=True):
        np.testing.assert_array_equal(a.response, b.response)


@pytest.mark.mesh
@pytest.mark.parametrize("at_once", [4, pytest.param(12, marks=pytest.mark.harness)])
def test_a_sharded_cache_holds_the_places_of_its_parts(at_once):
    refilled, params = sample(at_once * (LIMIT + WIDTH), mesh=(2, 2, 2))
    full = [r.ids for r in refilled]
    for r, logprobs in zip(refilled, make_scorer(CONFIG, jnp.float32)(params, full), strict=True):
        np.testing.assert_allclose(r["rollout_logprobs"], logprobs[len(PROMPTS[r.prompt_index]) :], atol=2e-5, rtol=0)


def test_a_row_of_the_cache_in_bytes():
    """Qwen3-4B in bfloat16 has keys and values of 36 layers, 8 heads and 128 numbers of 2 bytes each."""
    qwen3_4b = PolicyConfig(151936, 2560, 9728, 36, 32, 8, 128, tie_word_embeddings=True)
    mesh = make_mesh(MeshConfig(1, 1))
    assert cache_row_bytes(qwen3_4b, mesh, 100, jnp.bfloat16, jnp.bfloat16) == 100 * 147_456
    assert cache_row_bytes(qwen3_4b, mesh, 1, jnp.bfloat16, jnp.float8_e4m3fn) == 147_456 / 2


def test_the_room_of_the_cache_is_a_share_of_what_is_free():
    assert cache_room(1000, 8) == 700
    assert cache_room(None, 2) == cache_room(None, 1) / 2
    assert 0 < cache_room(None, 1) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
