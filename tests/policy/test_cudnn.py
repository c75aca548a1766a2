"""Tests of the description of packed rows for cuDNN. The kernel itself needs a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
from packed_rows import equations, row

from rljax.policy.cudnn import cudnn_attention, max_segments, segment_offsets
from rljax.policy.kernels import compiled_for_hopper
from rljax.policy.trees import segment_ends


def test_offsets_and_lengths_of_two_rows():
    segments = np.array([[1, 1, 1, 2, 5, 5, 0, 0], [3, 3, 3, 3, 3, 3, 3, 3]], np.int32)
    starts, lengths, count = segment_offsets(segments, 4)
    np.testing.assert_array_equal(starts, [[0, 3, 4, 6, -1], [0, -1, -1, -1, -1]])
    np.testing.assert_array_equal(lengths, [[3, 1, 2, 2], [8, -1, -1, -1]])
    np.testing.assert_array_equal(count, [4, 1])


def test_more_segments_than_there_is_room_for_are_counted():
    starts, lengths, count = segment_offsets(row(8, [1, 2, 3])[None], 2)
    np.testing.assert_array_equal(starts, [[0, 1, -1]])
    np.testing.assert_array_equal(lengths, [[1, 2]])
    assert count == 4


def test_a_row_of_padding_is_one_segment():
    starts, lengths, count = segment_offsets(np.zeros((1, 4), np.int32), 2)
    np.testing.assert_array_equal(starts, [[0, -1, -1]])
    np.testing.assert_array_equal(lengths, [[4, -1]])
    assert count == 1


def test_the_program_holds_cudnn_and_one_way_out_of_it():
    t, h, g = 4096, 8, 2
    q, kv = (jax.ShapeDtypeStruct((1, t, n, 128), jnp.bfloat16) for n in (h, g))
    segments = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def run(q, k, v, segments):
        out, pull = jax.vjp(lambda q, k, v: cudnn_attention(q, k, v, segment_ends(segments)), q, k, v)
        return out, jax.tree.leaves(pull)

    with compiled_for_hopper():
        jaxpr = jax.make_jaxpr(run)(q, kv, kv, segments)
    names = [equation.primitive.name for equation in equations(jaxpr.jaxpr)]
    assert names.count("cond") == 1 + 1  # one takes blocks instead of cuDNN, and one in the blocks skips a pair
    assert sum("dot_product_attention_fwd" in name for name in names) == 1
    kept = sorted(aval.size for aval in jaxpr.out_avals[1:])[-5:]
    # The kept arrays are k and v, q and the output, and the log-sum-exp of t places for each possible segment.
    assert kept == sorted([t * g * 128, t * g * 128, t * h * 128, t * h * 128, max_segments(t) * h * t])
