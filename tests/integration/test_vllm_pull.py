"""A real vLLM server pulls changed tensors: bits arrive, damage is repaired or caught, and servers join late."""

import contextlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from toy_runs import ROOT
from vllm_checks import OTHER_BITS, adamw_step, check_use, rpc, sabotaged

from rljax.distributed.files import memory_directory
from rljax.errors import HandshakeError, VerificationError
from rljax.rollout.types import SamplingParams
from rljax.weights.format import mapped, read_version
from rljax.weights.mirror import Mirror
from rljax.weights.publish_config import PublishConfig

pytestmark = pytest.mark.vllm


@pytest.fixture
def pulling():
    """Yields a function that builds an engine which has published version 0. Its server pulls, by default over HTTP."""
    with contextlib.ExitStack() as stack:

        def build(served, store="http", **config):
            engine = served.engine(publish=PublishConfig(store=store), **config)
            stack.callback(engine.close)
            build.first = engine.publish(served.model.params, 0)
            return engine

        yield build


def mirror_of(engine) -> Mirror:
    """Returns the mirror on this machine that holds a version of the engine's run."""
    for root in memory_directory().glob("rljax-mirror-*"):
        version = Mirror(root).version
        if version is not None and version.tag.startswith(engine.files.run_tag):
            return Mirror(root)
    raise AssertionError("no mirror of this run")


def assert_bits(engine, served, params) -> None:
    """Checks the tensors' bits in the mirror's files, without the checksums of the product."""
    mirror = mirror_of(engine)
    version = json.loads((mirror.root / "version.json").read_text())
    found = {}
    for file in version["files"]:
        found |= load_file(mirror.root / file)
    wanted = dict(served.model.tensors(served.dtype)(params))
    assert sorted(found) == sorted(wanted)
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def recounted(engine, served):
    """Runs the program of examples/ that recounts the workers' tensors. Returns its exit status and output."""
    words = [sys.executable, str(ROOT / "examples/recount_weights.py"), str(engine.files.root), served.url]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.harness
def test_the_example_recounts_what_the_server_holds(bfloat16, pulling, tmp_path):
    engine = pulling(bfloat16, "directory", transfer_dir=str(tmp_path))
    params = bfloat16.model.params
    for version in range(1, 3):
        params = adamw_step(params, seed=version)
        engine.publish(params, version)
        status, said = recounted(engine, bfloat16)
        assert status == 0, said
        assert "24 tensors, " in said
        assert "1 workers; 0 differ" in said
    refused = pytest.raises(VerificationError, match=OTHER_BITS)
    with sabotaged(bfloat16, "load", "skip", "model.layers.1.mlp.down_proj.weight"), refused:
        engine.publish(adamw_step(params, seed=3), 3)
    status, said = recounted(engine, bfloat16)
    assert status == 1
    assert said.splitlines()[-2].endswith("; 1 differ")
    assert said.splitlines()[-1] == "model.layers.1.mlp.down_proj.weight"


@pytest.mark.harness
def test_an_update_that_ends_in_an_error_is_repeated(bfloat16, pulling):
    """The server is closed and gets the version again. vLLM itself takes the failed update for one under way."""
    engine = pulling(bfloat16)
    params = bfloat16.model.params
    rpc(bfloat16, "sabotage_finish", "next")
    metrics = engine.publish(adamw_step(params, seed=1), 1)
    assert (metrics["rollout/server_losses"], metrics["rollout/servers_brought_back"]) == (1, 1)
    assert metrics["publish/verified_tensors"] == 24
    engine.fleet.report()
    assert engine.publish(adamw_step(params, seed=2), 2)["publish/verified_tensors"] == 24


def test_steps_at_the_papers_rate_arrive_as_deltas(bfloat16, pulling, caplog):
    """Then a bit that flips in the mirror is repaired."""
    engine = pulling(bfloat16)
    first = pulling.first
    assert first["publish/pulled_bytes"] == first["publish/bytes"]
    assert 0 < first["publish/fetch_s"] < first["publish/pull_s"]
    assert 0 < first["publish/check_s"] < first["publish/pull_s"] - first["publish/fetch_s"]
    params = bfloat16.model.params
    for version in range(1, 4):
        before, params = params, adamw_step(params, seed=version)
        metrics = engine.publish(params, version)
        assert metrics["publish/verified_tensors"] == 24
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(params), strict=True)
        counts = [(int((a.astype(jnp.bfloat16) != b.astype(jnp.bfloat16)).sum()), a.size) for a, b in pairs]
        changed, elements = map(sum, zip(*counts, strict=True))
        assert metrics["publish/changed_fraction"] == changed / elements
        assert 0.001 < changed / elements < 0.05
        assert metrics["publish/pulled_bytes"] == metrics["publish/bytes"] < first["publish/bytes"] / 5
        assert metrics["publish/stall_s"] < metrics["publish/seconds"]
        assert {"publish/encode_s", "publish/pull_s", "publish/load_s"} <= metrics.keys()
    assert_bits(engine, bfloat16, params)
    response = next(iter(engine.generate([np.array([1, 2], np.int32)], 1, SamplingParams(4), seed=0)))
    assert response.versions[0] == 3
    mirror, name = mirror_of(engine), "model.norm.weight"
    (file,) = (piece.file for piece in mirror.version.dense if piece.tensor == name)
    mapped(mirror.root / file, writable=True)[name][5] ^= 1
    params = adamw_step(params, seed=4)
    assert engine.publish(params, 4)["publish/mirrors_repaired"] == 1
    assert "1 tensor is not as it came: model.norm.weight" in caplog.text
    assert_bits(engine, bfloat16, params)


@pytest.mark.harness
def test_a_server_that_missed_versions_gets_the_newest(bfloat16, pulling):
    """Its mirror is removed, as if it ran on another machine. The server has weights that nobody published."""
    engine = pulling(bfloat16)
    params = bfloat16.model.params
    for version in (1, 2):
        params = adamw_step(params, seed=version)
        engine.publish(params, version)
    mirror_of(engine).clear()
    server = engine.fleet.server(bfloat16.url)
    engine.fleet.on_loop(server.close, "planted")
    engine.fleet.wait(server.call("POST", "/start_weight_update"))
    engine.fleet.wait(server.call("POST", "/finish_weight_update", json={"weight_version": "another"}))
    responses = list(engine.generate([np.array([1, 2], np.int32)], 2, SamplingParams(4), seed=0))
    assert [response.versions[0] for response in responses] == [2, 2]
    metrics = engine.fleet.report()
    assert metrics["rollout/servers_brought_back"] == 1
    first = read_version(min(engine.files.root.glob("v*")))
    assert metrics["publish/pulled_bytes"] > first.num_bytes(first.dense)
    assert_bits(engine, bfloat16, params)


@pytest.mark.harness
def test_an_unreachable_source_is_said_at_the_handshake(bfloat16, monkeypatch):
    nowhere = property(lambda self: "http://127.0.0.1:9", lambda *_: None)
    monkeypatch.setattr("rljax.weights.store.WeightDirectory.source", nowhere, raising=False)
    with pytest.raises(HandshakeError, match=r"the server's machine cannot read weights from http://127.0.0.1:9"):
        bfloat16.engine(publish=PublishConfig(store="http"))


@pytest.mark.harness
def test_what_a_server_samples_from_is_not_the_mirror(bfloat16, pulling):
    """A version is pulled and not loaded. The mirror has changed in place, but the server's weights have not."""
    engine = pulling(bfloat16)
    moved = bfloat16.model.moved(7)
    tensors = bfloat16.model.tensors("bfloat16")
    version = engine.files.write(tensors(moved), 1, bfloat16.model.checksums("bfloat16")(moved))
    engine.fleet.wait(engine.fleet.server(bfloat16.url).pull(version))
    assert_bits(engine, bfloat16, moved)
    band = engine.verifier.band
    assert check_use(engine, bfloat16.url, bfloat16.model.params).mean < band
    engine.publish(moved, 2)
    assert check_use(engine, bfloat16.url, moved).mean < band
