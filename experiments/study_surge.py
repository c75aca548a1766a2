"""Tests the surge tracker on families of synthetic curves with known surges; prints the table of docs/schedule.md.

    python experiments/study_surge.py --seeds 200 --json benchmarks/surge_study.json

It takes about 70 seconds on one core with 200 seeds. Each seed gives one curve of each family. The unit of a level is
the level before the surge. The "crossing" is the first step at which the noise-free curve, without its early dip,
reaches 3.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rljax.schedule import SurgeConfig, SurgeTracker

BASE_TOKENS = 1000.0
TOY_TOKENS = 7.0
SURGE_STEPS, QUIET_STEPS, TOY_STEPS = 300, 2000, 150


class Curve(NamedTuple):
    """One synthetic run: lengths [t] in tokens, truncated fractions [t] or None, and the true crossing or None."""

    lengths: np.ndarray
    truncated: np.ndarray | None
    crossing: int | None


def noisy(rng: np.random.Generator, level: np.ndarray, low: float, high: float, correlation: float = 0.0) -> np.ndarray:
    """Multiplies by 1 + normal noise whose standard deviation is drawn from [low, high]."""
    z = rng.normal(size=level.size)
    for t in range(1, level.size if correlation else 1):
        z[t] = correlation * z[t - 1] + math.sqrt(1 - correlation**2) * z[t]
    return level * np.maximum(1 + rng.uniform(low, high) * z, 0.05)


def ramp(rng: np.random.Generator, shape: str, steps: np.ndarray) -> np.ndarray:
    """Returns a level of 1 that rises to 3-4 over 5-40 steps around step 60-150 and stays there."""
    duration, final = rng.integers(5, 41), rng.uniform(3, 4)
    progress = np.clip((steps - rng.uniform(60, 150)) / duration + 0.5, 0, 1)
    if shape == "geometric":
        return final**progress
    if shape == "logistic":
        sigmoid = 1 / (1 + np.exp(-8 * (progress - 0.5)))
        progress = (sigmoid - sigmoid[0]) / (sigmoid[-1] - sigmoid[0])
    return 1 + (final - 1) * progress


def early_dip(rng: np.random.Generator, steps: np.ndarray) -> np.ndarray:
    """Returns a factor that falls by 20-50% around step 10-25 and recovers within about 15 steps."""
    centre, width = rng.uniform(10, 25), rng.uniform(4, 8)
    return 1 - rng.uniform(0.2, 0.5) * np.exp(-0.5 * ((steps - centre) / width) ** 2)


def high_start(rng: np.random.Generator, steps: np.ndarray) -> np.ndarray:
    """Returns a factor that starts 20-80% above 1 and falls to it within about 20 steps."""
    return 1 + rng.uniform(0.2, 0.8) * np.exp(-steps / rng.uniform(4, 10))


def surge(shape: str, opening: Callable | None = None, correlation: float = 0.0) -> Callable[..., Curve]:
    """Returns a family of runs like the paper's: 1000 tokens to 3000-4000, with noise of 3-13%."""

    def draw(rng: np.random.Generator) -> Curve:
        steps = np.arange(1, SURGE_STEPS + 1)
        clean = ramp(rng, shape, steps)
        level = clean if opening is None else clean * opening(rng, steps)
        crossing = int(np.argmax(clean >= 3 - 1e-9)) + 1
        return Curve(BASE_TOKENS * noisy(rng, level, 0.03, 0.13, correlation), None, crossing)

    return draw


def toy(rng: np.random.Generator) -> Curve:
    """Draws 7 tokens for 20-30 steps, then 3.1-4 times as many within 20-40 steps.

    The mean of the last 5 lengths decides the crossing.
    """
    steps = np.arange(1, TOY_STEPS + 1)
    progress = np.clip((steps - rng.uniform(20, 30)) / rng.uniform(20, 40), 0, 1)
    lengths = TOY_TOKENS * noisy(rng, 1 + (rng.uniform(3.1, 4) - 1) * progress, 0.03, 0.08)
    means = np.convolve(lengths, np.ones(5) / 5, mode="valid")
    return Curve(lengths, None, int(np.argmax(means >= 3 * TOY_TOKENS)) + 5)


def quiet(
    make_level: Callable[[np.random.Generator, np.ndarray], np.ndarray],
) -> Callable[[np.random.Generator], Curve]:
    """Returns a family of runs without a surge, with noise of 3-15%."""

    def draw(rng: np.random.Generator) -> Curve:
        level = make_level(rng, np.arange(1, QUIET_STEPS + 1))
        return Curve(BASE_TOKENS * noisy(rng, level, 0.03, 0.15), None, None)

    return draw


def slow_linear(rng: np.random.Generator, steps: np.ndarray) -> np.ndarray:
    """Returns a level that triples over 200-600 steps and goes on at the same pace."""
    return 1 + 2 * np.maximum(steps - rng.uniform(0, 600), 0) / rng.uniform(200, 600)


def slow_geometric(rng: np.random.Generator, steps: np.ndarray) -> np.ndarray:
    """Returns a level that triples over 200-600 steps, and then once more."""
    return 3 ** np.clip((steps - rng.uniform(0, 600)) / rng.uniform(200, 600), 0, 2)


def slow_oscillating(rng: np.random.Generator, steps: np.ndarray) -> np.ndarray:
    """Returns slow geometric growth with a wave of 10-25% and 20-200 steps."""
    wave = np.sin(2 * np.pi * steps / rng.uniform(20, 200) + rng.uniform(0, 2 * np.pi))
    return slow_geometric(rng, steps) * (1 + rng.uniform(0.1, 0.25) * wave)


def spikes(width: int) -> Callable[[np.random.Generator, np.ndarray], np.ndarray]:
    """Returns a function that draws spikes of 3-10 times the level, ``width`` steps long and 8-100 steps apart."""

    def level(rng: np.random.Generator, steps: np.ndarray) -> np.ndarray:
        out = np.ones(steps.size)
        for start in np.cumsum(rng.integers(8, 100, steps.size // 8)):
            out[start : start + width] *= rng.uniform(3, 10)
        return out

    return level


def scattered_spikes(rng: np.random.Generator, steps: np.ndarray) -> np.ndarray:
    """Draws twenty spikes of 3-10 times the level, one or two steps long, at random places; some overlap."""
    out = np.ones(steps.size)
    for start in rng.integers(0, steps.size, 20):
        out[start : start + rng.integers(1, 3)] = rng.uniform(3, 10)
    return out


def shrinking(rng: np.random.Generator, steps: np.ndarray) -> np.ndarray:
    """Returns a level that falls towards 15% of the start."""
    return np.maximum(np.exp(-steps / rng.uniform(100, 2000)), 0.15)


def capped(fast: bool) -> Callable[[np.random.Generator], Curve]:
    """Returns a family in which responses reach the length limit: log-normal lengths (sigma 0.6) are cut at a cap.

    If ``fast``, the uncut mean grows 10-fold over 5-60 steps, and the cap is 1.5-3.5. Otherwise it grows 3-fold per
    200-400 steps, and the cap is 4-8.
    """

    def draw(rng: np.random.Generator) -> Curve:
        steps = np.arange(1, QUIET_STEPS + 1)
        rise = (steps - rng.uniform(60, 400)) / (rng.uniform(5, 60) if fast else rng.uniform(200, 400))
        mean = 10 ** np.clip(rise, 0, 1) if fast else 3 ** np.clip(rise, 0, 3)
        level, truncated = cut(mean, rng.uniform(1.5, 3.5) if fast else rng.uniform(4, 8))
        return Curve(BASE_TOKENS * noisy(rng, level, 0.02, 0.06), truncated, None)

    return draw


def cut(mean: np.ndarray, cap: float, sigma: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Cuts log-normal lengths of this mean at a cap. Returns the mean of the cut lengths and the share at the cap."""
    z = (np.log(cap / mean) + sigma**2 / 2) / sigma
    truncated = 1 - normal_cdf(z)
    return mean * normal_cdf(z - sigma) + cap * truncated, truncated


def normal_cdf(z: np.ndarray) -> np.ndarray:
    """Computes the distribution function of the standard normal, elementwise."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])


SURGES: dict[str, Callable[[np.random.Generator], Curve]] = {
    "linear": surge("linear"),
    "geometric": surge("geometric"),
    "logistic": surge("logistic"),
    "linear, early dip": surge("linear", early_dip),
    "geometric, early dip": surge("geometric", early_dip),
    "logistic, early dip": surge("logistic", early_dip),
    "linear, high start": surge("linear", high_start),
    "geometric, high start": surge("geometric", high_start),
    "linear, noise correlated 0.5": surge("linear", correlation=0.5),
}
QUIETS: dict[str, Callable[[np.random.Generator], Curve]] = {
    "slow growth, linear": quiet(slow_linear),
    "slow growth, geometric": quiet(slow_geometric),
    "slow growth, oscillating": quiet(slow_oscillating),
    "flat, noise 3-15%": quiet(lambda rng, steps: np.ones(steps.size)),
    "single spikes": quiet(spikes(1)),
    "double spikes": quiet(spikes(2)),
    "scattered spikes": quiet(scattered_spikes),
    "early dip only": quiet(early_dip),
    "shrinking": quiet(shrinking),
    "cap reached fast": capped(fast=True),
    "cap reached slowly": capped(fast=False),
}


def first_call(curve: Curve, config: SurgeConfig) -> int | None:
    """Returns the step at which the tracker calls the surge, or None."""
    tracker = SurgeTracker(config)
    truncated = [None] * curve.lengths.size if curve.truncated is None else curve.truncated.tolist()
    for length, fraction in zip(curve.lengths.tolist(), truncated, strict=True):
        if tracker.update(length, fraction):
            break
    return tracker.surge_step


def draw(name: str, family: Callable[[np.random.Generator], Curve], seed: int) -> Curve:
    """Draws curve number ``seed`` of a family."""
    return family(np.random.default_rng([*name.encode(), seed]))


def judge_surges(name: str, family: Callable, config: SurgeConfig, seeds: int) -> dict[str, float]:
    """Measures how often and how late the family's surges are called."""
    delays = []
    for seed in range(seeds):
        curve = draw(name, family, seed)
        call = first_call(curve, config)
        if call is not None and curve.crossing is not None:
            delays.append(call - curve.crossing)
    low, median, high = np.percentile(delays, [5, 50, 95])
    return {
        "called": len(delays) / seeds,
        "median_delay": float(median),
        "delay_p5": float(low),
        "delay_p95": float(high),
        "earlier_than_15": sum(delay < -15 for delay in delays) / seeds,
        "within_10": sum(abs(delay) <= 10 for delay in delays) / seeds,
    }


def judge_quiets(name: str, family: Callable, config: SurgeConfig, seeds: int) -> dict[str, float]:
    """Measures how often a surge is called in a family without surges."""
    calls = [first_call(draw(name, family, seed), config) for seed in range(seeds)]
    return {"false_calls": sum(call is not None for call in calls) / seeds}


def study(seeds: int, config: SurgeConfig) -> dict[str, dict[str, dict[str, float]]]:
    """Computes the whole table."""
    return {
        "surges": {name: judge_surges(name, family, config, seeds) for name, family in {**SURGES, "toy": toy}.items()},
        "quiets": {name: judge_quiets(name, family, config, seeds) for name, family in QUIETS.items()},
    }


def as_markdown(result: dict[str, dict[str, dict[str, float]]], seeds: int) -> str:
    """Formats the result as two Markdown tables."""
    lines = [
        f"| surge ({seeds} seeds each) | called | median delay | 5%-95% | over 15 early | within 10 |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["surges"].items():
        lines.append(
            f"| {name} | {row['called']:.2%} | {row['median_delay']:g} | {row['delay_p5']:g} to {row['delay_p95']:g} "
            f"| {row['earlier_than_15']:.2%} | {row['within_10']:.2%} |"
        )
    lines += ["", f"| no surge, {QUIET_STEPS} steps ({seeds} seeds each) | false calls |", "|---|---|"]
    lines += [f"| {name} | {row['false_calls']:.2%} |" for name, row in result["quiets"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="curves of each family (200)")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    config = SurgeConfig()
    result = study(args.seeds, config)
    print(as_markdown(result, args.seeds))
    if args.json:
        record = {"seeds": args.seeds, "config": dataclasses.asdict(config), **result}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
