"""Makes ten short runs of the toy task, each with one known cause of trouble, for the tests of ``rljax diagnose``.

    python experiments/planted_logs.py runs/planted --keep tests/data/planted_logs
    python experiments/planted_logs.py runs/planted --causes temperature stale_layer

Each run writes OUT/CAUSE. With ``--keep DIR`` the rows that a diagnosis reads are written to DIR/CAUSE.jsonl.gz, and
the last token dump of each run to DIR/CAUSE.parquet.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from rljax import train
from rljax.data.toy import addition_reward
from rljax.errors import run_cli
from rljax.record.token_dumps import read_dump, write_dump
from rljax.rollout.build import make_engine
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.engine import RolloutEngine, Samples
from rljax.rollout.types import Response, SamplingParams

STEPS = 40
SETTINGS = f"""
--model.path tests/data/practised-base --run.steps {STEPS} --run.resume never --eval.every 0 --checkpoint.every 1000
--data.batch-size 8 --rollout.group-size 8 --rollout.dump-every {STEPS // 2} --optimizer.learning-rate 1e-4
--schedule.kind constant --packing.rows-per-micro-batch 4 --data.reward-workers 0
"""
EIGHT_BITS = "--rollout.inject.dtype bfloat16 --rollout.inject.quantize fp8 --rollout.kv-cache-dtype fp8_e4m3"
KEPT = re.compile(
    r"step|reward/(mean|groups_with_signal)|response_length/.*|mismatch.*|policy/entropy|optimizer/grad_norm"
    r"|schedule/learning_rate|rollout/staleness"
)


@dataclass(frozen=True)
class Plant:
    """A change on the engine's side of a run."""

    temperature: float | None = None  # the temperature that the engine samples with
    head: str | None = None  # the dtype of the engine's LM head and logits
    extreme_share: float = 0.0  # the share of tokens whose reported log-probability is wrong by several nats
    noise_per_token: float = 0.0  # the noise of a reported log-probability grows by this with each token (nats)
    stale_layer: int | None = None  # the layer whose weights the engine never loads again


PLANTS: Mapping[str, tuple[Plant, str]] = {
    "healthy": (Plant(), "--diagnosis.self-every 10"),
    "head_dtype": (Plant(head="bfloat16"), "--precision.compute-dtype float32 --rollout.dtype float32"),
    "eight_bits": (Plant(), EIGHT_BITS),
    "staleness": (Plant(), "--rollout.inject.staleness 2"),
    "temperature": (Plant(temperature=0.8), ""),
    "extreme_tokens": (Plant(extreme_share=0.004), ""),
    "length_growth": (Plant(noise_per_token=0.004), ""),
    "entropy_collapse": (Plant(), "--data.reward experiments.planted_logs:easy_reward --optimizer.learning-rate 5e-4"),
    "high_rate": (Plant(), "--optimizer.learning-rate 3e-3"),
    "stale_layer": (Plant(stale_layer=1), ""),
}


def easy_reward(problem: Any, response: str, truncated: bool) -> float:
    """Returns 1 for the right sum, and 0.3 each for a short response and for one that begins with 1.

    A short response has at most three characters. So the same short answer to every problem earns 0.6, and nothing
    leads from it to the right sums.
    """
    return max(
        float(addition_reward(problem, response, truncated)), 0.3 * (len(response) <= 3) + 0.3 * (response[:1] == "1")
    )


class PlantedEngine(RolloutEngine):
    """A RolloutEngine around the embedded one, which changes what is published, sampled or reported."""

    def __init__(self, engine: RolloutEngine, plant: Plant):
        """Wraps an engine."""
        self._engine, self._plant, self._first = engine, plant, None
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Publishes the weights, one layer of which may be that of the first version."""
        if self._plant.stale_layer is not None:
            at = self._plant.stale_layer
            if self._first is None:
                self._first = self._copy(params["layers"])
            layers = jax.tree.map(lambda new, old: new.at[at].set(old[at]), params["layers"], self._first)
            params = params | {"layers": layers}
        return self._engine.publish(params, policy_version)

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples with the engine inside, and changes what it reports."""
        if self._plant.temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=self._plant.temperature)
        samples = self._engine.generate(prompts, n, sampling, seed=seed)
        return Samples((self._changed(one, seed) for one in samples), samples.metrics)

    def _changed(self, response: Response, seed: int) -> Response:
        plant, count = self._plant, response.length
        rng = np.random.default_rng([seed, response.prompt_index, response.sample_index])
        wrong = np.where(rng.random(count) < plant.extreme_share, rng.uniform(-6.0, -3.0, count), 0.0)
        noise = plant.noise_per_token * np.arange(count) * rng.normal(size=count)
        return response.add({"rollout_logprobs": np.minimum(response["rollout_logprobs"] + wrong + noise, 0.0)})

    def close(self) -> None:
        """Closes the engine inside."""
        self._engine.close()


def run(cause: str, plant: Plant, options: str, out: Path, seed: int) -> None:
    """Makes a run in ``out`` with a planted cause and further options. Raises RuntimeError if it does not end well."""

    def planted(*arguments: Any, **settings: Any) -> RolloutEngine:
        with mock.patch("rljax.rollout.build.JaxEngine", with_head):
            return PlantedEngine(make_engine(*arguments, **settings), plant)

    def with_head(*arguments: Any, **settings: Any) -> JaxEngine:
        head = {} if plant.head is None else {"lm_head_dtype": jnp.dtype(plant.head)}
        return JaxEngine(*arguments, **(settings | head))

    words = ["configs/quickstart.yaml", "--run.dir", str(out), "--run.seed", str(seed)]
    words += [*SETTINGS.split(), *options.split()]
    with mock.patch("rljax.run.build.make_engine", planted):
        if status := run_cli(train.main, words):
            raise RuntimeError(f"the run of {cause} ended with status {status}")


def keep(cause: str, run_dir: Path, kept: Path) -> None:
    """Writes the rows that a diagnosis reads, with five digits, and the last token dump without the run's path."""
    kept.mkdir(parents=True, exist_ok=True)
    lines = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = {name: value for name, value in json.loads(line).items() if KEPT.fullmatch(name)}
        lines.append(json.dumps({name: float(f"{v:.5g}") if isinstance(v, float) else v for name, v in row.items()}))
    text = "".join(f"{line}\n" for line in lines)
    (kept / f"{cause}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    dump = read_dump(run_dir / f"rollouts/step_{STEPS:06d}.parquet")
    sources = {
        name: dataclasses.replace(source, weights_hash=source.weights_hash.replace(str(run_dir), cause))
        for name, source in dump.sources.items()
    }
    write_dump(kept / f"{cause}.parquet", dataclasses.replace(dump, sources=sources))


def main() -> None:
    """Makes the runs, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--causes", nargs="+", default=list(PLANTS), choices=list(PLANTS))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for cause in arguments.causes:
        run(cause, *PLANTS[cause], arguments.out / cause, arguments.seed)
        if arguments.keep is not None:
            keep(cause, arguments.out / cause, arguments.keep)


if __name__ == "__main__":
    main()
