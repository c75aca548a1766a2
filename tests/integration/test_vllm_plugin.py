"""The plugin without a server: its imports, its request to the kernel, and its files.

One program under vLLM's interpreter shows the first two, because importing vLLM takes far longer than the checks.
"""

import contextlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rljax.weights.format import PROTOCOL
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum
from rljax.weights.worker import WorkerWeights

CPUINFO = Path("/proc/cpuinfo")
AMX = CPUINFO.exists() and "amx_tile" in CPUINFO.read_text()
PROGRAM = """
import ctypes, json, sys
from importlib.metadata import entry_points

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "flax", "optax"}:
            raise ImportError(f"refused: {name}")

sys.meta_path.insert(0, Refuse())
(point,) = entry_points(group="vllm.general_plugins", name="rljax")
register = point.load()

def granted():  # arch_prctl(ARCH_GET_XCOMP_PERM); bit 18 stands for the tiles' data
    mask = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask)) == 0
    return bool(mask.value >> 18 & 1)

said = {"granted": [granted()]}
register()
register()
said["granted"].append(granted())

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from rljax.rollout.servers.vllm.plugin import BACKEND

assert BACKEND in WeightTransferEngineFactory._registry
said["registered_without"] = []
for name in ("_is_amx_tile_supported", "_init_amx"):
    kept = getattr(torch.cpu, name)
    delattr(torch.cpu, name)
    WeightTransferEngineFactory._registry.pop(BACKEND)
    register()
    if BACKEND in WeightTransferEngineFactory._registry:
        said["registered_without"].append(name)
    setattr(torch.cpu, name, kept)

print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(vllm_interpreter):
    """Returns the output of the program. It finds rljax as vLLM does, as an installed package."""
    done = subprocess.run(
        [vllm_interpreter, "-c", PROGRAM],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.vllm
@pytest.mark.harness
@pytest.mark.skipif(not AMX, reason="this processor has no AMX tiles")
def test_it_gets_the_permission_to_use_tiles(said):
    assert said["granted"] == [False, True]


@pytest.mark.vllm
@pytest.mark.harness
def test_it_registers_where_torch_knows_no_tiles(said):
    assert said["registered_without"] == ["_is_amx_tile_supported", "_init_amx"]


def test_an_update_does_not_leave_its_directory(tmp_path):
    """The plugin loads exactly what ``WorkerWeights`` yields."""
    tensor, weights = np.ones(2, np.float32), WorkerWeights()
    with contextlib.closing(WeightDirectory(PublishConfig(), tmp_path)) as files:
        version = files.write([("a", tensor)], 1, {"a": array_checksum(tensor)})

        def refusal(path):
            with pytest.raises(ValueError, match="directory") as refused:
                weights.version(str(path), version.tag).__enter__()
            return str(refused.value)

        assert "lies in no directory that a trainer has shown" in refusal(version.path)
        probe, text = files.probe()
        weights.show(str(probe), text, PROTOCOL)
        with weights.version(str(version.path), version.tag) as (directory, (name,)):
            assert (directory, directory / name) == (version.path, *version.path.glob("*.safetensors"))
        for path in (tmp_path, version.path / ".."):
            assert "lies in no directory that a trainer has shown" in refusal(path)
        described = (version.path / "version.json").read_text()
        for other in (f"../{name}", str(tmp_path / name), ".."):
            (version.path / "version.json").write_text(described.replace(f'"{name}"', json.dumps(other)))
            assert "a file outside its directory" in refusal(version.path)
