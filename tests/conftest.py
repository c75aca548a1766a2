"""Settings for every test: rank promotion raises, float32 means float32, and jax compiles quickly on the CPU."""

import contextlib
import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from quick_compile import FLAGS

ROOT = Path(__file__).parents[1]
MESH_DEVICES = 8
# Files that wait for processes, sockets and clocks more than they compute. They run beside the tests of vLLM servers,
# which keep four processes busy.
WAITING = {
    *("test_rewards_pool", "test_run_owner", "test_ownership", "test_pipeline", "test_in_flight"),
    *("test_vllm_engine", "test_vllm_server", "test_vllm_client", "test_server_discovery"),
    *("test_weight_server", "test_weight_parts", "test_environment_hosts", "test_tool_pool"),
}
# Names from tests/support, and the group of the files that import them: their runs or steps share compiled programs.
SHARING = {"tiny": "toy runs", "completed": "toy runs", "packed": "tiny step"}
# The markers of tests that need more than this package's environment, with the script that runs them.
OF_A_SCRIPT = {
    "browser": "tools/test_view.sh",
    "compilers": "tools/test_compilers.sh",
    "harness": "tools/test_harnesses.sh",
    "launch_files": "tools/test_kubernetes.sh",
    "processes": "tools/test_processes.sh",
    "real_models": "tools/test_real_models.sh",
    "sglang": "tools/test_sglang.sh",
    "slurm": "tools/test_slurm.sh",
    "store": "tools/test_store.sh",
    "trackers": "tools/test_trackers.sh",
    "verifiers": "tools/test_verifiers.sh",
    "vllm_tpu": "tools/test_tpu_server.sh",
}

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
# Compiled programs are kept, as the launch scripts do. The key is the text of the program, so no change is missed.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Lowering writes no traceback of each operation, which took a sixteenth of the time of a run on eight devices.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


def asked_for(config):
    """Returns the markers that ``-m`` names without a "not"."""
    return {word for negated, word in re.findall(r"(not )?(\w+)", config.option.markexpr) if not negated}


def pytest_configure(config):
    """Gives the process eight simulated devices if ``mesh`` is selected; otherwise it has one."""
    import jax

    if "mesh" in asked_for(config):
        jax.config.update("jax_num_cpu_devices", MESH_DEVICES)
    # Tracing creates millions of objects that stay alive. To look for cycles among them took a fifteenth of the time.
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def sharing(item):
    """Returns the group of files whose compiled programs a test can use, "" for none."""
    return next((group for name, group in SHARING.items() if hasattr(item.module, name)), "")


def pytest_itemcollected(item):
    """Puts a test into the group of its file, of shared programs or of vLLM servers. One worker runs a group in order.

    This is done here, because xdist reads the groups before conftest's ``pytest_collection_modifyitems``.
    """
    if item.config.pluginmanager.hasplugin("xdist"):
        served = item.get_closest_marker("vllm") is not None
        item.add_marker(pytest.mark.xdist_group("vllm" if served else sharing(item) or item.path.stem))


def pytest_collection_modifyitems(config, items):
    """Orders the tests and skips those that a script runs.

    Tests of servers are first, tests that can wait beside them are next, then large groups, and short files are last.
    """
    asked = asked_for(config)
    for item in items:
        if item.get_closest_marker("mesh") and "mesh" not in asked:
            item.add_marker(pytest.mark.skip(reason="needs eight devices: run pytest -m mesh"))
        for marker, script in OF_A_SCRIPT.items():
            if item.get_closest_marker(marker) and marker not in asked:
                item.add_marker(pytest.mark.skip(reason=f"run {script}"))
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item):
        waits = item.path.stem in WAITING
        return item.get_closest_marker("vllm") is None, not waits, not sharing(item), item.path not in slow_files

    items.sort(key=place)


@pytest.fixture(scope="module", autouse=True)
def _set_aside():
    """Excludes what a file leaves, such as shared programs, from later searches for cycles, which take 1 s each.

    A search at this point took 0.3 s and found a few hundred objects.
    """
    yield
    gc.freeze()


@pytest.fixture(scope="session")
def toy_base() -> Path:
    """Returns the path of a toy base, fitted for 400 steps on half scratchpads; one response in five earns its reward.

    ``tools/make_toy_base.py tests/data/practised-base --steps 400 --settle-steps 0 --batch-size 64 --seed 1`` made it.
    """
    return ROOT / "tests/data/practised-base"


@pytest.fixture(scope="session")
def vllm_interpreter() -> str:
    """Returns the Python of the vLLM environment, or skips the test."""
    from rljax.rollout.servers.process import environment_python

    if os.environ.get("RLJAX_SKIP_VLLM") == "1":
        pytest.skip("RLJAX_SKIP_VLLM=1")
    try:
        return str(environment_python("vllm"))
    except RuntimeError:
        pytest.skip("no vLLM environment: run launch/install_vllm.sh or set RLJAX_VLLM_VENV")


@pytest.fixture
def another():
    """Yields a function that starts a server, at a port or any, that answers as the test says.

    The real server is used in tests/integration.
    """
    from vllm_fake import FakeVllm  # imports numpy and safetensors, which few tests need

    with contextlib.ExitStack() as stack:

        def start(port=0):
            server = FakeVllm(port)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def fake(another):
    return another()


@pytest.fixture
def elsewhere():
    """Yields an executor of one thread that samples ahead, while the test publishes."""
    from rljax.rollout.engine import AHEAD

    with ThreadPoolExecutor(1, initializer=AHEAD.set, initargs=(1,)) as thread:
        yield thread
