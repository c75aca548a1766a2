"""The one place where an engine is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax.errors import ConfigError
from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_to_hf, read_config
from rljax.policy.hf import hf_tensors, load_params
from rljax.policy.published import hf_checksums, hf_parts
from rljax.policy.score import make_scorer
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.engine import RolloutEngine, Stopping
from rljax.rollout.exact import ExactEngine, Executable
from rljax.rollout.injected import InjectedEngine
from rljax.rollout.servers.backend import Backend
from rljax.rollout.servers.client import check_url
from rljax.rollout.servers.discovery import make_lookup
from rljax.rollout.servers.engine import ServedEngine
from rljax.rollout.servers.model import ServedModel
from rljax.rollout.servers.sglang.client import SglangBackend
from rljax.rollout.servers.verify import Score
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.types import SERVED, ClientLimits, PublishConfig, RolloutConfig
from rljax.sharding import MeshConfig, make_mesh, on_devices
from rljax.weights.format import Checksum
from rljax.weights.writer import Part, Writer


@dataclass(frozen=True)
class PolicyFunctions:
    """What an HTTP engine computes from the policy's pytree (``ServedEngine``).

    Attributes:
      tensors: see there, as those that follow.
      checksums: likewise.
      score: likewise.
      parts: the parts of the tensors that this process holds.
      writer: where several processes write their parts of a version; None: this one writes whole tensors.
    """

    tensors: Callable[[Any], Iterable[tuple[str, np.ndarray]]]
    checksums: Callable[[Any], Mapping[str, Checksum]]
    score: Score
    parts: Callable[[Any], Iterable[Part]]
    writer: Writer | None = None


def policy_functions(policy: PolicyConfig, dtype: str) -> PolicyFunctions:
    """Those of a policy that is published in ``dtype``.

    Of parameters in the host's memory (``sharding.on_host``) there is a copy on the devices while a function works; to
    score, which servers on the same devices may have to wait for, one in ``dtype``.
    """
    wanted, score = jnp.dtype(dtype), make_scorer(policy, dtype)
    return PolicyFunctions(
        lambda params: hf_tensors(on_devices(params), policy, wanted),
        lambda params: hf_checksums(on_devices(params), policy, wanted),
        lambda params, sequences: score(on_devices(params, wanted), sequences),
        lambda params: hf_parts(on_devices(params), policy, wanted),
    )


def check_engine(config: RolloutConfig) -> None:
    """Raises ValueError for settings that the engine named by ``config`` cannot work with; opens nothing."""
    inject = config.inject
    if config.colocated and config.engine != "vllm":
        raise ValueError(f"rollout.colocated works with rollout.engine = vllm, not with {config.engine}")
    if config.max_staleness and config.engine == "exact":
        raise ValueError("rollout.max_staleness: the exact engine samples with the policy that is trained; give 0")
    if config.max_staleness and config.colocated:
        raise ValueError("rollout.max_staleness: colocated servers sleep while the trainer trains; give 0")
    if config.update != "wait":
        _check_in_flight(config)
    for name, default in (("weight_quantization", "none"), ("kv_cache_dtype", "auto")):
        if config.engine != "jax" and getattr(config, name) != default:
            raise ValueError(f"rollout.{name} works with rollout.engine = jax, not with {config.engine}")
    if config.weight_quantization != "none" and inject.quantize != "none":
        raise ValueError("rollout.weight_quantization and rollout.inject.quantize both round the weights: give one")
    if config.router is not None:
        check_url(config.router)
        if config.engine == "sglang":
            raise ValueError("rollout.router works with rollout.engine = vllm, not with sglang")
    if config.engine == "sglang" and config.router_replay == "r3":
        raise ValueError("rollout.router_replay = r3 works with rollout.engine = jax or vllm, not with sglang")
    if config.engine in SERVED:
        if config.discovery is not None:
            make_lookup(config.discovery)
        elif not config.urls:
            raise ValueError(
                f"rollout.engine = {config.engine} needs at least one URL in rollout.urls, or rollout.discovery"
            )
        if inject.changes_weights or inject.logit_noise:
            raise ValueError(f"rollout.inject works with rollout.engine = exact or jax, not with {config.engine}")
    if config.engine == "exact" and config.router_replay != "none":
        raise ValueError("rollout.router_replay: the exact engine routes as the trainer does; give none")
    if config.engine == "jax" and inject.logit_noise:
        raise ValueError("rollout.inject.logit_noise works with rollout.engine = exact only")


def _check_in_flight(config: RolloutConfig) -> None:
    """Raises ValueError where responses under way cannot go on with new weights."""
    said = f"rollout.update = {config.update}"
    if config.engine not in SERVED:
        raise ValueError(f"{said} works with rollout.engine = vllm or sglang, not with {config.engine}")
    if not config.max_staleness:
        raise ValueError(f"{said}: no response is under way when weights come; give rollout.max_staleness above 0")
    if config.router is not None:
        raise ValueError(f"{said}: through rollout.router nobody knows which server samples a response; give wait")
    if config.router_replay == "r3":
        raise ValueError(f"{said}: the experts of tokens before new weights are not reported; give wait")


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
) -> RolloutEngine:
    """The engine that ``config.engine`` names; it is given parameters of ``policy`` by ``publish``.

    Args:
      config: the engine's name and settings.
      policy: shape of the policy.
      mesh: the trainer's.
      max_prompt_tokens: longest prompt (tokens).
      max_tokens: longest prompt plus longest response that will be asked for (tokens).
      lm_head_dtype: as ``PrecisionConfig`` has it; the exact engine has it in its executable. None: servers may
        compute the LM head in any dtype, and the embedded engine does so in its own.
      make_executable: the trainer's executable; engine exact alone needs and makes it.
      functions: for HTTP servers; None: ``policy_functions``.
      publish: how weights come to HTTP servers; None: as ``PublishConfig()`` says.
      stop: Whether to stop waiting for servers, and to give up what is sampled. None: neither.

    Raises:
      ConfigError: no server answers in time, or weights cannot be written.
      ValueError: the settings do not fit the engine, or a server does not fit the policy.
    """
    check_engine(config)
    if config.router_replay != "none" and not policy.num_experts:
        raise ValueError(f"rollout.router_replay = {config.router_replay} is for a mixture of experts; this is dense")
    if config.engine in SERVED:
        functions = functions or policy_functions(policy, config.dtype)
        try:
            return ServedEngine(
                config,
                _backend(config.engine, publish),
                hf_config=config_to_hf(policy, config.dtype),
                max_tokens=max_tokens,
                tensors=functions.tensors,
                checksums=functions.checksums,
                score=functions.score,
                publish=publish,
                writer=functions.writer,
                head_dtype=config.dtype if lm_head_dtype == "compute" else lm_head_dtype,
                stop=stop,
            )
        except RuntimeError as error:
            raise ConfigError(error) from error
    inject = config.inject
    if config.engine == "jax":
        replayed = config.router_replay == "r3"
        head = jnp.float32 if lm_head_dtype == "float32" else None
        engine: RolloutEngine = JaxEngine(
            policy,
            config.dtype,
            max_prompt_tokens,
            mesh=mesh,
            lm_head_dtype=head,
            weight_quantization=config.weight_quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            with_routes=replayed,
        )
    else:
        assert make_executable is not None
        engine = ExactEngine(make_executable(), inject=inject)
    return InjectedEngine(engine, inject, policy, mesh) if inject.changes_weights else engine


def load_jax_engine(model: str | Path, dtype: Any, max_prompt_tokens: int) -> JaxEngine:
    """The embedded engine on one device, with the policy of a Hugging Face directory as version 0."""
    policy = read_config(model)
    engine = JaxEngine(policy, dtype, max_prompt_tokens, mesh=make_mesh(MeshConfig(), jax.devices()[:1]))
    engine.publish(load_params(model, policy), 0)
    return engine


def _backend(kind: str, publish: PublishConfig | None = None) -> Backend:
    return VllmBackend(in_place=publish is not None and publish.in_place) if kind == "vllm" else SglangBackend()


def connect(
    urls: Sequence[str], limits: ClientLimits | None = None, *, kind: str = "vllm", api_key_file: str | None = None
) -> ServedModel:
    """The model that servers hold as they stand; their key comes as that of ``RolloutConfig.api_key_file``.

    Args:
      urls: of the servers.
      limits: of the client.
      kind: vllm or sglang.
      api_key_file: with the key that they ask for.

    Raises:
      ServerError: a server does not answer.
      ValueError: a server is not of this kind with one model, or the servers hold different ones.
    """
    return ServedModel(urls, _backend(kind), limits=limits, api_key_file=api_key_file)
