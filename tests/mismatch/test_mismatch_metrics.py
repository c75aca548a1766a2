"""Every metric, and every number of another framework, is compared with an independent float64 text of its formula."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from isolated import run_with_only

from rljax.mismatch import framework_metrics, merge, mismatch_metrics, mismatch_statistics, read_tokens
from rljax.mismatch.metrics import finalize_mismatch
from rljax.mismatch.names import FRAMEWORKS, NAME_TABLE, PUBLISHED_BARS

LOG_PPL = [f"log_ppl_{name}" for name in ("diff", "diff_max", "diff_min", "abs_diff", "abs_diff_sum")]
LOGPROB = [f"logprob_abs_diff_{name}" for name in ("mean", "p99", "p999", "max")]
EXACT_ZERO = ["kl", "k3_kl", "chi2_token", "chi2_seq", "slope_per_1k", "extreme_rate", "flip_count", *LOG_PPL, *LOGPROB]
EXACT_ZERO += ["prob_abs_diff_mean", "prob_abs_diff_max"]
JITTED = jax.jit(mismatch_metrics)
BOTH = pytest.mark.parametrize("measure", ["host", "device"], indirect=True)


@pytest.fixture
def measure(request):
    """Returns mismatch_metrics for numpy arrays, computed on the host or by one jitted call on the device."""
    if request.param == "host":
        return mismatch_metrics

    def on_device(*arrays, **named):
        named = {name: jnp.asarray(array) for name, array in named.items()}
        found = JITTED(*map(jnp.asarray, arrays), **named)
        assert all(isinstance(value, jax.Array) and value.shape == () for value in found.values())
        return {name: float(value) for name, value in found.items()}

    on_device.limit = 60.0
    return on_device


def statistics_of(*arrays):
    return mismatch_statistics(read_tokens(*arrays))


def formulas(trainer, rollout, mask, entropy):
    """Returns the metrics of FACTS' table, computed from token values in float64 lists, sequence by sequence."""
    finite = mask & np.isfinite(trainer) & np.isfinite(rollout)
    rows = [(trainer[i, finite[i]], rollout[i, finite[i]]) for i in range(len(mask))]
    per_sequence = [(tr, ro) for tr, ro in rows if tr.size]
    p, q, lr = np.exp(trainer[finite]), np.exp(rollout[finite]), trainer[finite] - rollout[finite]
    # This is exp(trainer) - exp(rollout), but a difference of two floats would itself lose digits.
    gap = abs(q * np.expm1(lr))
    d = np.array([math.fsum(ro - tr) / len(tr) for tr, ro in per_sequence])
    sums = np.array([math.fsum(tr - ro) for tr, ro in per_sequence])
    running = [(np.arange(1, len(tr) + 1), np.cumsum(tr - ro)) for tr, ro in per_sequence]

    def mean(values):
        return math.fsum(values) / len(values)

    k3 = mean([math.expm1(x) - x if abs(x) > 0.01 else sum(x**n / math.factorial(n) for n in range(2, 9)) for x in lr])
    return {
        "kl": mean(-lr),
        "k3_kl": k3,
        "training_ppl": mean([math.exp(-tr.mean()) for tr, _ in per_sequence]),
        "rollout_ppl": mean([math.exp(-ro.mean()) for _, ro in per_sequence]),
        "training_log_ppl": mean([-tr.mean() for tr, _ in per_sequence]),
        "rollout_log_ppl": mean([-ro.mean() for _, ro in per_sequence]),
        "log_ppl_diff": mean(d),
        "log_ppl_abs_diff": mean(abs(d)),
        "log_ppl_abs_diff_sum": mean(abs(sums)),
        "log_ppl_diff_max": max(d),
        "log_ppl_diff_min": min(d),
        "ppl_ratio": mean(np.exp(d)),
        "chi2_token": mean(np.expm1(2 * np.clip(lr, -20, 20))),
        "chi2_seq": mean(np.expm1(2 * np.clip(sums, -20, 20))),
        "logprob_abs_diff_mean": mean(abs(lr)),
        "logprob_abs_diff_p99": np.quantile(abs(lr), 0.99),
        "logprob_abs_diff_p999": np.quantile(abs(lr), 0.999),
        "logprob_abs_diff_max": max(abs(lr)),
        "prob_abs_diff_mean": mean(gap),
        "prob_abs_diff_max": max(gap),
        "pearson_corr": np.corrcoef(p, q)[0, 1],
        "slope_per_1k": 1000 * sum((x * y).sum() for x, y in running) / sum((x * x).sum() for x, _ in running),
        "kl_entropy_ratio": k3 / mean(entropy[finite]),
        "extreme_rate": mean(abs(lr) > 0.5),
        "flip_count": sum(((p > 0.9) & (q < 0.1)) | ((q > 0.9) & (p < 0.1))),
        "nonfinite_count": np.sum(mask & ~finite),
        "saturated_count": 0,
        "token_count": len(lr),
        "sequence_count": len(d),
    }


def batch(scale, b=12, t=300, seed=0, spikes=True):
    """Returns float32 log-probabilities with log-ratios near ``scale``, ragged lengths, holes and an empty row."""
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(0.7, (b, t)).astype(np.float32)
    trainer = np.minimum(rollout + scale * rng.standard_normal((b, t)), 0).astype(np.float32)
    length = rng.integers(1, t + 1, b)
    mask = (np.arange(t) < length[:, None]) & (rng.random((b, t)) < 0.93)
    mask[3] = False
    if spikes:
        mask[0, :4] = True
        trainer[0, :2], rollout[0, :2] = (-0.01, -4.0), (-5.0, -0.02)
        trainer[0, 2], rollout[0, 3] = -np.inf, np.nan
    trainer[:, -1], mask[:, -1] = np.nan, False
    entropy = rng.exponential(0.4, (b, t)).astype(np.float32)
    return trainer, rollout, mask, entropy


def relative(found, expected):
    return abs(found - expected) / max(abs(expected), 1e-300) if found != expected else 0.0


@BOTH
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.3])
@pytest.mark.parametrize("spikes", [False, True])
def test_every_metric_equals_its_formula(measure, scale, spikes):
    trainer, rollout, mask, entropy = batch(scale, spikes=spikes)
    expected = formulas(trainer.astype(np.float64), rollout.astype(np.float64), mask, entropy.astype(np.float64))
    found = measure(trainer, rollout, mask, entropy=entropy)
    assert found.keys() == expected.keys()
    assert all(type(value) is float for value in found.values())
    on_host = measure is mismatch_metrics
    for name, value in expected.items():
        bound = 1e-13 if on_host else 0.0101 if "_p99" in name else 1e-5
        assert relative(found[name], value) <= bound, name


@BOTH
def test_equal_engines_measure_exactly_nothing(measure):
    _, rollout, mask, _ = batch(0.1, spikes=False)
    found = measure(rollout, rollout, mask)
    assert {name: str(found[name]) for name in EXACT_ZERO} == dict.fromkeys(EXACT_ZERO, "0.0")
    assert found["ppl_ratio"] == 1.0
    assert found["pearson_corr"] == pytest.approx(1.0, abs=2e-7)


@BOTH
@pytest.mark.parametrize("ratio", [50.0, -50.0, 200.0, -200.0])
def test_extreme_ratios_stay_finite(measure, ratio):
    trainer = np.full((2, 4), -210.0, np.float32)
    rollout = trainer.copy()
    trainer[0, 1] += ratio
    found = measure(trainer, rollout, np.ones((2, 4), bool))
    assert all(math.isfinite(value) for value in found.values()), found
    assert found["logprob_abs_diff_max"] == abs(ratio)
    assert found["nonfinite_count"] == 0
    assert found["saturated_count"] == (abs(ratio) > getattr(measure, "limit", 600.0))
    if ratio == 50:
        assert relative(found["k3_kl"], math.exp(50) / 8) < 1e-5


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("side", [0, 1])
def test_nonfinite_tokens_are_counted_and_left_out(measure, value, side):
    trainer, rollout, mask, entropy = batch(0.05, spikes=False)
    mask[1, :5] = True
    clean = mask.copy()
    clean[1, 2] = False
    pair = [trainer.copy(), rollout.copy()]
    pair[side][1, 2] = value
    found = measure(*pair, mask, entropy=entropy)
    expected = measure(trainer, rollout, clean, entropy=entropy)
    assert found.pop("nonfinite_count") == 1
    assert expected.pop("nonfinite_count") == 0
    assert found == expected


@BOTH
@pytest.mark.parametrize("shape", [(3, 7), (0, 7), (3, 0)])
def test_nothing_to_measure_gives_zeros(measure, shape):
    nan = np.full(shape, np.nan, np.float32)
    found = measure(nan, nan, np.zeros(shape, bool), entropy=nan)
    assert found == dict.fromkeys(found, 0.0)


def test_constant_numbers_have_a_defined_correlation_and_slope():
    same, other = np.full((1, 3), -1.0), np.array([[-1.0, -2.0, -3.0]])
    assert mismatch_metrics(same, same, np.ones((1, 3)))["pearson_corr"] == 1.0
    assert mismatch_metrics(same, other, np.ones((1, 3)))["pearson_corr"] == 0.0
    drift = mismatch_metrics(same - 0.001, same, np.ones((1, 3)))
    assert drift["slope_per_1k"] == pytest.approx(-1.0)
    assert "kl_entropy_ratio" not in drift


def test_no_gradient_flows_and_remat_and_vmap_work():
    trainer, rollout, mask, _ = (jnp.asarray(array) for array in batch(1e-2, b=4, t=16, spikes=False))
    trainer = jnp.where(mask, trainer, 0)

    @jax.checkpoint
    def loss(x):
        statistics = statistics_of(x, rollout, mask)
        return jnp.sum(x**2), statistics

    (_, statistics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainer)
    np.testing.assert_array_equal(gradient, 2 * trainer)
    gradient = jax.jit(jax.grad(lambda x: sum(jnp.sum(v) for v in JITTED(x, rollout, mask).values())))(trainer)
    assert not np.any(gradient)

    rows = jax.jit(jax.vmap(statistics_of))(trainer[:, None], rollout[:, None], mask[:, None])
    parts = [jax.tree.map(lambda array, i=i: array[i], jax.device_get(rows)) for i in range(len(mask))]
    merged = finalize_mismatch(functools.reduce(merge, parts))
    for name, value in finalize_mismatch(jax.device_get(statistics)).items():
        assert relative(merged[name], value) < 1e-5, name


def test_half_precision_is_read_and_summed_in_float32():
    trainer, rollout, mask, _ = batch(0.1, spikes=False)
    half = [jnp.asarray(array, jnp.bfloat16) for array in (trainer, rollout)]
    found = JITTED(*half, jnp.asarray(mask))
    expected = mismatch_metrics(*(np.asarray(array, np.float64) for array in half), mask)
    assert found["kl"].dtype == jnp.float32
    for name in ("kl", "k3_kl", "log_ppl_abs_diff"):
        assert relative(float(found[name]), expected[name]) < 1e-5


def test_callers_mistakes_say_what_was_expected():
    ones = np.ones((2, 3))
    with pytest.raises(ValueError, match="entropy must have the shape"):
        mismatch_metrics(ones, ones, ones, entropy=ones[:1])
    outside, split = np.array([[0, 0, 1], [2, 2, 2]]), np.array([[0, 0, 1], [0, 2, 2]])
    for arrays, named, message in (
        ((ones, ones, ones.T), {}, r"response_mask must have the shape .*\(2, 3\), got \(3, 2\)"),
        ((ones.ravel(),) * 3, {}, r"\[b, t\], got shape \(6,\)"),
        ((ones,) * 3, {"sequence_ids": ones}, "given together, got no num_sequences"),
        ((ones,) * 3, {"sequence_ids": outside, "num_sequences": 2}, r"0 \.\. 1 inside the mask, got 0 \.\. 2"),
        ((ones,) * 3, {"sequence_ids": split, "num_sequences": 3}, r"whole inside one row, got pieces of \[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tokens(*arrays, **named)


def test_the_package_needs_jax_and_numpy_and_no_other_room():
    given = "numpy.zeros((1, 2)), numpy.zeros((1, 2)), numpy.ones((1, 2))"
    program = f"import numpy, rljax.mismatch\nassert rljax.mismatch.mismatch_metrics({given})['kl'] == 0.0\n"
    packages = ("jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy")
    done = run_with_only(packages, program, room="mismatch")
    assert done.stdout.strip() == "isolated", done.stderr


@pytest.fixture(scope="module")
def five():
    """Returns five sequences of unequal length, with log-ratios near 0.05 and one far token."""
    rng = np.random.default_rng(7)
    rollout = -rng.exponential(0.7, (5, 40))
    trainer = np.minimum(rollout + 0.05 * rng.standard_normal((5, 40)), -1e-9)
    mask = np.arange(40) < np.array([[40], [3], [17], [1], [25]])
    trainer[0, 5], rollout[0, 5] = -2.5, -0.1
    return trainer, rollout, mask


def by_formula(trainer, rollout, mask):
    """Returns the number of each formula of a framework, on whole sequences and without micro-batches."""
    ours = formulas(trainer, rollout, mask, np.ones(mask.shape))
    lr, gap = (trainer - rollout)[mask], abs(np.exp(trainer) - np.exp(rollout))[mask]
    rows = [(trainer - rollout)[i, mask[i]] for i in range(len(mask))]
    names = {
        "<-lr>": "kl",
        "<exp(lr) - lr - 1>": "k3_kl",
        "mean_i exp(-mean_t trainer)": "training_ppl",
        "mean_i exp(-mean_t rollout)": "rollout_ppl",
        "mean_i -mean_t trainer": "training_log_ppl",
        "mean_i -mean_t rollout": "rollout_log_ppl",
        "mean_i mean_t -lr": "log_ppl_diff",
        "mean_i abs(mean_t lr)": "log_ppl_abs_diff",
        "max_i mean_t -lr": "log_ppl_diff_max",
        "min_i mean_t -lr": "log_ppl_diff_min",
        "mean_i exp(mean_t -lr)": "ppl_ratio",
        "<exp(2 clip(lr, +-20))> - 1": "chi2_token",
        "mean_i exp(2 clip(sum_t lr, +-20)) - 1": "chi2_seq",
        "<abs(exp(trainer) - exp(rollout))>": "prob_abs_diff_mean",
        "max abs(exp(trainer) - exp(rollout))": "prob_abs_diff_max",
        "correlation of the two probabilities": "pearson_corr",
        "<abs(lr)>": "logprob_abs_diff_mean",
        "max abs(lr)": "logprob_abs_diff_max",
    }
    cap = "no cap or mask"
    return {formula: ours[name] for formula, name in names.items()} | {
        "<exp(-lr) + lr - 1>": np.mean(np.exp(-lr) + lr - 1),
        "standard deviation (n - 1) over tokens of abs(exp(trainer) - exp(rollout))": gap.std(ddof=1),
        "standard deviation (n - 1) over tokens of abs(lr)": abs(lr).std(ddof=1),
        "<exp(abs(lr))>": np.exp(abs(lr)).mean(),
        "max exp(min(abs(lr), 20))": np.exp(np.minimum(abs(lr), 20)).max(),
        "mean_i mean_t (exp(lr) - lr - 1)": np.mean([np.mean(np.exp(row) - row - 1) for row in rows]),
        "mean_i mean_t abs(lr)": np.mean([abs(row).mean() for row in rows]),
        "<lr> (signed)": lr.mean(),
        f"<lr>, {cap}": lr.mean(),
        f"max lr, {cap}": lr.max(),
        f"min lr, {cap}": lr.min(),
        f"<exp(lr)> of tokens, {cap} (here lr is clipped at +-20)": np.exp(lr).mean(),
        "share of tokens with abs(lr) > 1e-6": np.mean(abs(lr) > 1e-6),
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numbers_are_the_frameworks_own(five, framework):
    known = by_formula(*five)
    wanted = {name: float(known[formula]) for name, formula, _ in NAME_TABLE[framework]}
    assert framework_metrics(statistics_of(*five), framework) == pytest.approx(wanted, rel=1e-12)
    device = jax.device_get(jax.jit(statistics_of)(*(jnp.asarray(array) for array in five)))
    assert framework_metrics(device, framework) == pytest.approx(wanted, rel=2e-6)


def test_names_are_single_and_nothing_to_measure_is_finite():
    keys = [(framework, name) for framework in FRAMEWORKS for name, _, _ in NAME_TABLE[framework]]
    assert (len(FRAMEWORKS), len(set(keys))) == (9, len(keys))
    assert set(PUBLISHED_BARS) <= set(keys)
    nothing = statistics_of(*(np.zeros((2, 3)),) * 3)
    for framework in FRAMEWORKS:
        assert all(np.isfinite(value) for value in framework_metrics(nothing, framework).values())
    with pytest.raises(ValueError, match=r"framework must be one of .* got 'openrlhf'"):
        framework_metrics(nothing, "openrlhf")


def test_the_documentation_lists_every_name():
    text = (Path(__file__).parents[2] / "docs" / "mismatch.md").read_text()
    for framework in FRAMEWORKS:
        for name, formula, value in NAME_TABLE[framework]:
            ours = f"`{value}`" if isinstance(value, str) else ""
            assert f"| {framework} | `{name}` | `{formula}` | {ours} |" in text
    for name in mismatch_metrics(*(np.ones((1, 1)),) * 3, entropy=np.ones((1, 1))):
        assert f"`{name}`" in text or f"`{name[name.rindex('_') :]}`" in text, name
