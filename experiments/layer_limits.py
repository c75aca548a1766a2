"""Measures the errors of sound pairs of scorers; the limits of ``rljax compare --layers`` must be above them.

    python experiments/layer_limits.py benchmarks/layer_limits.json

The pairs are ``jax:`` and ``hf:`` in both orders. The models are the toy base and two random policies with 4 layers of
width 256, with 100 random tokens each. It takes about two minutes on a CPU. docs/layers.md has the numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path

import jax
import numpy as np

from rljax.compare.layers.differences import LIMITS, ONCE, compare_layers
from rljax.compare.layers.jax_tracer import JaxForm, JaxTracer
from rljax.compare.layers.torch_tracer import TorchTracer
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.hub import model_directory
from rljax.policy.model import init_params

TOKENS = 100
POLICY = PolicyConfig(256, 256, 768, 4, 4, 2, 64, tie_word_embeddings=True)


def measure(directory: Path, dtype: str, seed: int) -> list[dict[str, float]]:
    """Returns the errors of each operation, in both orders of the two scorers."""
    ours = JaxTracer(directory, JaxForm(dtype, logits=dtype), "jax")
    theirs = TorchTracer(directory, dtype, "hf", "eager")
    tokens = np.random.default_rng(seed).integers(0, ours.config.vocab_size, TOKENS).astype(np.int32)
    found = []
    for pair in ((ours, theirs), (theirs, ours)):
        for each in compare_layers(*pair, tokens, effects=0).differences:
            numbers = {"own": each.own, "channel": each.worst_channel, "token": each.worst_token}
            once = each.operation.kind in ONCE
            found.append({"once": once, "scale": abs(each.factor - 1), "ratio": each.ratio} | numbers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    rows = []
    with tempfile.TemporaryDirectory() as made:
        directories = [Path(model_directory("toy-base"))]
        for seed in (0, 1):
            directories.append(Path(made) / str(seed))
            save_params(directories[-1], init_params(POLICY, seed), POLICY)
        for dtype in LIMITS:
            found = [each for seed, where in enumerate(directories) for each in measure(where, dtype, seed)]
            for once in (False, True):
                largest = {
                    name: max(each[name] for each in found if each["once"] == once)
                    for name in ("own", "channel", "token", "scale", "ratio")
                }
                rows.append({"dtype": dtype, "products_and_sums": once} | largest)
    machine = {"jax": jax.__version__, "devices": jax.devices()[0].device_kind, "machine": platform.machine()}
    out.write_text(json.dumps({"tokens": TOKENS, **machine, "largest": rows}, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
