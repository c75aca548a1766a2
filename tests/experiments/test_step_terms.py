"""Tests of the terms A, B and C from gradients of batches: by hand, without their noise, and on a whole run."""

import json

import numpy as np
import pytest
from gradient_terms import main, total_variation
from step_terms import Moments, growth_exponent, jackknife, moments, products, terms
from toy_runs import complete, outcome, tiny


def test_hand_worked_moments():
    """There are two batches. The second coordinate counts four times, so products are x1 y1 + 4 x2 y2."""
    exact, bias = np.array([[1.0, 1.0], [3.0, 0.0]]), np.array([[0.0, 1.0], [2.0, 1.0]])
    sampled = np.array([[1.0, 0.0], [1.0, 2.0]])
    found = moments(products(exact, bias, sampled, np.array([1.0, 4.0])))
    # The exact moment is 1 * 3 + 4 * 1 * 0, and the cross one is (1 * 2 + 4 * 1 * 1 + 3 * 0 + 4 * 0 * 1) / 2. The bias
    # is 0 * 2 + 4 * 1 * 1. The sampled squares are 1 and 17, and their product is 1.
    assert found == Moments(gradient=3.0, cross=3.0, bias=4.0, variance=9.0 - 1.0)


def test_hand_worked_terms():
    """J = -x^2 at x = 1 has gradient -2 and L = 2.

    As in test_appendix_a.py, g is -1 or -5: mean -3, bias -1, variance 4.
    """
    found = terms(Moments(gradient=4.0, cross=2.0, bias=1.0, variance=4.0), rate=0.1, smoothness=2.0)
    assert found == pytest.approx({"A": 0.36, "B": 0.16, "C": 0.05, "A+B-C": 0.47})


def test_no_moment_is_raised_by_the_noise_of_batches():
    """The means over 400 sets of 6 noisy batches are the true moments, within 4 standard errors of these means."""
    rng = np.random.default_rng(0)
    metric = np.array([0.5, 1.0, 2.0])
    gradient, bias = np.array([0.3, -0.2, 0.1]), np.array([0.1, 0.1, -0.2])
    found = []
    for _ in range(400):
        noise = rng.standard_normal((6, 3))  # the noise of one batch is in both estimates
        exact, biases = gradient + noise, bias + 0.5 * noise + 0.1 * rng.standard_normal((6, 3))
        sampled = gradient + bias + 2.0 * rng.standard_normal((6, 3))
        found.append(moments(products(exact, biases, sampled, metric)))
    truth = (gradient**2 @ metric, (gradient * bias) @ metric, bias**2 @ metric, 4.0 * metric.sum())
    values = np.array(found)
    error = values.std(0, ddof=1) / np.sqrt(len(values))
    assert np.all(np.abs(values.mean(0) - truth) < 4 * error), (values.mean(0), truth, error)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.array([1.0, 4.0, 2.0, 9.0])
    found = products(np.sqrt(values)[:, None], np.ones((4, 1)), np.ones((4, 1)), np.ones(1))
    error = jackknife(found, lambda inner: float(np.mean(np.diagonal(inner.exact))))
    assert error == pytest.approx(np.std(values, ddof=1) / 2)


def test_exponents():
    lengths = np.array([2.0, 4.0, 8.0])
    assert growth_exponent(lengths, 0.3 * lengths**2) == pytest.approx(2.0)
    assert growth_exponent(lengths, 5.0 * lengths) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="positive values, got"):
        growth_exponent(lengths, np.array([1.0, 0.0, 2.0]))


def test_hand_worked_total_variation():
    """The policy has two equally likely responses.

    The engine makes the first 1.5 times as likely, then 1.5 * 0.8 times.
    """
    ratios = np.log([[1.0, 1.5, 0.8], [1.0, 0.5, 1.0]])
    mask = np.array([[False, True, True], [False, True, False]])
    assert total_variation([ratios], [mask], [1, 2]) == pytest.approx([(0.5 + 0.5) / 4, (0.2 + 0.5) / 4])


@pytest.mark.slow
@pytest.mark.harness
def test_a_run_without_mismatch_has_no_bias_and_one_with_has(toy_base, tmp_path):
    """One run has float32 on both sides, and the other has weights and cache of 8 bits.

    The rest of both is the same.
    """
    engines = {
        "plain": ("--rollout.dtype", "float32"),
        "fp8": ("--rollout.weight-quantization", "fp8", "--rollout.kv-cache-dtype", "fp8_e5m2"),
    }
    for name, options in engines.items():
        words = tiny(toy_base, tmp_path / name, 2, "--precision.compute-dtype", "float32", *options)
        status, printed = complete([*words, "--rollout.max-response-tokens", "36", "--packing.row-tokens", "128"])
        assert status == 0, printed
    runs = [str(tmp_path / name) for name in engines]
    sizes = ("--steps", "2", "--batches", "6", "--steps-tried", "2", "--cuts", "8")
    status, out, err = outcome(main, [*runs, *sizes, "--json", str(tmp_path / "terms.json")])
    assert status == 0, err
    found = json.loads((tmp_path / "terms.json").read_text())["runs"]
    (plain,), (fp8,) = found["plain"], found["fp8"]
    assert plain["by_length"]["tokens"] == [8, 36]
    assert max(plain["by_length"]["total_variation"]) < 1e-4 < 1e-2 < min(fp8["by_length"]["total_variation"])
    assert plain["by_length"]["bias_norm"][-1] < 1e-3 * fp8["by_length"]["bias_norm"][-1]
    assert plain["terms"]["A+B-C"] == pytest.approx(
        plain["terms"]["A"] + plain["terms"]["B"] - plain["terms"]["C"], rel=1e-9
    )
    assert out.count("| plain | 2 |") == out.count("| fp8 | 2 |") == 1
    status, _, err = outcome(main, [*runs, "--steps", "2", "--batches", "2"])
    assert status == 2
    assert err.strip() == "error: --steps-tried must be from 2 to --batches = 2, got 8"
