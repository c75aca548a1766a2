"""Measures terms A, B and C of the paper's appendix A, and the growth of the bias with length, at steps of runs.

    python experiments/gradient_terms.py runs/study-slow/constant-0 --steps 40 80 120 --json benchmarks/terms.json

The runs must have kept the checkpoints of those steps. The program measures with the weights of each checkpoint:

grad J: The policy gradient of batches that the trained policy samples (embedded engine and forward in float32).
g: The policy gradient of batches that the run's engine samples.
bias: E[g] - grad J, from batches of the trained policy. The weight of a response is its ratio of probabilities, engine
  / policy, minus 1.
progress: J after a step of rate * g / (sqrt(v) + eps), minus J, by importance weights from batches of the trained
  policy. L is the second difference of a step forward and a step back, over |rate g|^2.

A gradient is the mean over responses of advantage times score (equation 3), divided by the mean length, as in the
trainer. All gradients use the metric of Adam's second moments v, in which Adam without momentum is plain ascent. The
clip of the norm and the weight decay are left out. The noise of batches is removed from squares (step_terms.py); +- is
a standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from policy_batches import Batch, Forward, Sampler
from step_terms import Products, growth_exponent, jackknife, moments, products, terms
from tqdm import tqdm

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.evaluate import Policy, find_policy
from rljax.mismatch.accurate import RATIO_BOUND
from rljax.record.rows import read_rows
from rljax.rollout.build import make_engine
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.sharding import MeshConfig, make_mesh


class CheckpointBatches(NamedTuple):
    """The batches of one checkpoint."""

    exact: list[Batch]  # sampled by the trained policy
    log_ratios: list[np.ndarray]  # log engine - log policy of each exact batch, float64 [b, t], 0 outside the responses
    engine: list[Batch]  # sampled by the run's engine


def sample_batches(policy: Policy, settings: Config, params: Any, options: argparse.Namespace) -> CheckpointBatches:
    """Samples ``options.batches`` batches of both kinds."""
    mesh, sampler = make_mesh(MeshConfig()), Sampler(policy, settings, options.batches, options.seed)
    sizes = {"max_prompt_tokens": settings.data.max_prompt_tokens, "max_tokens": settings.max_engine_tokens}
    seeds = np.random.SeedSequence([options.seed, policy.step or 0]).generate_state(2 * options.batches)
    sampled = CheckpointBatches([], [], [])
    with contextlib.ExitStack() as stack:
        engines: list[Any] = []
        for rollout in (RolloutConfig(engine="jax", dtype="float32"), settings.rollout):
            engines.append(stack.enter_context(contextlib.closing(make_engine(rollout, policy.config, mesh, **sizes))))
            engines[-1].publish(params, 0)
        exact_engine, run_engine = engines
        for i in tqdm(range(options.batches), desc=f"step {policy.step}: sampling", unit="batch", leave=False):
            sampled.exact.append(sampler.sample(exact_engine, i, int(seeds[2 * i])))
            sampled.log_ratios.append(sampler.score(run_engine, sampled.exact[-1]) - sampled.exact[-1].logprobs)
            sampled.engine.append(sampler.sample(run_engine, i, int(seeds[2 * i + 1])))
    return sampled


def adam_metric(state: Any, settings: Config) -> np.ndarray:
    """Computes 1 / (sqrt(v) + eps) of each parameter, float64 [d], with Adam's bias-corrected v."""

    def is_adam(leaf: Any) -> bool:
        return hasattr(leaf, "nu") and hasattr(leaf, "count")

    (adam,) = (leaf for leaf in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(leaf))
    v = np.asarray(ravel_pytree(adam.nu)[0], np.float64) / (1.0 - settings.optimizer.b2 ** int(adam.count))
    return 1.0 / (np.sqrt(v) + settings.optimizer.eps)


def measured_progress(
    forward: Forward, params: Any, batches: Sequence[Batch], gradients: Sequence[np.ndarray], step: np.ndarray
) -> np.ndarray:
    """Measures J at params + step * g and at params - step * g, minus J, float64 [gradients, 2, batches].

    J is the mean reward, estimated by importance weights from batches of ``params``. Advantages replace rewards; the
    difference has no effect on average.
    """
    flat, unravel = ravel_pytree(params)
    flat = np.asarray(flat, np.float64)
    before = [forward.logprobs(params, batch).sum(1) for batch in batches]
    progress = np.zeros((len(gradients), 2, len(batches)))
    for i, gradient in enumerate(tqdm(gradients, desc="progress", unit="step", leave=False)):
        for side, sign in enumerate((1.0, -1.0)):
            moved = unravel(np.asarray(flat + sign * step * gradient, np.float32))
            for j, batch in enumerate(batches):
                log_ratio = forward.logprobs(moved, batch).sum(1) - before[j]
                grown = np.expm1(np.clip(log_ratio, -RATIO_BOUND, RATIO_BOUND))
                progress[i, side, j] = np.mean(grown * batch.advantages)
    return progress


def total_variation(log_ratios: Sequence[np.ndarray], masks: Sequence[np.ndarray], cuts: Sequence[int]) -> list[float]:
    """Computes E |engine / policy - 1| / 2 for the first ``cut`` tokens of the two policies, for each cut."""
    variations = []
    for cut in cuts:
        ratios = [np.where(np.cumsum(m, 1) <= cut, x, 0.0).sum(1) for x, m in zip(log_ratios, masks, strict=True)]
        variations.append(float(np.mean(np.abs(np.expm1(np.concatenate(ratios))))) / 2.0)
    return variations


def measure(policy: Policy, options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything at one checkpoint."""
    settings = policy.settings()
    state = policy.load_state(make_mesh(MeshConfig()))
    sampled = sample_batches(policy, settings, state.params, options)
    forward = Forward(policy.config, settings.rollout.temperature)
    masks = [batch.mask for batch in sampled.exact]
    length = float(np.mean(np.concatenate([mask.sum(1) for mask in masks])))
    parted = [np.expm1(np.clip(x.sum(1), -RATIO_BOUND, RATIO_BOUND)) for x in sampled.log_ratios]

    def gradients(batches: Sequence[Batch], weights: Sequence[np.ndarray]) -> np.ndarray:
        pairs = zip(batches, weights, strict=True)
        return np.stack([forward.gradient(state.params, batch, weight) for batch, weight in pairs]) / length

    def bias_of(cut: int) -> np.ndarray:
        first = [np.cumsum(mask, 1) <= cut for mask in masks]
        pairs = zip(sampled.exact, parted, first, strict=True)
        return gradients(sampled.exact, [(b.advantages * p)[:, None] * f for b, p, f in pairs])

    metric, rate = adam_metric(state, settings), recorded_rate(policy)
    limit = settings.rollout.max_response_tokens
    cuts = [cut for cut in sorted(options.cuts) if cut < limit] + [limit]
    biases = {cut: bias_of(cut) for cut in tqdm(cuts, desc="bias by length", unit="length", leave=False)}
    exact = gradients(sampled.exact, [batch.advantages[:, None] for batch in sampled.exact])
    drawn = gradients(sampled.engine, [batch.advantages[:, None] for batch in sampled.engine])
    inner = products(exact, biases[limit], drawn, metric)
    progress = measured_progress(forward, state.params, sampled.exact, drawn[: options.steps_tried], rate * metric)
    return {
        "step": policy.step,
        "rate": rate,
        "accuracy": float(np.mean([batch.rewards for batch in sampled.exact])),
        "accuracy_of_engine": float(np.mean([batch.rewards for batch in sampled.engine])),
        "mean_length": length,
        **step_numbers(inner, progress, rate, length),
        "by_length": by_length(cuts, biases, metric, total_variation(sampled.log_ratios, masks, cuts)),
    }


def step_numbers(inner: Products, progress: np.ndarray, rate: float, length: float) -> dict[str, Any]:
    """Computes the terms in units of J, the measured progress, and shares of the gradient.

    Gradients are divided by ``length``, so the terms are multiplied by it.
    """
    tried = float(np.sum(np.diagonal(inner.sampled)[: len(progress)]))
    smoothness = -float(progress.mean(2).sum()) / (rate**2 * tried * length) if tried > 0 else 0.0

    def in_j(moved: Products) -> dict[str, float]:
        return {name: value * length for name, value in terms(moments(moved), rate, smoothness).items()}

    m = moments(inner)
    names = ("A", "B", "C", "A+B-C")
    forward = progress[:, 0]
    return {
        "terms": in_j(inner),
        "standard_errors": {name: jackknife(inner, lambda moved, name=name: in_j(moved)[name]) for name in names},
        "progress": float(forward.mean()),
        "progress_standard_error": float(np.hypot(*(_error(forward.mean(axis)) for axis in (0, 1)))),
        "smoothness": smoothness,
        "rate_times_smoothness": rate * smoothness,
        "noise_over_gradient": m.variance / m.gradient,
        "bias_over_gradient": float(np.sqrt(max(m.bias, 0.0) / m.gradient)) if m.gradient > 0 else None,
        "cosine_of_bias": m.cross / float(np.sqrt(m.bias * m.gradient)) if m.bias > 0 < m.gradient else None,
    }


def _error(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def by_length(
    cuts: Sequence[int], biases: dict[int, np.ndarray], metric: np.ndarray, variation: Sequence[float]
) -> dict[str, Any]:
    """Returns the total variation, the norm of the bias of the first tokens' scores, and exponents of their growth."""
    norms = []
    for cut in cuts:
        inner = products(biases[cut], biases[cut], biases[cut], metric)
        norms.append(float(np.sqrt(max(moments(inner).bias, 0.0))))
    growth: dict[str, Any] = {"tokens": list(cuts), "total_variation": list(variation), "bias_norm": norms}
    for name in ("total_variation", "bias_norm"):
        with contextlib.suppress(ValueError):  # a bias below its noise has no exponent
            growth[f"{name}_exponent"] = growth_exponent(np.asarray(cuts, float), np.asarray(growth[name]))
    return growth


def recorded_rate(policy: Policy) -> float:
    """Returns the learning rate of the step after the checkpoint, or of the checkpoint's own step if it is the last."""
    assert policy.run is not None
    rows = {row["step"]: row for row in read_rows(policy.run / "metrics.jsonl")}
    step = policy.step or 0
    return float(rows.get(step + 1, rows[step])["schedule/learning_rate"])


def main(argv: Sequence[str]) -> int:
    """Prints a line for each checkpoint and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories of the embedded engine")
    parser.add_argument("--steps", type=int, nargs="+", required=True, help="steps of the checkpoints")
    parser.add_argument("--batches", type=int, default=32, help="batches of each kind (32)")
    parser.add_argument("--steps-tried", type=int, default=8, help="gradients whose progress is measured (8)")
    parser.add_argument(
        "--cuts", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="numbers of first tokens whose bias is measured"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and sampling (0)")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    if not 2 <= options.steps_tried <= options.batches:
        raise ConfigError(f"--steps-tried must be from 2 to --batches = {options.batches}, got {options.steps_tried}")
    results: dict[str, list[dict[str, Any]]] = {}
    for run in options.runs:
        for step in options.steps:
            with caller_errors(RuntimeError):
                policy = find_policy(run, step=step)
                if policy.run is None or not _is_embedded(policy.settings().rollout):
                    raise ConfigError(f"{run} is not a run of the embedded engine, with its own weights")
            results.setdefault(run.name, []).append(measure(policy, options))
            print(line(run.name, results[run.name][-1]), flush=True)
    if options.json is not None:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "runs")}
        options.json.write_text(json.dumps({"settings": settings, "runs": results}, indent=1) + "\n", encoding="utf-8")
    return 0


def _is_embedded(rollout: RolloutConfig) -> bool:
    return rollout.engine == "jax" and not rollout.inject.changes_weights and not rollout.max_staleness


def line(name: str, row: dict[str, Any]) -> str:
    """Formats one row of the table."""
    values = [f"{row['terms'][k]:.2e} +- {row['standard_errors'][k]:.0e}" for k in ("A", "B", "C", "A+B-C")]
    values.append(f"{row['progress']:.2e} +- {row['progress_standard_error']:.0e}")
    values += [f"{row[k]:.3g}" if row[k] is not None else "-" for k in ("noise_over_gradient", "bias_over_gradient")]
    return f"| {name} | {row['step']} | {row['accuracy']:.3f} | {row['mean_length']:.1f} | {' | '.join(values)} |"


if __name__ == "__main__":
    sys.exit(run_cli(main))
