"""A trainer that only publishes: it changes a share of a policy's elements at each step.

    python tests/harness/publishing_trainer.py MODEL URL KEY_FILE HOST

MODEL is the model directory of the policy. Each line of the standard input is the share of the bfloat16 elements to
change (0 for none). The program then publishes and prints the metrics as a line of JSON. HOST is the address of this
machine at which the weights are served.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp

from rljax.errors import run_cli
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.rollout.build import make_engine
from rljax.rollout.types import RolloutConfig, VerifyConfig
from rljax.sharding import MeshConfig, make_mesh
from rljax.weights.publish_config import PublishConfig

_STEP = 1 + 2**-5  # changes every bfloat16: its neighbours are a factor of 2^-7 to 2^-8 away
MAX_TOKENS = 320  # prompt and response together; the probes of the verification must fit


def main(argv: Sequence[str]) -> int:
    model, url, key_file, host = argv
    policy = read_config(model)
    rollout = RolloutConfig(
        engine="vllm",
        urls=(url,),
        api_key_file=key_file,
        verify=VerifyConfig(prompts=1, tokens=4),
    )
    with closing(
        make_engine(
            rollout,
            policy,
            make_mesh(MeshConfig(), jax.devices()[:1]),
            max_prompt_tokens=MAX_TOKENS // 2,
            max_tokens=MAX_TOKENS,
            publish=PublishConfig(store="http", host=host),
        )
    ) as engine:
        params = load_params(model, policy)
        for number, line in enumerate(sys.stdin):
            params = changed(params, float(line), number)
            print(json.dumps(engine.publish(params, number)), flush=True)
    return 0


def changed(params: Any, share: float, seed: int) -> Any:
    """Returns ``params`` with a share of about ``share`` changed by a few units in the last place of bfloat16."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [_moved(leaf, key, share) for leaf, key in zip(leaves, keys, strict=True)])


@jax.jit
def _moved(leaf: jax.Array, key: jax.Array, share: float) -> jax.Array:
    return jnp.where(jax.random.uniform(key, leaf.shape) < share, _STEP * leaf, leaf)


if __name__ == "__main__":
    sys.exit(run_cli(main))
