"""A policy, the engine that publishes it to SGLang servers, and such a server, which makes mistakes on purpose."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_to_hf, read_config
from rljax.policy.hf import hf_tensors, load_params
from rljax.policy.published import hf_checksums
from rljax.policy.score import make_scorer
from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
from rljax.rollout.servers.handshake import Expectation
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.sglang.client import SglangBackend
from rljax.rollout.servers.sglang.server import SglangConfig, start
from rljax.rollout.types import RolloutConfig

PROMPTS = [np.array(ids, np.int32) for ids in ([3, 4, 5], [6, 7], [1, 2, 3, 4, 5, 6, 7])]
NORM, KEYS = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"
START_S = 400


@dataclasses.dataclass(frozen=True)
class Policy:
    config: PolicyConfig
    params: dict
    dtype: str

    @classmethod
    def read(cls, path, dtype):
        config = read_config(path)
        return cls(config, load_params(path, config), dtype)

    @property
    def tensors(self):
        return functools.partial(hf_tensors, config=self.config, dtype=jnp.dtype(self.dtype))

    def scorer(self, temperature=1.0):
        return make_scorer(self.config, jnp.dtype(self.dtype), temperature=temperature)

    def engine(self, *urls, tensors=None, publish=None, max_tokens=128, **config):
        """Returns an engine that publishes to these servers. ``config`` has fields of RolloutConfig."""
        settings = {"engine": "sglang", "urls": urls, "dtype": self.dtype, "server_wait_s": 240.0} | config
        expected = Expectation(RolloutConfig(**settings), config_to_hf(self.config, self.dtype), max_tokens)
        checksums = functools.partial(hf_checksums, config=self.config, dtype=jnp.dtype(self.dtype))
        functions = PolicyFunctions(tensors or self.tensors, checksums, self.scorer())
        return ServedEngine(expected, SglangBackend(), functions, publish=publish)

    def moved(self, seed):
        leaves, tree = jax.tree.flatten(self.params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        moved = [x + 0.3 * x.std() * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, moved)

    def gaps(self, params, responses):
        pairs = zip(responses, self.scorer()(params, [r.ids for r in responses]), strict=True)
        return np.concatenate([np.abs(scored[-r.length :] - r["rollout_logprobs"]) for r, scored in pairs])


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server and its initial policy; ``fault`` is the file that names the server's fault."""

    url: str
    policy: Policy
    fault: Path

    def break_updates(self, how, of="-"):
        self.fault.write_text(f"{how} {of}")

    def engine(self, **options):
        return self.policy.engine(self.url, **options)


def config_of(model, dtype, log_path, **options):
    """Returns the configuration of a server of ``model``. ``options`` are further fields of it."""
    python = str(environment_python("sglang"))
    return SglangConfig(str(model), python, dtype=dtype, max_model_len=256, log_path=log_path, **options)


@contextlib.contextmanager
def serving(folder, model, dtype, environment_of, extra_env=None, extra_args=()):
    """Yields a server. ``environment_of`` is a function of the file that names its fault (``with_faults``)."""
    fault = folder / "fault"
    environment = environment_of(fault) | (extra_env or {})
    config = config_of(model, dtype, folder / "server.log", extra_env=environment, extra_args=extra_args)
    with start(config, START_S) as server:
        yield Served(server.url, Policy.read(model, dtype), fault)
