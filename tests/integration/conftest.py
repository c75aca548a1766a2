"""Real vLLM servers over tiny random models, one server for each dtype, and the toy base of whole runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stopping import StopWhen
from toy_runs import outcome
from vllm_processes import FORKED, kill_server

from rljax.commands import accept
from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.hf import hf_tensors, load_params
from rljax.policy.published import hf_checksums
from rljax.policy.rotary import RopeScaling
from rljax.policy.score import make_scorer
from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
from rljax.rollout.servers.handshake import Expectation
from rljax.rollout.servers.process import ServerProcess
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import VllmConfig, start
from rljax.rollout.types import Response, RolloutConfig
from rljax.weights.publish_config import PublishConfig

HERE = Path(__file__).parent
SUPPORT = str(HERE.parent / "support")
MAX_LEN = 512
TIED = {"bfloat16": True, "float16": False, "float32": True}
REPEATED = {"bfloat16"}  # the dtypes whose tied model has the head in its files, like Qwen3-0.6B as it is published
HYBRID = "qwen3_5_text"  # vLLM's linear attention on a CPU ends the engine in float32
# Policies other than dense Qwen3, by family.
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 2}
SHAPES = {
    "qwen3_moe": PolicyConfig(
        **SIZES, num_kv_heads=1, head_dim=32, family="qwen3_moe", max_position_embeddings=1024, initializer_range=0.1,
        num_experts=8, experts_per_token=2, expert_size=32, normalize_gates=True, tie_word_embeddings=True,
    ),
    "qwen2": PolicyConfig(
        **SIZES, num_kv_heads=2, head_dim=32, family="qwen2", max_position_embeddings=1024, initializer_range=0.1,
        tie_word_embeddings=True,
    ),
    "llama": PolicyConfig(
        **SIZES, num_kv_heads=1, head_dim=32, family="llama", max_position_embeddings=1024, initializer_range=0.1,
        attention_bias=True, mlp_bias=True, rope_scaling=RopeScaling("yarn", 32.0, 32, attention_factor=1.1),
    ),
    HYBRID: PolicyConfig(
        **SIZES | {"num_layers": 4}, num_kv_heads=1, head_dim=32, family=HYBRID, max_position_embeddings=1024,
        initializer_range=0.1, rotary_share=0.25, delta_key_heads=2, delta_value_heads=4, delta_key_dim=128,
        delta_value_dim=128, conv_width=4, rope_scaling=RopeScaling("yarn", 32.0, 32, attention_factor=1.1),
    ),
}  # fmt: skip


def pytest_collection_modifyitems(items):
    """Orders the tests so that the server of each dtype starts once. Tests with servers of their own come last."""

    def place(item) -> int:
        used = {*item.fixturenames, getattr(item, "callspec", None) and item.callspec.params.get("served")}
        return next((i for i, dtype in enumerate(TIED) if dtype in used), len(TIED))

    items.sort(key=place)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the end of the log of each used server to the report of a failed test."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            server = getattr(value, "server", value)
            if isinstance(server, ServerProcess):
                report.sections.append((f"end of the vLLM log {server.log_path}", server.log_tail(60)))


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny policy in both forms: the files of a server and the parameters of a trainer."""

    path: Path
    config: PolicyConfig
    params: dict
    hf_config: dict

    @classmethod
    def read(cls, path: Path) -> Model:
        policy = read_config(path)
        return cls(path, policy, load_params(path, policy), json.loads((path / "config.json").read_text()))

    def tensors(self, dtype: str) -> Callable:
        return functools.partial(hf_tensors, config=self.config, dtype=jnp.dtype(dtype))

    def checksums(self, dtype: str) -> Callable:
        return functools.partial(hf_checksums, config=self.config, dtype=jnp.dtype(dtype))

    def moved(self, seed: int, scale: float = 0.3) -> dict:
        """Returns the parameters after a big step. Each tensor moves by about ``scale`` of its own spread."""
        keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(self.params)))
        leaves, tree = jax.tree.flatten(self.params)
        moved = [
            leaf + scale * jnp.maximum(leaf.std(), 0.1) * jax.random.normal(key, leaf.shape)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, moved)


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server and the policy it was started from."""

    server: ServerProcess
    model: Model
    dtype: str

    @functools.cached_property
    def score(self) -> Callable:
        return make_scorer(self.model.config, jnp.dtype(self.dtype))

    @property
    def url(self) -> str:
        return self.server.url

    def engine(
        self,
        *,
        tensors: Callable | None = None,
        hf_config: dict | None = None,
        max_tokens: int = MAX_LEN,
        head_dtype: str | None = None,
        publish: PublishConfig | None = None,
        stop: StopWhen | None = None,
        **config,
    ) -> ServedEngine:
        """Returns an engine for this server, which stops if the server ends. ``config`` is as RolloutConfig has it."""
        settings = RolloutConfig(engine="vllm", urls=(self.url,), **{"dtype": self.dtype, **config})
        return ServedEngine(
            Expectation(settings, hf_config or self.model.hf_config, max_tokens, head_dtype),
            VllmBackend(),
            PolicyFunctions(tensors or self.model.tensors(self.dtype), self.model.checksums(self.dtype), self.score),
            publish=publish,
            stop=stop or StopWhen(lambda: not self.server.alive()),
        )

    @contextlib.contextmanager
    def published(self, params: dict | None = None, version: int = 0, **settings) -> Iterator[ServedEngine]:
        """Yields an engine that has published these parameters, or those that the server was started from."""
        with contextlib.closing(self.engine(**settings)) as engine:
            engine.publish(self.model.params if params is None else params, version)
            yield engine

    def gaps(self, params: dict, responses: Sequence[Response]) -> np.ndarray:
        """Returns the absolute difference of server and trainer at each sampled token (nats)."""
        scored = self.score(params, [response.ids for response in responses])
        pairs = zip(responses, scored, strict=True)
        return np.concatenate([np.abs(np.asarray(s)[-r.length :] - r["rollout_logprobs"]) for r, s in pairs])


def accepted(served, out, *options, model=None):
    """Returns the exit status of ``rljax accept``, the checks of its JSON, and the page with the errors."""
    words = [model or served.model.path, "--server", served.url, "--out", out, "--length", "64", "--steps", "2"]
    status, page, err = outcome(accept.main, [*words, *options])
    return status, json.loads((out / "accept.json").read_text())["checks"], page + err


def failed(checks):
    """Returns the names of the checks of ``rljax accept`` that failed."""
    return [name for name, one in checks.items() if one["status"] == "FAIL"]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory) -> Callable[..., Model]:
    @functools.cache
    def make(tied: bool, repeats_head: bool = False) -> Model:
        import torch
        from transformers import Qwen3ForCausalLM
        from transformers_models import hf_config, repeat_head

        torch.manual_seed(0)
        path = tmp_path_factory.mktemp("tied" if tied else "untied")
        more = {"max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": 1}
        config = hf_config((256, 64, 128, 2, 4, 2, 32, tied, 10_000.0), "Qwen3", **more)
        Qwen3ForCausalLM(config).save_pretrained(path)
        if repeats_head:
            repeat_head(path)
        return Model.read(path)

    return make


@pytest.fixture(scope="session")
def start_server(vllm_interpreter, tmp_path_factory) -> Callable[..., ServerProcess]:
    def run(model: Model, dtype: str, *, port: int = 0, workers: int = 1, more: tuple[str, ...] = ()) -> ServerProcess:
        sizes = {"max_model_len": MAX_LEN, "max_num_seqs": 64, "max_logprobs": 256}  # the whole vocabulary
        where = {"port": port, "log_path": tmp_path_factory.mktemp("vllm") / f"{dtype}.log"}
        arguments = ("--worker-extension-cls", "vllm_sabotage.Sabotage", f"--tensor-parallel-size={workers}", *more)
        extra = {**FORKED, "PYTHONPATH": os.pathsep.join([SUPPORT, FORKED["PYTHONPATH"]])}
        how = {"dtype": dtype, "extra_args": arguments, "extra_env": extra}
        return start(VllmConfig(str(model.path), vllm_interpreter, **sizes, **where, **how), timeout_s=480)

    return run


class Servers:
    """One server at a time, by its name. A request for another one ends it, and a dead server is started again."""

    def __init__(
        self, model_of: Callable[[str], tuple[Model, str]], start_server: Callable[[str, int], ServerProcess]
    ) -> None:
        self._model_of, self._start_server = model_of, start_server
        self._name, self._current = "", None

    def of(self, name: str) -> Served:
        if self._name != name or not self.alive():
            self.stop()
            model, dtype = self._model_of(name)
            self._name, self._current = name, Served(self._start_server(name, 0), model, dtype)
        return self._current

    def alive(self) -> bool:
        return self._current is not None and self._current.server.alive()

    def kill_and_restart(self) -> None:
        """Ends the running server by SIGKILL and starts another on its port, with the weights on disk."""
        killed = self._current
        kill_server(killed.server)
        self._current = dataclasses.replace(killed, server=self._start_server(self._name, killed.server.port))

    def stop(self) -> None:
        if self._current is not None:
            self._current.server.stop()
        self._current = None


@pytest.fixture(scope="session")
def servers(make_model, start_server) -> Iterator[Servers]:
    """Yields the servers by their dtype."""

    def model_of(dtype: str) -> tuple[Model, str]:
        return make_model(TIED[dtype], dtype in REPEATED), dtype

    made = Servers(model_of, lambda dtype, port: start_server(*model_of(dtype), port=port))
    yield made
    made.stop()


@pytest.fixture
def bfloat16(servers) -> Served:
    return servers.of("bfloat16")


@pytest.fixture
def float32(servers) -> Served:
    return servers.of("float32")


@pytest.fixture
def served(request, servers) -> Served:
    """Returns the server of the dtype that an indirect parameter names."""
    return servers.of(request.param)


@pytest.fixture
def prompts() -> list[np.ndarray]:
    """Returns five prompts of 3 to 7 tokens."""
    draw = np.random.default_rng(5)
    return [draw.integers(2, 256, size=3 + i).astype(np.int32) for i in range(5)]
