"""Checks of a real vLLM server's weights, and one small training step."""

import contextlib

import jax
import optax

from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.vllm.client import VllmBackend

OTHER_BITS = "does not hold the trainer's weights"
OUT_OF_BAND = "does not sample from them"


def rpc(served, method: str, *arguments: object) -> list:
    """Calls a method in each worker, and returns their answers."""
    with contextlib.closing(ServerClient([served.url], VllmBackend())) as client:
        return client.call(served.url, "POST", "/collective_rpc", json={"method": method, "args": list(arguments)})[
            "results"
        ]


@contextlib.contextmanager
def cache_kept(engine):
    """Prevents that publishes of ``engine`` reset the prefix cache of its servers, inside the block."""
    sound = engine.fleet.client.call

    def without_reset(url, method, path, *, params=None, **kwargs):
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/pause":
            params = {"mode": "wait", "clear_cache": "false"}
        return sound(url, method, path, params=params, **kwargs)

    engine.fleet.client.call = without_reset
    try:
        yield
    finally:
        engine.fleet.client.call = sound


def check_use(engine, url: str, params):
    """Runs only the second half of the verification, and returns its judgement."""
    client = engine.fleet.client
    return engine.verifier.judge(client, url, engine.verifier.sample(client, url), params)


def adamw_step(params, seed: int):
    """Returns the parameters after one step of the paper's optimizer at its rate, 1e-6, in float32."""
    optimizer = optax.adamw(1e-6)
    keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params)))
    leaves, tree = jax.tree.flatten(params)
    gradients = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    updates, _ = optimizer.update(jax.tree.unflatten(tree, gradients), optimizer.init(params), params)
    return optax.apply_updates(params, updates)
