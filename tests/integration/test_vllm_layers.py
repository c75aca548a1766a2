"""The comparison finds the layer and operation at which a running vLLM, with planted faults, and a reference part."""

import numpy as np
import pytest
from planted_layers import FAULTS
from vllm_checks import rpc, sabotaged

from rljax.compare.layers.differences import compare_layers
from rljax.compare.layers.findings import judge_layers
from rljax.compare.layers.tracers import open_tracer
from rljax.policy.hf import save_params

pytestmark = [pytest.mark.vllm, pytest.mark.harness]
DTYPES = pytest.mark.parametrize("served", ["bfloat16", "float32"], indirect=True)
TOKENS = np.random.default_rng(0).integers(2, 250, 60).astype(np.int32)


def judged(served, spec, directory=None, effects=0):
    at = directory or served.model.path
    with open_tracer(spec, at) as reference, open_tracer(f"vllm:{served.url}", None) as tested:
        comparison = compare_layers(reference, tested, TOKENS, effects)
    return comparison, judge_layers(comparison)


def restore(served):
    """Publishes the policy that the server was started from. An earlier test may have published another one."""
    with served.published():
        pass


@DTYPES
def test_a_sound_server_is_rounding_evenly(served):
    restore(served)
    for spec in (f"hf:{served.dtype},attention=eager", f"jax:{served.dtype},logits={served.dtype}"):
        comparison, verdict = judged(served, spec, effects=2)
        assert verdict.passed, verdict.sentence
        assert verdict.sentence.endswith("rounding, evenly")
        assert len(comparison.differences) == 2 * 17 + 3
        assert comparison.logprob_mean < {"bfloat16": 5e-2, "float32": 1e-5}[served.dtype]
    assert rpc(served, "sabotage_layers", "off") == [{"hooks": 0}]


@DTYPES
def test_planted_faults_are_found_at_their_places(served, tmp_path):
    restore(served)
    wrong = {}
    for fault, (_, place) in FAULTS.items():
        if fault == "stale":
            continue
        with sabotaged(served, "layers", fault):
            _, verdict = judged(served, f"hf:{served.dtype},attention=eager")
        found = [finding.place for finding in verdict.findings]
        if place not in found or len(found) > 2:
            wrong[fault] = verdict.sentence
    params = served.model.params
    layers = part_of_layer(params["layers"], served.model.moved(1, 0.05)["layers"])
    save_params(tmp_path, params | {"layers": layers}, served.model.config)
    _, verdict = judged(served, f"hf:{served.dtype}", tmp_path)
    if not verdict.sentence.startswith("layer 1 (other weights"):
        wrong["stale"] = verdict.sentence
    assert wrong == {}


def part_of_layer(ours, theirs):
    """Returns the first tree with layer 1 of each stacked parameter taken from the second tree."""
    if isinstance(ours, dict):
        return {key: part_of_layer(ours[key], theirs[key]) for key in ours}
    return ours.at[1].set(theirs[1])
