"""Checks of a real vLLM server's weights, and one small training step."""

import contextlib

import jax
import optax
from opened_clients import call

OTHER_BITS = "does not hold the trainer's weights"
OUT_OF_BAND = "does not sample from them"


def rpc(served, method: str, *arguments: object) -> list:
    return call(served.url, "POST", "/collective_rpc", json={"method": method, "args": list(arguments)})["results"]


# The arguments that take a fault out again, where they are not just "off".
UNDO = {"load": ("off", ""), "logprobs_mode": ("processed_logprobs",), "head_dtype": ("model",)}


@contextlib.contextmanager
def sabotaged(served, fault: str, *words: str, undo: tuple[str, ...] = ()):
    """Plants a fault of ``vllm_sabotage`` into each worker of a server, inside the block."""
    rpc(served, f"sabotage_{fault}", *words)
    try:
        yield
    finally:
        rpc(served, f"sabotage_{fault}", *(undo or UNDO.get(fault, ("off",))))


@contextlib.contextmanager
def cache_kept(engine):
    """Prevents that publishes of ``engine`` reset the prefix cache of its only server, inside the block."""
    (server,) = engine.fleet.servers
    sound = server.call

    async def without_reset(method, path, *, params=None, **kwargs):
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/pause":
            params = {"mode": "wait", "clear_cache": "false"}
        return await sound(method, path, params=params, **kwargs)

    server.call = without_reset
    try:
        yield
    finally:
        server.call = sound


def check_use(engine, url: str, params):
    """Runs only the second half of the verification, and returns its judgement."""

    def looks():
        return engine.fleet.wait(engine.verifier.sample(engine.fleet.server(url)))

    return engine.verifier.judge(url, looks(), params, looks)


def adamw_step(params, seed: int):
    """Returns the parameters after one step of the paper's optimizer at its rate, 1e-6, in float32."""
    optimizer = optax.adamw(1e-6)
    keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params)))
    leaves, tree = jax.tree.flatten(params)
    gradients = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    updates, _ = optimizer.update(jax.tree.unflatten(tree, gradients), optimizer.init(params), params)
    return optax.apply_updates(params, updates)
