"""The plugin without a server: its imports, its request to the kernel, its files, and servers that it refuses.

One program under vLLM's interpreter shows the first two, because importing vLLM takes far longer than the checks.
"""

import contextlib
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.rollout.servers.vllm.taps import refusal
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


@pytest.mark.vllm
@pytest.mark.harness
def test_it_registers_and_asks_for_tiles_where_there_are_some(vllm_interpreter):
    """The program finds rljax as vLLM does, as an installed package. It registers where torch knows no tiles, too."""
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
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["registered_without"] == ["_is_amx_tile_supported", "_init_amx"]
    assert not AMX or said["granted"] == [False, True]


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


def described(*, eager=True, mode=0, stages=1, workers=1):
    model = SimpleNamespace(enforce_eager=eager)
    parallel = SimpleNamespace(pipeline_parallel_size=stages, tensor_parallel_size=workers)
    return SimpleNamespace(model_config=model, compilation_config=SimpleNamespace(mode=mode), parallel_config=parallel)


def test_a_server_that_hides_its_operations_is_refused():
    """The description has vLLM's configuration, and the runner does not tell which rows belong to which request."""
    runner = SimpleNamespace(model=SimpleNamespace())
    assert "compiled or captured in graphs" in refusal(described(mode=3), runner)
    assert "start it with --enforce-eager" in refusal(described(eager=False), runner)
    assert "pipeline stages" in refusal(described(stages=2), runner)
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in refusal(described(), runner)
    runner = SimpleNamespace(input_batch=None, query_start_loc=None, model=SimpleNamespace())
    assert "its model SimpleNamespace is not of a family" in refusal(described(), runner)
    body = SimpleNamespace(layers=[SimpleNamespace(linear_attn=None)])
    runner.model = SimpleNamespace(model=body, logits_processor=None)
    assert "its delta nets are split over workers" in refusal(described(workers=2), runner)
    assert refusal(described(), runner) == ""
