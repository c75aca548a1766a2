"""Tests of the description of packed rows for cuDNN. The kernel itself needs a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import equations

from rljax.plan.memory import compiled_for_hopper
from rljax.policy.cudnn import cudnn_attention, max_segments, segment_offsets
from rljax.policy.trees import segment_ends


@pytest.mark.parametrize(
    ("segments", "most", "starts", "lengths", "count"),
    [
        ([1, 1, 1, 2, 5, 5, 0, 0], 4, [0, 3, 4, 6, -1], [3, 1, 2, 2], 4),
        ([3, 3, 3, 3, 3, 3, 3, 3], 4, [0, -1, -1, -1, -1], [8, -1, -1, -1], 1),
        ([1, 2, 2, 3, 3, 3, 0, 0], 2, [0, 1, -1], [1, 2], 4),  # more segments than there is room for are counted
        ([0, 0, 0, 0], 2, [0, -1, -1], [4, -1], 1),  # a row of padding is one segment
    ],
)
def test_offsets_and_lengths_of_a_row(segments, most, starts, lengths, count):
    found = segment_offsets(np.array([segments], np.int32), most)
    assert [x[0].tolist() for x in found] == [starts, lengths, count]


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
