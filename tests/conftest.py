"""Settings for every test: rank promotion raises, float32 means float32, and jax stays on the CPU with 8 devices."""

import os
from collections import defaultdict

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """For pytest-xdist: the tests of a file stay in one process, and all files that need servers in the same."""
    files = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    for path, members in files.items():
        needs_server = any("vllm_interpreter" in item.fixturenames for item in members)
        for item in members:
            item.add_marker(pytest.mark.xdist_group("servers" if needs_server else path.stem))
