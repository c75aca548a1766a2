"""Makes the engine that a configuration names."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax.distributed.gpus import tasks_here
from rljax.errors import ConfigError
from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_to_hf, read_config
from rljax.policy.hf import hf_tensors, load_params
from rljax.policy.model import abstract_params
from rljax.policy.published import hf_checksums, hf_parts
from rljax.policy.score import make_scorer
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.engine import RolloutEngine, Stopping
from rljax.rollout.exact import ExactEngine, Executable
from rljax.rollout.external.queue import is_address, parse_address
from rljax.rollout.injected import InjectedEngine
from rljax.rollout.kinds import can, check_wishes, named_engines
from rljax.rollout.servers.discovery import make_lookup
from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
from rljax.rollout.servers.handshake import Expectation
from rljax.rollout.servers.kind import Backend
from rljax.rollout.servers.model import ServedModel
from rljax.rollout.types import ClientLimits, RolloutConfig
from rljax.sharding import MeshConfig, make_mesh, on_devices
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import check_weight_room


def policy_functions(policy: PolicyConfig, dtype: str) -> PolicyFunctions:
    """Returns the functions by which HTTP servers get and verify the weights of ``policy`` in ``dtype``.

    Parameters in the host's memory (``sharding.on_host``) are copied to the devices while a function works. The copy
    that computes scores is in ``dtype``: it takes less memory, which servers on the same devices may need.
    """
    wanted, score = jnp.dtype(dtype), make_scorer(policy, dtype, multiple=8)
    return PolicyFunctions(
        lambda params: hf_tensors(on_devices(params), policy, wanted),
        lambda params: hf_checksums(on_devices(params), policy, wanted),
        lambda params, sequences: score(on_devices(params, wanted), sequences),
        lambda params: hf_parts(on_devices(params), policy, wanted),
    )


def version_bytes(policy: PolicyConfig, dtype: str) -> int:
    """Returns the size of one version of the policy's weights when it is published in ``dtype`` (bytes)."""
    return jnp.dtype(dtype).itemsize * sum(leaf.size for leaf in jax.tree.leaves(abstract_params(policy)))


def check_engine(config: RolloutConfig) -> None:
    """Raises ValueError if the engine that ``config`` names cannot work with its other settings.

    It neither opens a file nor asks a server.
    """
    if config.trajectories is not None:
        said = "rollout.trajectories: another program samples, so"
        if is_address(config.trajectories):
            parse_address(config.trajectories)
        for name, value in {"refill": False, "update": "wait", "colocated": False}.items():
            if (got := getattr(config, name)) != value:
                raise ValueError(f"{said} rollout.{name} must be {str(value).lower()}, got {str(got).lower()}")
        if config.inject.given:
            raise ValueError(f"{said} rollout.inject changes nothing that is trained on; leave it out")
    check_wishes(config)
    if config.max_staleness and config.colocated:
        raise ValueError("rollout.max_staleness: colocated servers sleep while the trainer trains; give 0")
    if config.update != "wait":
        said = f"rollout.update = {config.update}"
        if not config.max_staleness:
            raise ValueError(f"{said}: no response is under way when weights come; give rollout.max_staleness above 0")
        if config.router_replay == "r3":
            raise ValueError(f"{said}: the experts of tokens before new weights are not reported; give wait")
    if can(config.engine, "serves"):
        if config.discovery is not None:
            make_lookup(config.discovery)
        elif not config.urls:
            needs = "needs at least one URL in rollout.urls, or rollout.discovery"
            raise ValueError(f"rollout.engine = {config.engine} {needs}")


def make_engine(
    config: RolloutConfig,
    policy: PolicyConfig,
    mesh: Mesh,
    *,
    max_prompt_tokens: int,
    max_tokens: int,
    lm_head_dtype: Literal["compute", "float32"] | None = None,
    make_executable: Callable[[], Executable] | None = None,
    functions: PolicyFunctions | None = None,
    publish: PublishConfig | None = None,
    stop: Stopping | None = None,
    probe_prompts: Sequence[np.ndarray] = (),
    step_prompts: int = 0,
) -> RolloutEngine:
    """Makes the engine that ``config.engine`` names. Its method ``publish`` takes the parameters.

    Args:
      mesh: The trainer's mesh.
      max_prompt_tokens: The longest prompt (tokens).
      max_tokens: The longest prompt plus the longest response of any request (tokens).
      lm_head_dtype: The dtype of the LM head as in ``PrecisionConfig``. None: servers may use any dtype, and the
        embedded engine uses the rollout dtype. The exact engine ignores it, because its executable has its own setting.
      make_executable: A function that makes the trainer's executable. Only the exact engine needs it.
      functions: The functions of the policy for HTTP servers. None: those that ``policy_functions`` returns.
      publish: The way in which weights come to HTTP servers. None: the defaults.
      stop: The object that tells an engine of HTTP servers when to give up a wait.
      probe_prompts: The prompts from which probes for HTTP servers are made.
      step_prompts: The number of prompts of a step, up to which the embedded engine pads requests; 0: no padding.

    Raises:
      ConfigError: No server answers in time, or there is no room for weights.
      ValueError: The settings do not fit the engine, or a server does not fit the policy.
    """
    check_engine(config)
    if can(config.engine, "serves"):
        publish, size = publish or PublishConfig(), version_bytes(policy, config.dtype)
        count = 1 if publish.store in ("shared", "directory") else jax.process_count()  # the parts of a version
        try:
            check_weight_room(config.transfer_dir, publish.versions * size * min(tasks_here(), count) // count)
            head_dtype = config.dtype if lm_head_dtype == "compute" else lm_head_dtype
            return ServedEngine(
                Expectation(config, config_to_hf(policy, config.dtype), max_tokens, head_dtype, size),
                make_backend(config.engine),
                functions or policy_functions(policy, config.dtype),
                publish=publish,
                stop=stop,
                probe_prompts=probe_prompts,
            )
        except RuntimeError as error:
            raise ConfigError(error) from error
    is_exact = can(config.engine, "is_exact")
    embedded = JaxEngine(
        policy,
        config.dtype,
        max_prompt_tokens,
        mesh=mesh,
        # The head of the exact engine's executable rounds no logits, whatever its dtype, and guesses should not either.
        lm_head_dtype=jnp.float32 if is_exact or lm_head_dtype == "float32" else None,
        decode_tokens=config.decode_tokens,
        step_prompts=step_prompts,
        max_tokens=max_tokens,
        kv_cache_dtype=config.kv_cache_dtype,
        with_routes=config.router_replay == "r3",
        inject=config.inject if config.inject.logit_noise else None,
    )
    engine: RolloutEngine = embedded
    if is_exact:
        assert make_executable is not None
        engine = ExactEngine(make_executable(), inject=config.inject, drafts=embedded)
    return InjectedEngine(engine, config.inject, policy, mesh) if config.inject.changes_weights else engine


def load_jax_engine(
    model: str | Path, dtype: Any, max_prompt_tokens: int, *, kv_cache_dtype: Any = "auto"
) -> JaxEngine:
    """Makes the embedded engine on the first device, and publishes a model to it as version 0.

    ``model`` is a directory with ``config.json`` and safetensors. The engine computes in ``dtype``, for prompts of at
    most ``max_prompt_tokens``. Its cache has ``kv_cache_dtype``, a value of ``RolloutConfig.kv_cache_dtype``.
    """
    policy, mesh = read_config(model), make_mesh(MeshConfig(), jax.devices()[:1])
    engine = JaxEngine(policy, dtype, max_prompt_tokens, mesh=mesh, kv_cache_dtype=kv_cache_dtype)
    engine.publish(load_params(model, policy), 0)
    return engine


def make_backend(engine: str) -> Backend:
    """Makes the client of a kind of server: ``vllm.client.VllmBackend`` for "vllm". Raises ValueError for others."""
    if not can(engine, "serves"):
        raise ValueError(f"the kind of server must be {named_engines('serves')}, got {engine!r}")
    kind = pkgutil.resolve_name(f"rljax.rollout.servers.{engine}.client:{engine.capitalize()}Backend")
    return cast(Backend, kind())


def connect(
    urls: Sequence[str], limits: ClientLimits | None = None, *, kind: str = "vllm", api_key_file: str | None = None
) -> ServedModel:
    """Connects to servers of one ``kind``, vllm or sglang, which sample from the model that they were started with.

    ``urls`` are their base URLs, and ``api_key_file`` is the file with their key. ``limits`` None: the defaults.

    Raises:
      ServerError: A server does not answer.
      ValueError: A server is of another kind, or does not serve exactly one model, or the servers' models differ.
    """
    return ServedModel(urls, make_backend(kind), limits=limits, api_key_file=api_key_file)
