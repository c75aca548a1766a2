"""An update reads files of its own directory only. The plugin runs under vLLM's interpreter, without a server."""

import json
import subprocess

import pytest
from toy_runs import ROOT

pytestmark = pytest.mark.vllm
PROGRAM = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from safetensors.torch import save_file
from rljax.rollout.vllm.plugin import PROTOCOL, FileInitInfo, FileUpdateInfo, FileWeightTransferEngine

class Model(torch.nn.Module):
    def load_weights(self, tensors):
        self.loaded = [name for name, _ in tensors]

work = Path(sys.argv[1])
(work / "run" / "v1").mkdir(parents=True)
(work / "run" / "probe.txt").write_text("x")
for place in ("run/v1", "run", "."):
    save_file({"a": torch.ones(2)}, work / place / "0.safetensors")

def outcome(path, files, shown=True):
    engine = FileWeightTransferEngine.__new__(FileWeightTransferEngine)
    engine.model, engine.model_config = Model(), SimpleNamespace(dtype=torch.float32)
    if shown:
        engine.init_transfer_engine(FileInitInfo(str(work / "run" / "probe.txt"), "x", PROTOCOL))
    for place in ("run/v1", "run", "."):
        (work / place / "manifest.json").write_text(json.dumps({"tag": "t", "files": files}))
    try:
        engine.receive_weights(FileUpdateInfo(str(work / path), "t"))
    except ValueError as error:
        return str(error)
    return engine.model.loaded

print(json.dumps({
    "own": outcome("run/v1", ["0.safetensors"]),
    "up": outcome("run/v1", ["../0.safetensors"]),
    "absolute": outcome("run/v1", [str(work / "0.safetensors")]),
    "dots": outcome("run/v1", [".."]),
    "elsewhere": outcome(".", ["0.safetensors"]),
    "around": outcome("run/v1/..", ["0.safetensors"]),
    "not shown": outcome("run/v1", ["0.safetensors"], shown=False),
}))
"""


def test_an_update_does_not_leave_its_directory(vllm_interpreter, tmp_path):
    done = subprocess.run(
        [vllm_interpreter, "-c", PROGRAM, str(tmp_path)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["own"] == ["a"]
    for name in ("up", "absolute", "dots"):
        assert "names files outside itself" in said[name]
    for name in ("elsewhere", "around", "not shown"):
        assert "lies in no directory that a trainer has shown" in said[name]
