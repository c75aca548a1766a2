"""Tests of the description of packed rows for cuDNN. The kernel itself needs a GPU."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as wrapper
from packed_rows import check_trees, ends_of, equations

from rljax.plan.memory import compiled_for_hopper
from rljax.policy.attention_errors import why_no_trees
from rljax.policy.config import PolicyConfig
from rljax.policy.cudnn import call_of_segments, cudnn_attention, max_segments
from rljax.policy.score import segment_ends


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
    call, number = call_of_segments(np.array([segments], np.int32), most)
    assert [x[0].tolist() for x in (*call.queries, number)] == [starts, lengths, count]


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


class Call:
    """A call of cuDNN on packed rows, in numpy. Tokens outside of all sequences are unwritten, here NaN."""

    def __init__(self, q, k, v, spans, settings):
        (q_lengths, k_lengths), starts = spans[:2], [each[:, :-1, None] for each in spans[2:]]
        self.at_q, self.at_k = at = [np.arange(q.shape[1])[None, None] - each for each in starts]
        self.of_q, self.of_k = ((x >= 0) & (x < n[..., None]) for x, n in zip(at, (q_lengths, k_lengths), strict=True))
        seen = self.at_q[..., None] >= self.at_k[:, :, None]
        seen |= settings["mask_type"] != wrapper.MaskType.PADDING_CAUSAL
        self.mask = np.any(self.of_q[..., None] & self.of_k[:, :, None] & seen, axis=1)[:, None]
        # The sequences of all rows are numbered one after another.
        self.sequences = [divmod(int(n), q_lengths.shape[1]) for n in np.flatnonzero(q_lengths > 0)]
        self.q, self.kv = q, (k, v)
        self.k, self.v = (np.repeat(np.float32(x), q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        scores = np.einsum("bthk,bshk->bhts", np.float32(q), self.k)
        self.scores, self.scale = np.where(self.mask, scores * settings["scale"], -1e30), settings["scale"]

    def kept(self, inside, *arrays):
        inside = np.any(inside, axis=1)[..., None, None]
        return [np.where(inside, x, np.nan).astype(self.q.dtype) for x in arrays]

    def forward(self):
        sums = np.logaddexp.reduce(self.scores, axis=-1)
        lse = np.full((self.of_q[..., 0].size, *sums.shape[1:]), np.nan, np.float32)
        for number, (b, n) in enumerate(self.sequences):
            lse[number, :, : int(self.of_q[b, n].sum())] = sums[b][:, self.of_q[b, n]]
        out = np.einsum("bhts,bshk->bthk", np.exp(self.scores - sums[..., None]), self.v)
        return *self.kept(self.of_q, out), lse

    def backward(self, *saved):
        of_sequences, out, d_out = map(np.float32, saved)
        lse = np.zeros(self.scores.shape[:3], np.float32)
        for number, (b, n) in enumerate(self.sequences):
            lse[b][:, self.of_q[b, n]] = of_sequences[number, :, : int(self.of_q[b, n].sum())]
        p = np.exp(self.scores - lse[..., None])
        dp = np.einsum("bthk,bshk->bhts", d_out, self.v) - np.einsum("bthk,bthk->bht", d_out, out)[..., None]
        ds = p * dp * self.scale
        d_k, d_v = (np.einsum("bhts,bthk->bshk", *pair) for pair in ((ds, np.float32(self.q)), (p, d_out)))
        d_k, d_v = (x.reshape(*x.shape[:2], -1, 2, x.shape[3]).sum(axis=3) for x in (d_k, d_v))
        d_q = np.einsum("bhts,bshk->bthk", ds, self.k)
        return *self.kept(self.of_q, d_q), *self.kept(self.of_k, d_k, d_v)


def on_host(run, shapes, *arrays):
    return jax.pure_callback(lambda *each: tuple(run(*map(np.asarray, each))), shapes, *arrays)


@pytest.fixture
def cudnn(monkeypatch):
    """Replaces cuDNN by ``Call``."""

    def forward(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, return_residual, **settings):
        spans = (q_seqlen, kv_seqlen, q_offsets, kv_offsets)
        lse = jax.ShapeDtypeStruct((q_seqlen.size, q.shape[2], q.shape[1]), jnp.float32)
        return on_host(lambda *each: Call(*each[:3], each[3:], settings).forward(), (q, lse), q, k, v, *spans)

    class Backward:
        @staticmethod
        def bind(q, k, v, *others, **settings):
            spans, saved = others[1:5], others[7:]
            run = lambda *each: Call(*each[:3], each[3:7], settings).backward(*each[7:])  # noqa: E731
            return on_host(run, (q, k, v), q, k, v, *spans, *saved)

    monkeypatch.setattr(wrapper, "dot_product_attention", forward)
    monkeypatch.setattr(wrapper, "_dot_product_attention_bwd_p_wrapper", Backward)


def test_calls_for_nodes_and_roots_are_joined(cudnn):
    first = [(6, [(3, ()), (1, ())]), (5, ()), (2, [(4, ()), (4, ()), (2, ())])]
    ends = np.stack([ends_of(32, trees) for trees in (first, [(9, ()), (1, [(2, ()), (8, ())])], [])])
    check_trees(functools.partial(cudnn_attention, trees=True), ends)


H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
HEADS = PolicyConfig(16, 8, 16, 1, 4, 2, 16)


def test_a_kernel_that_does_not_run_is_named():
    assert why_no_trees("auto", H100, "bfloat16", HEADS).startswith("cudnn's attention of trees fails on NVIDIA H100: ")
    assert why_no_trees("auto", jax.devices("cpu")[0], "bfloat16", HEADS) == ""


@pytest.mark.harness
def test_a_run_asks_the_kernel_for_a_small_row_of_trees(cudnn, monkeypatch):
    assert why_no_trees("auto", H100, "bfloat16", HEADS) == ""
    monkeypatch.setattr(Call, "backward", lambda call, lse, out, d_out: [x * 2 for x in (call.q, *call.kv)])
    assert why_no_trees("auto", H100, "bfloat16", HEADS).startswith("cudnn's attention of trees has relative errors")
