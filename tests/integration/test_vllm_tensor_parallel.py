"""A real server has two tensor-parallel workers: their parts add up to whole tensors, and a stale worker is seen."""

import numpy as np
import pytest
from vllm_checks import OTHER_BITS, adamw_step, rpc, sabotaged

from rljax.compare.layers.differences import compare_layers
from rljax.compare.layers.findings import judge_layers
from rljax.compare.layers.tracers import open_tracer
from rljax.errors import VerificationError
from rljax.rollout.types import SamplingParams
from rljax.weights.publish_config import PublishConfig
from tests.integration.conftest import Served

pytestmark = [pytest.mark.vllm, pytest.mark.processes]


@pytest.fixture(scope="module")
def two_workers(servers, make_model, start_server):
    servers.stop()
    model = make_model(False)
    with start_server(model, "bfloat16", workers=2) as server:
        yield Served(server, model, "bfloat16")


def places(served):
    """Returns the places at which the server and transformers part, over 60 tokens."""
    tokens = np.random.default_rng(0).integers(2, 250, 60).astype(np.int32)
    spec, directory = "hf:bfloat16,attention=eager", served.model.path
    with open_tracer(spec, directory) as reference, open_tracer(f"vllm:{served.url}", None) as tested:
        comparison = compare_layers(reference, tested, tokens, 0)
    assert len(comparison.differences) == 2 * 17 + 3
    return {finding.place for finding in judge_layers(comparison).findings}


def test_the_parts_of_operations_are_joined(two_workers):
    """Only the sums over the workers differ, which travel in bfloat16, until a fault is planted in both workers."""
    sums = {"every layer, output projection", "every layer, down projection"}
    assert places(two_workers) == sums
    with sabotaged(two_workers, "layers", "projection"):
        assert places(two_workers) == sums | {"layer 1, key projection"}


@pytest.mark.parametrize("store", ["shared", pytest.param("directory", marks=pytest.mark.harness)])
def test_parts_of_two_workers_add_up_and_a_stale_one_is_caught(two_workers, tmp_path, store):
    """The workers load the files, or share a mirror, into which one of them pulls."""
    engine = two_workers.engine(publish=PublishConfig(store=store), transfer_dir=str(tmp_path))
    rpc(two_workers, "sabotage_load", "off", "")
    try:
        params = two_workers.model.params
        for version in range(2):
            params = adamw_step(params, seed=version)
            metrics = engine.publish(params, version)
            assert metrics["publish/verified_tensors"] == 25
            assert "rollout/servers_brought_back" not in metrics
        responses = list(engine.generate([np.array([1, 2], np.int32)], 2, SamplingParams(4), seed=0))
        assert {response.versions[0] for response in responses} == {1}
        assert len(rpc(two_workers, "rljax_checksums")) == 2
        # The second worker loads the tensors of its last load again. The first worker loads the new ones.
        rpc(two_workers, "sabotage_load_of", "1", "previous", "")
        params = adamw_step(params, seed=2)
        with pytest.raises(VerificationError, match=OTHER_BITS):
            engine.publish(params, 2)
        rpc(two_workers, "sabotage_load", "off", "")
        assert engine.publish(params, 3)["publish/verified_tensors"] == 25
    finally:
        rpc(two_workers, "sabotage_load", "off", "")
        engine.close()
