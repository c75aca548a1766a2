"""The gradient and the corrections of a batch must not depend on its micro-batches and on the packing into rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.algorithms.correction_choice import CorrectionConfig, correct, gradient_divisor
from rljax.algorithms.losses import LossConfig, aggregation_weights, kl_penalty, policy_loss
from rljax.mismatch import importance_weights, merge
from rljax.mismatch.correction import finalize_correction

T = 16
ROWS, ROW_TOKENS = 2, 32
SEQUENCES = 8
NAMES = ("logprobs", "old", "rollout", "advantages", "reference")

COMBINATIONS = {
    "paper": (LossConfig(), CorrectionConfig(preset="token_tis")),
    "reinforce": (
        LossConfig(kind="policy_gradient", aggregation="sequence_sum", sequence_constant=20),
        CorrectionConfig(level="sequence", mode="mask", threshold=1.3, normalize=True),
    ),
    "gspo": (
        LossConfig(kind="gspo", clip_low=0.05, clip_high=0.05, aggregation="sequence_mean"),
        CorrectionConfig(level="token", mode="band", threshold_low=0.6, threshold=1.6, normalize=True),
    ),
    "cispo": (
        LossConfig(kind="cispo", clip_low=1.0, kl="k3", kl_coefficient=0.1),
        CorrectionConfig(level="geometric", threshold=1.05, reject_k3=0.03, veto=0.4),
    ),
}


@st.composite
def layouts(draw):
    """Draws a batch of padded sequences, some of them empty, and two layouts in rows and micro-batches."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(0, T), min_size=1, max_size=SEQUENCES))
    shape = (len(lengths), T)
    old = -rng.exponential(0.7, shape)
    arrays = {
        "logprobs": old + 0.2 * rng.standard_normal(shape),
        "old": old,
        "rollout": old + 0.2 * rng.standard_normal(shape),
        "advantages": np.broadcast_to(rng.standard_normal((len(lengths), 1)), shape),
        "reference": old + 0.1 * rng.standard_normal(shape),
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    mask = (np.arange(T) < np.array(lengths)[:, None]) & (rng.random(shape) < 0.9)
    return arrays, mask, [draw(places(lengths)) for _ in range(2)]


@st.composite
def places(draw, lengths):
    """Draws (micro-batch, row, first token) of each sequence, in a random order; at most three micro-batches."""
    filled: dict[tuple[int, int], int] = {(m, r): 0 for m in range(3) for r in range(ROWS)}
    found = {}
    for sequence in draw(st.permutations(range(len(lengths)))):
        room = [place for place, used in filled.items() if used + lengths[sequence] <= ROW_TOKENS]
        place = draw(st.sampled_from(room))
        gap = draw(st.integers(0, min(2, ROW_TOKENS - filled[place] - lengths[sequence])))
        found[sequence] = (*place, filled[place] + gap)
        filled[place] += gap + lengths[sequence]
    return found


@functools.cache
def micro_step(name):
    """Returns a function of one micro-batch that computes what the training step computes.

    The results are the gradient of the sum, the denominator and the rest.
    """
    loss, correction = COMBINATIONS[name]

    def run(arrays, mask, ids):
        where = {"sequence_ids": ids, "num_sequences": SEQUENCES}
        weights, kept, totals = correct(correction, arrays["old"], arrays["rollout"], mask, **where)
        share, denominator = aggregation_weights(loss.aggregation, kept, constant=20, **where)

        def total(logprobs):
            losses, _ = policy_loss(loss, logprobs, arrays["old"], arrays["advantages"], kept, **where)
            summed = jnp.sum(share * weights * losses)
            if loss.kl != "none":
                penalty = kl_penalty(loss.kl, logprobs, arrays["reference"], kept)
                summed += loss.kl_coefficient * jnp.sum(share * penalty)
            return summed

        return jax.grad(total)(arrays["logprobs"]), denominator, weights, kept, totals

    return jax.jit(run)


def whole_batch(name, arrays, mask, layout):
    """Returns the padded gradient, weights over their divisor and kept mask, and the finalized totals."""
    padded = {key: np.zeros((len(mask), T), np.float32) for key in ("gradient", "weights", "kept")}
    results = []
    for micro in range(3):
        rows = {key: np.full((ROWS, ROW_TOKENS), np.nan, np.float32) for key in NAMES}
        row_mask, ids = np.zeros((ROWS, ROW_TOKENS), bool), np.zeros((ROWS, ROW_TOKENS), np.int32)
        mine = {s: (row, start) for s, (m, row, start) in layout.items() if m == micro}
        for sequence, (row, start) in mine.items():
            length = int(np.max(np.flatnonzero(mask[sequence]), initial=-1)) + 1
            place = slice(start, start + length)
            for key in NAMES:
                rows[key][row, place] = arrays[key][sequence, :length]
            row_mask[row, place], ids[row, place] = mask[sequence, :length], sequence
        gradient, denominator, weights, kept, totals = micro_step(name)(rows, row_mask, ids)
        results.append((denominator, totals))
        for sequence, (row, start) in mine.items():
            length = min(T, ROW_TOKENS - start)
            for key, source in (("gradient", gradient), ("weights", weights), ("kept", kept)):
                values = np.where(mask[sequence, :length], source[row, start : start + length], 0)
                padded[key][sequence, :length] = values
    totals = functools.reduce(merge, [totals for _, totals in results])
    divisor = float(gradient_divisor(COMBINATIONS[name][1], totals))
    denominator = max(sum(float(d) for d, _ in results), 1.0)
    padded["gradient"] /= denominator * divisor
    padded["weights"] /= divisor
    return padded, {key: float(value) for key, value in finalize_correction(totals).items()}


@pytest.mark.parametrize("name", COMBINATIONS)
@settings(max_examples=12, deadline=None)
@given(layouts())
def test_layout_changes_nothing(name, batch):
    arrays, mask, (first, second) = batch
    (one, row_one), (two, row_two) = (whole_batch(name, arrays, mask, layout) for layout in (first, second))
    np.testing.assert_array_equal(one["kept"], two["kept"])
    for key in ("gradient", "weights"):
        assert np.isfinite(one[key]).all()
        np.testing.assert_allclose(one[key], two[key], rtol=1e-5, atol=1e-5 * np.abs(one[key]).max(initial=0))
    assert row_one == pytest.approx(row_two, rel=1e-5)
    config = COMBINATIONS[name][1].resolved()
    threshold = (config.threshold_low, config.threshold) if config.mode == "band" else config.threshold
    expected, stats = importance_weights(
        arrays["old"],
        arrays["rollout"],
        mask,
        level=config.level,
        mode=config.mode,
        threshold=threshold,
        normalize=config.normalize,
    )
    np.testing.assert_allclose(one["weights"], expected, rtol=1e-5)
    for key, value in stats.items():
        assert row_one[key] == pytest.approx(value, rel=1e-5), key
