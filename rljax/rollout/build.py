"""The vLLM engine of a policy: what its servers must fit, its tensors by their names there, its scorer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from rljax.policy.config import PolicyConfig, config_to_hf
from rljax.policy.hf import hf_tensors
from rljax.policy.score import make_scorer
from rljax.rollout.served.engine import VllmConfig, VllmEngine
from rljax.rollout.vllm.handshake import Expectation


def serve_policy(
    urls: Sequence[str],
    policy: PolicyConfig,
    dtype: str,
    max_tokens: int,
    config: VllmConfig | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> VllmEngine:
    """An engine that is given parameters of ``policy`` and publishes them to vLLM servers.

    Args:
      urls: of the servers, as ``http://host:port``.
      policy: shape of the policy.
      dtype: of the published weights, so of the servers.
      max_tokens: longest prompt plus longest response that will be asked for (tokens).
      config: the engine's settings.
      should_stop: asked while no server answers; true ends the wait.

    Raises:
      HandshakeError: a server does not fit; one line for each thing that differs.
      RuntimeError: a server did not answer in time.
    """
    return VllmEngine(
        urls,
        Expectation(dtype, config_to_hf(policy, dtype), max_tokens),
        tensors=functools.partial(hf_tensors, config=policy, dtype=jnp.dtype(dtype)),
        score=make_scorer(policy, dtype),
        config=config,
        should_stop=should_stop,
    )
