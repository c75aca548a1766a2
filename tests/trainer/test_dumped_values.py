"""An update keeps entropies and log-probabilities of likeliest tokens for token dumps."""

import jax
import numpy as np
import pytest
import tiny_step
from tiny_step import CONFIG, COUNT, LONGEST, MESH, forward_of, fresh_state, keep_gradient, make_step, packed

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.model import init_params
from rljax.trainer.exact import ExactPass, ExactUpdate
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.state import PrecisionConfig
from rljax.trainer.update import MultipleUpdates, SingleUpdate, UpdateOptions

K, TEMPERATURE = 3, 0.8
FLOAT32 = PrecisionConfig("float32")
CENTERED = CorrectionConfig(score_centering=True)


def with_tops():
    """Returns sequences with the ids of K random tokens at each place, and of one fewer at the last one."""
    rng, found = np.random.default_rng(5), []
    for s in tiny_step.sequences():
        ids = np.stack([rng.permutation(CONFIG.vocab_size)[:K] for _ in s.response]).astype(np.int32)
        logprobs = np.log(rng.dirichlet(np.ones(K + 1), len(ids))[:, :K]).astype(np.float32)
        ids[-1, -1], logprobs[-1, -1] = -1, -np.inf
        found.append(s.add({"top_ids": ids, "top_logprobs": logprobs}))
    return found


def written_out(given):
    """Yields each sequence's entropy [r] and log-probabilities of likeliest tokens [r, k]. A row has one sequence."""
    rows = tiny_step.log_distributions(init_params(CONFIG, 0), *tiny_step.in_own_rows(given), TEMPERATURE)
    for s, row in zip(given, np.asarray(rows, np.float64), strict=True):
        every = row[len(s.prompt) - 1 :][: len(s.response)]
        ids = np.maximum(s["top_ids"], 0)
        tops = np.where(s["top_ids"] < 0, -np.inf, np.take_along_axis(every, ids, axis=1))
        yield -(np.exp(every) * every).sum(axis=1), tops


def make_update(kind, for_dumps, correction):
    if kind == "exact":
        objective = Objective(LossConfig(), correction.resolved(), COUNT, 16)
        asked = {"rows": 3, "row_tokens": LONGEST, "reported": K}
        exact = ExactPass(CONFIG, MESH, precision=FLOAT32, objective=objective, **asked)
        where = {"precision": FLOAT32, "temperature": TEMPERATURE, "diagnosis": DiagnosisConfig()}
        return ExactUpdate(exact, CONFIG, keep_gradient(), **where, for_dumps=for_dumps)
    step = make_step(correction=correction, temperature=TEMPERATURE, for_dumps=for_dumps)
    if kind == "one":
        return SingleUpdate(step, forward_of(step), packed)
    shape = {"mini_batches": 1, "epochs": 1, "group_size": 3}
    return MultipleUpdates(step, forward_of(step), packed, packed, **shape, for_dumps=for_dumps)


def trained(kind, for_dumps, correction=CENTERED):
    update, given = make_update(kind, for_dumps, correction), with_tops()
    return given, update(fresh_state(), update.pack(given), given, UpdateOptions(1e-2, 0, False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "correction"),
    [
        *(pytest.param(kind, CENTERED, marks=pytest.mark.harness) for kind in ("one", "several")),
        *(("exact", CENTERED), ("one", CorrectionConfig())),
    ],
)
def test_kept_values_are_those_of_a_plain_forward(kind, correction):
    """Some sequences are in the loss and some are not. Micro-batches without loss take a forward alone."""
    given, found = trained(kind, True, correction)
    values = found.trainer()
    # The separate forward scores no likeliest tokens. The exact pass has the sampler's own numbers of them.
    assert (values.tops is None) == (kind != "one" or correction is not CENTERED)
    for i, (s, (entropy, tops)) in enumerate(zip(given, written_out(given), strict=True)):
        assert len(values.logprobs[i]) == len(s.response)
        np.testing.assert_allclose(values.entropy[i], entropy, atol=2e-5, rtol=0)
        if values.tops is not None:
            np.testing.assert_allclose(values.tops[i], tops, atol=5e-5, rtol=0)


@pytest.mark.harness
@pytest.mark.slow
def test_kept_values_change_no_number_of_the_update():
    """The gradient, row and log-probabilities are the same bit for bit. Without dumps nothing is kept."""
    (_, plain), (_, kept) = trained("one", False), trained("one", True)
    assert plain.trainer()[1:] == (None, None)
    traces = [found.state.opt_state.inner_state.trace for found in (plain, kept)]
    jax.tree.map(np.testing.assert_array_equal, *traces)
    assert plain.row == pytest.approx(kept.row, rel=0, abs=0, nan_ok=True)
    jax.tree.map(np.testing.assert_array_equal, plain.trainer().logprobs, kept.trainer().logprobs)
