"""Engines over stand-in servers whose log-probability is always -1."""

import contextlib

import numpy as np
from opened_clients import quick
from vllm_fake import SHAPE

from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
from rljax.rollout.servers.handshake import Expectation
from rljax.rollout.types import RolloutConfig
from rljax.weights.sums import array_checksum

PROMPTS = [np.array([1, 2], np.int32), np.array([9], np.int32)]
PARAMS = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float32)}


def make(*urls, score_shift=lambda: 0.0, tmp_path=None, tensors=dict.items, head_dtype=None, rope=None, **options):
    """Returns an engine. ``options`` are its backend, its publish and its stop, and fields of RolloutConfig."""

    def score(params, sequences):
        return [np.full(len(s), -1.0 + score_shift(), np.float32) for s in sequences]

    def checksums(params):
        return {name: array_checksum(array) for name, array in params.items()}

    backend, more = options.pop("backend", None), {name: options.pop(name, None) for name in ("publish", "stop")}
    settings = {"server_wait_s": 10.0, "dtype": "float32", "transfer_dir": tmp_path and str(tmp_path), **options}
    hf_config = SHAPE | ({"rope_parameters": rope} if rope else {})
    expected = Expectation(RolloutConfig(engine="vllm", urls=urls, **settings), hf_config, 100, head_dtype)
    return ServedEngine(expected, backend or quick(), PolicyFunctions(tensors, checksums, score), **more)


@contextlib.contextmanager
def published(*urls, **settings):
    """Yields an engine that has published ``PARAMS`` as version 0. The arguments are those of ``make``."""
    with contextlib.closing(make(*urls, **settings)) as engine:
        engine.publish(PARAMS, 0)
        yield engine
