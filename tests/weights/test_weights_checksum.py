"""One checksum serves both sides; ``examples/test_examples.py`` has a program that shares no line with it."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import hf_tensors
from rljax.policy.model import init_params
from rljax.policy.published import hf_checksums
from rljax.weights import sums
from rljax.weights.format import Checksum, TensorRegion
from rljax.weights.sums import array_checksum, bits_of, differences, mixed, place_weights, region_checksum

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)
TIED = PolicyConfig(32, 8, 16, 2, 2, 1, 4, tie_word_embeddings=True)
UNTIED = PolicyConfig(32, 8, 16, 2, 2, 1, 4, tie_word_embeddings=False)


def normal(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_see_one_element_and_the_third_changed_places(dtype):
    array = normal((300, 40), dtype)
    swapped, moved = array.copy(), array.copy()
    swapped[[7, 211]] = swapped[[211, 7]]
    bits_of(moved)[17, 3] ^= 1
    before, after, other = (array_checksum(each) for each in (array, swapped, moved))
    regions = [TensorRegion(row, 150, column, 20, 40) for row in (0, 150) for column in (0, 20)]
    held = [bits_of(array)[r.row : r.row + r.rows, r.column : r.column + r.width].reshape(-1) for r in regions]
    parts = [region_checksum(bits, region) for bits, region in zip(held, regions, strict=True)]
    total = np.sum([(part.first, part.second, part.placed) for part in parts], axis=0)
    assert Checksum.from_sums(array.size, *total.tolist()) == before  # the checksums of regions add up to the tensor's
    assert (before.first, before.second) == (after.first, after.second)
    assert (before.placed == after.placed, before.first == other.first, before.second == other.second) == (False,) * 3


@pytest.mark.parametrize(("config", "dtype"), zip((TIED, TIED, UNTIED), DTYPES, strict=True))
def test_the_trainers_are_those_of_the_tensors_that_are_written(dtype, config):
    params = init_params(config, 3)
    written = {name: array_checksum(array) for name, array in hf_tensors(params, config, dtype)}
    assert hf_checksums(params, config, dtype) == written
    assert len(written) == (24 if config is TIED else 25)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(value):
    """The tensor has more elements than ``changed_fraction`` looks at."""
    config = PolicyConfig(32, 256, 1024, 2, 2, 1, 4, tie_word_embeddings=True)
    params = init_params(config, 0)
    params["layers"]["mlp"]["up"] = params["layers"]["mlp"]["up"].at[1, 3, 1].set(value)
    with pytest.raises(
        RuntimeError, match=r"'model.layers.1.mlp.up_proj.weight' holds values that are not finite in b"
    ):
        hf_checksums(params, config, "bfloat16")
    params = init_params(TIED, 0)
    params["embed"] = params["embed"].at[0, 0].set(1e5)
    assert hf_checksums(params, TIED, "bfloat16")
    with pytest.raises(RuntimeError, match=r"'model.embed_tokens.weight' holds values that are not finite in float16"):
        hf_checksums(params, TIED, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_torch_jax_and_numpy_agree(dtype):
    torch = pytest.importorskip("torch")
    words = bits_of(normal((70, 33), np.dtype(dtype))).astype(np.uint32).view(np.int32)
    places = np.array([0, 1, 65535, 2**31 - 1, -(2**31), -1], np.int32)
    expected = [*mixed(words), place_weights(places)]
    for as_array in (torch.from_numpy, jnp.asarray):
        for found, numpys in zip([*mixed(as_array(words)), place_weights(as_array(places))], expected, strict=True):
            np.testing.assert_array_equal(np.asarray(found), numpys)
    for values in mixed(np.arange(65536, dtype=np.int32)):
        assert len(np.unique(values)) == 65536  # every pattern of 16 bits has a value of its own


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [0, 5, 2**22 + 7])
def test_threads_and_devices_sum_the_same(dtype, size):
    """The last size is more than one thread sums at a time, and more than a device sums at a time."""
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**15, size).astype({"bfloat16": np.int16, "float32": np.int32}[dtype])
    words = torch.from_numpy(bits)
    expected = region_checksum(bits_of(bits), TensorRegion.whole((size,)))
    assert array_checksum(bits) == expected
    assert sums.tensor_checksum(words.view(getattr(torch, dtype))) == expected
    assert sums.device_checksum(words) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_tensor_kept_wider_has_the_published_checksum(dtype):
    """A value outside the published dtype must have another checksum, and so must two exchanged values."""
    torch = pytest.importorskip("torch")
    narrow = getattr(torch, dtype)
    published = torch.from_numpy(normal((70,), jnp.dtype("float32"))).to(narrow)
    wide = published.to(torch.float32)
    assert sums.tensor_checksum(sums.as_published(published, narrow)) == sums.tensor_checksum(published)
    assert sums.tensor_checksum(sums.as_published(wide, narrow)) == sums.tensor_checksum(published)
    assert sums.tensor_checksum(sums.as_published(wide.flip(0), narrow)) != sums.tensor_checksum(published)
    wide[3] *= 1.0 + 2.0**-20
    assert sums.as_published(wide, narrow).dtype == torch.float32
    assert sums.tensor_checksum(sums.as_published(wide, narrow)) != sums.tensor_checksum(published)


# ---- the trainer's tensors and what the workers of a server hold ----

SHAPES = {"norm": 8, "k_proj": (4, 8), "q_proj": (8, 8)}
WHOLE = {name: normal(shape, np.float32, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
EXPECTED = {name: array_checksum(array) for name, array in WHOLE.items()}


def workers(count, heads=4):
    """Returns what each of ``count`` workers holds: norms whole, queries in parts, key heads in parts or copied."""
    held, keys = [], WHOLE["k_proj"].reshape(heads, -1)
    for rank in range(count):
        mine = keys.reshape(count, -1)[rank] if count <= heads else keys[rank * heads // count]
        parts = {"norm": WHOLE["norm"], "k_proj": mine, "q_proj": WHOLE["q_proj"].reshape(count, -1)[rank]}
        held.append({name: array_checksum(part) for name, part in parts.items()})
    return held


@pytest.mark.parametrize(("count", "heads"), [(1, 4), (4, 4), (8, 2), (4, 1)])
def test_parts_and_copies_add_up(count, heads):
    held = workers(count, heads)
    assert differences(EXPECTED, held) == []
    held[-1]["k_proj"] = dataclasses.replace(held[-1]["k_proj"], first=held[-1]["k_proj"].first ^ 1)
    assert differences(EXPECTED, held) == ["k_proj (other bits)"]
    held = workers(2)  # the errors of the two copies cancel in their sum
    for worker, error in zip(held, (1, -1), strict=True):
        worker["norm"] = dataclasses.replace(EXPECTED["norm"], first=EXPECTED["norm"].first + error)
    assert differences(EXPECTED, held) == ["norm (other bits)"]


def test_what_is_missing_left_over_or_of_another_size_is_named():
    held = workers(2)
    del held[0]["norm"], held[1]["norm"]
    held[1]["k_proj"] = None
    held[0]["bias"] = Checksum(1, 0, 0, 0)
    held[1]["q_proj"] = Checksum(33, 0, 0, 0)
    assert differences(EXPECTED, held) == [
        "norm (not loaded)",
        "k_proj (not loaded)",
        "q_proj (65 elements instead of 64)",
        "bias (the trainer has none)",
    ]
    assert sums.describe_differences(["a", "b", "c", "d", "e", "f"]) == "6 tensors differ: a, b, c, d and 2 more"
    assert sums.describe_differences(["a"]) == "1 tensor differs: a"
    embedding = Checksum(4, 1, 2, 3)  # a tied head is the embedding
    expected = {"model.embed_tokens.weight": embedding}
    assert differences(expected, [{**expected, "lm_head.weight": embedding}]) == []
    assert differences(expected, [{**expected, "lm_head.weight": None}]) == ["lm_head.weight (not loaded)"]
    untied = {**expected, "lm_head.weight": Checksum(4, 7, 8, 9)}
    assert differences(untied, [dict.fromkeys(untied, embedding)]) == ["lm_head.weight (other bits)"]
