"""Fixtures for environments of verifiers: the package's Python, and two engines with the toy base."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from vllm_processes import ONE_THREAD

from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.rollout.build import load_jax_engine, make_engine
from rljax.rollout.episodes.verifiers.host import PYTHON
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.types import RolloutConfig
from rljax.sharding import MeshConfig, make_mesh

HERE = Path(__file__).parent
TOY = HERE.parents[1] / "rljax/configs/toy-base"


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.verifiers)


@pytest.fixture(scope="session", autouse=True)
def verifiers_python():
    """Returns a Python with the package, or skips the tests.

    Its process finds the environments of the tests.
    """
    python = os.environ.get(PYTHON) or sys.executable
    if subprocess.run([python, "-c", "import verifiers.v1"], capture_output=True).returncode:
        pytest.skip(f"{python} has no verifiers: run tools/test_verifiers.sh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE / "environments"))
        yield python


@pytest.fixture(scope="session")
def toy_engine():
    """Returns the embedded engine with the toy base in float32."""
    return load_jax_engine(TOY, "float32", 64)


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory):
    """Yields an engine with a real vLLM server that serves the toy base in float32, published as version 0."""
    if os.environ.get("RLJAX_SKIP_VLLM") == "1":
        pytest.skip("RLJAX_SKIP_VLLM=1")
    try:
        python = str(vllm_python())
    except RuntimeError:
        pytest.skip("no vLLM environment: run launch/install_vllm.sh or set RLJAX_VLLM_VENV")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    settings = {"max_model_len": 512, "max_num_seqs": 16, "max_logprobs": 16, "log_path": log, "extra_env": ONE_THREAD}
    server = start(ServerConfig(str(TOY), python, dtype="float32", **settings), timeout_s=540)
    policy = read_config(TOY)
    engine = make_engine(
        RolloutConfig(engine="vllm", urls=(server.url,), dtype="float32"),
        policy,
        make_mesh(MeshConfig(), jax.devices()[:1]),
        max_prompt_tokens=64,
        max_tokens=400,
    )
    try:
        engine.publish(load_params(TOY, policy), 0)
        yield engine
    finally:
        engine.close()
        server.stop()


@pytest.fixture
def forgetful_model(tmp_path):
    """Returns the toy base with a chat template that shows only the last message.

    No turn then extends the turn before it.
    """
    shutil.copytree(TOY, tmp_path / "forgetful")
    (tmp_path / "forgetful/chat_template.jinja").write_text("{{ messages[-1].content }}")
    return tmp_path / "forgetful"
