"""Another forward of this library finds faults planted into its forward, at their places."""

import numpy as np
import pytest

pytest.importorskip("transformers")

from planted_in_jax import faulty
from planted_layers import FAULTS
from transformers_models import hf_model

from rljax.compare.layers.differences import compare_layers
from rljax.compare.layers.findings import judge_layers
from rljax.compare.layers.jax_tracer import JaxForm, JaxTracer

SHAPE = (64, 64, 128, 2, 4, 2, 32, True, 10_000.0)
TOKENS = np.random.default_rng(0).integers(2, 62, 48).astype(np.int32)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def reference(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf_model(SHAPE).save_pretrained(path)
    return JaxTracer(path, JaxForm(request.param, logits=request.param), "jax")


# test_compare_layers plants a sum over devices in a lower precision.
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "sum"])
def test_a_fault_in_this_library_is_found(reference, tmp_path, fault):
    tested = faulty(fault, SHAPE, tmp_path, reference.dtype)
    verdict = judge_layers(compare_layers(reference, tested, TOKENS, 0))
    assert not verdict.passed
    places = {finding.place for finding in verdict.findings}
    assert FAULTS[fault][1] in places, verdict.sentence
    # The eps belongs to all norms, and the fault "no norms" removes the norm of queries and the norm of keys.
    assert len(places) <= {"eps": 6, "no norms": 2, "stale": 1}.get(fault, 2), places
