"""The plugin without a server: its registration, its files, and servers that it refuses."""

import contextlib
import json
import os
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.rollout.servers.vllm.taps import refusal
from rljax.weights.format import PROTOCOL
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum
from rljax.weights.worker import WorkerWeights

PROGRAM = """
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from rljax.rollout.servers.vllm.plugin import BACKEND, register

for name in ("_init_amx", "_is_amx_tile_supported"):
    delattr(torch.cpu, name)
    WeightTransferEngineFactory._registry.pop(BACKEND, None)
    register()
    register()
    assert BACKEND in WeightTransferEngineFactory._registry, name
"""


@pytest.mark.vllm
@pytest.mark.harness
def test_it_registers_where_torch_knows_no_tiles(vllm_interpreter):
    """Every server's start shows the rest: its environment has no JAX, and on AMX it asks for tiles or dies."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [vllm_interpreter, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


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
