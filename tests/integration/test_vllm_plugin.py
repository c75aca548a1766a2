"""The plugin under vLLM's interpreter, without a server: its imports, its request to the kernel, and its files.

One program shows all of it, because importing vLLM takes far longer than the checks.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.harness]  # house/test_imports.py follows the imports
CPUINFO = Path("/proc/cpuinfo")
AMX = CPUINFO.exists() and "amx_tile" in CPUINFO.read_text()
PROGRAM = """
import ctypes, json, sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

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
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from rljax.rollout.servers.vllm.plugin import BACKEND, FileInitInfo, FileUpdateInfo, FileWeightTransferEngine
from rljax.weights.format import PROTOCOL

said["backend"] = BACKEND in WeightTransferEngineFactory._registry and BACKEND
said["modules"] = sorted(name for name in sys.modules if name.split(".")[0] == "rljax")
said["registered_without"] = []
for name in ("_is_amx_tile_supported", "_init_amx"):
    kept = getattr(torch.cpu, name)
    delattr(torch.cpu, name)
    WeightTransferEngineFactory._registry.pop(BACKEND)
    register()
    if BACKEND in WeightTransferEngineFactory._registry:
        said["registered_without"].append(name)
    setattr(torch.cpu, name, kept)

class Model(torch.nn.Module):
    def load_weights(self, tensors):
        self.loaded = [name for name, _ in tensors]

work = Path(sys.argv[1])
(work / "run" / "v1").mkdir(parents=True)
(work / "run" / "probe.txt").write_text("x")
for place in ("run/v1", "run", "."):
    save_file({"a": torch.ones(2)}, work / place / "0.safetensors")

def described(name, files):
    sums = {"count": 2, "first": 0, "second": 0, "placed": 0}
    region = {"row": 0, "rows": 1, "column": 0, "width": 2, "stride": 2}
    dense = [{"tensor": "a", "region": region, "file": file, "key": "a"} for file in files]
    records = {file: {"bytes": 80, "xxh3": ""} for file in files}
    version = {"name": name, "tag": "t", "dtype": "float32", "tensors": {"a": {"shape": [2], "sums": sums}}}
    return json.dumps({**version, "files": records, "dense": dense})

def outcome(path, files, shown=True):
    engine = FileWeightTransferEngine.__new__(FileWeightTransferEngine)
    settings = SimpleNamespace(dtype=torch.float32, hf_text_config=SimpleNamespace(tie_word_embeddings=False))
    engine.model, engine.model_config = Model(), settings
    if shown:
        engine.init_transfer_engine(FileInitInfo(str(work / "run" / "probe.txt"), "x", PROTOCOL))
    for place in ("run/v1", "run", "."):
        (work / place / "version.json").write_text(described(Path(path).name, files))
    try:
        engine.receive_weights(FileUpdateInfo(str(work / path), "t"))
    except ValueError as error:
        return str(error)
    return engine.model.loaded

said["paths"] = {
    "own": outcome("run/v1", ["0.safetensors"]),
    "up": outcome("run/v1", ["../0.safetensors"]),
    "absolute": outcome("run/v1", [str(work / "0.safetensors")]),
    "dots": outcome("run/v1", [".."]),
    "elsewhere": outcome(".", ["0.safetensors"]),
    "around": outcome("run/v1/..", ["0.safetensors"]),
    "not shown": outcome("run/v1", ["0.safetensors"], shown=False),
}
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(vllm_interpreter, tmp_path_factory):
    """Returns the output of the program. It finds rljax as vLLM does, as an installed package."""
    done = subprocess.run(
        [vllm_interpreter, "-c", PROGRAM, str(tmp_path_factory.mktemp("plugin"))],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_loads_without_jax(said):
    """vLLM's environment has no jax, so the plugin and the modules it imports must not import it."""
    beside = ("rljax.weights.access", "rljax.weights", "rljax.distributed", "rljax.errors")
    vllm = ("", ".plugin", ".server", ".taps", ".forced", ".hooks", ".description")
    own = ("rljax", "rljax.rollout", *(f"rljax.rollout.servers.vllm{name}" for name in vllm))
    own += ("rljax.rollout.servers", "rljax.rollout.servers.process", "rljax.rollout.servers.loaded")
    own += ("rljax.weights.sums", "rljax.weights.mirror")
    assert said["backend"] == "rljax_file"
    assert set(own) <= set(said["modules"])
    assert [name for name in said["modules"] if name not in own and not name.startswith(beside)] == []


@pytest.mark.skipif(not AMX, reason="this processor has no AMX tiles")
def test_it_gets_the_permission_to_use_tiles(said):
    assert said["granted"] == [False, True]


def test_it_registers_where_torch_knows_no_tiles(said):
    assert said["registered_without"] == ["_is_amx_tile_supported", "_init_amx"]


def test_an_update_does_not_leave_its_directory(said):
    paths = said["paths"]
    assert paths["own"] == ["a"]
    for name in ("up", "absolute", "dots"):
        assert "a file outside its directory" in paths[name]
    for name in ("elsewhere", "around", "not shown"):
        assert "lies in no directory that a trainer has shown" in paths[name]
