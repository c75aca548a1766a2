"""A policy and the engine that publishes it to SGLang servers."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_to_hf, read_config
from rljax.policy.hf import hf_tensors, load_params
from rljax.policy.published import hf_checksums
from rljax.policy.score import make_scorer
from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
from rljax.rollout.servers.sglang.client import SglangBackend
from rljax.rollout.types import RolloutConfig
from rljax.weights.publish_config import PublishConfig


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy of the tests.

    Attributes:
      config: The configuration of the policy.
      params: The parameters of the policy.
      dtype: The dtype in which the servers compute.
    """

    config: PolicyConfig
    params: dict
    dtype: str

    @classmethod
    def read(cls, path, dtype):
        config = read_config(path)
        return cls(config, load_params(path, config), dtype)

    @property
    def tensors(self) -> Callable:
        return functools.partial(hf_tensors, config=self.config, dtype=jnp.dtype(self.dtype))

    def scorer(self, temperature: float = 1.0) -> Callable:
        return make_scorer(self.config, jnp.dtype(self.dtype), temperature=temperature)

    def engine(
        self,
        *urls: str,
        tensors: Callable | None = None,
        publish: PublishConfig | None = None,
        max_tokens=128,
        **config,
    ) -> ServedEngine:
        """Returns an engine that publishes to these servers. ``config`` has fields of RolloutConfig."""
        settings = {"engine": "sglang", "urls": urls, "dtype": self.dtype, "server_wait_s": 240.0} | config
        checksums = functools.partial(hf_checksums, config=self.config, dtype=jnp.dtype(self.dtype))
        return ServedEngine(
            RolloutConfig(**settings),
            SglangBackend(),
            PolicyFunctions(tensors or self.tensors, checksums, self.scorer()),
            hf_config=config_to_hf(self.config, self.dtype),
            max_tokens=max_tokens,
            publish=publish,
        )

    def moved(self, seed: int) -> dict:
        """Returns the parameters after a big random step."""
        leaves, tree = jax.tree.flatten(self.params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        moved = [x + 0.3 * x.std() * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, moved)
