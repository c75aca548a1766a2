"""Each silent failure of an update must fail the verification against a real server: by its bits, or by its use."""

import contextlib
import math

import numpy as np
import pytest
from vllm_checks import OTHER_BITS, OUT_OF_BAND, adamw_step, cache_kept, check_use, rpc, sabotaged
from weight_training import change_after_writing

from rljax.errors import VerificationError
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(bfloat16):
    """Yields an engine whose band is calibrated on a sound publish of version 0."""
    with bfloat16.published() as made:
        yield made


FUSED = "skip", "model.layers.0.self_attn.k_proj.weight", r"1 tensor differs: \S+k_proj.weight \(other bits\)$"


@pytest.mark.parametrize(
    ("how", "of", "said"),
    [
        ("skip", "model.layers.1.mlp.down_proj.weight", r"1 tensor differs: \S+down_proj.weight \(not loaded\)$"),
        pytest.param(*FUSED, marks=pytest.mark.harness),
        pytest.param("through", "float16", r"\d+ tensors differ", marks=pytest.mark.harness),
    ],
)
def test_a_step_at_the_papers_rate_that_goes_wrong_in_a_worker(bfloat16, engine, how, of, said):
    """Such a step moves log-probabilities less than the band, so only the bits show its failure."""
    stepped = adamw_step(bfloat16.model.params, seed=11)
    with sabotaged(bfloat16, "load", how, of):
        with pytest.raises(VerificationError, match=f"{OTHER_BITS}: {said}"):
            engine.publish(stepped, 1)
        assert 0.001 < engine.version.changed_fraction < 0.05
    if "k_proj" not in of:  # a skipped part of a fused tensor holds whatever the memory held before
        assert check_use(engine, bfloat16.url, stepped).mean < engine.verifier.band
    with pytest.raises(RuntimeError, match="hold no verified policy"):
        engine.generate([np.array([1, 2], np.int32)], 1, SamplingParams(1), seed=0)
    engine.fleet.wait(
        VllmBackend().push(engine.fleet.server(bfloat16.url), engine.version)
    )  # no probe is sent to such weights
    metrics = engine.publish(stepped, 2)
    assert metrics["publish/verified_tensors"] == 24
    assert metrics["time/server_checksums_s"] > 0


def test_tied_head_not_repacked(bfloat16, engine):
    with sabotaged(bfloat16, "tied_head", "on"):
        with pytest.raises(VerificationError, match=rf"{OTHER_BITS}: .*: lm_head.weight \(not loaded\)"):
            engine.publish(bfloat16.model.moved(1), 1)
        # On some processors the head has a copy of its own. Then its use shows the old weights, too.
        is_stale = rpc(bfloat16, "head_is_stale")[0]["stale"]
        with pytest.raises(VerificationError, match=OUT_OF_BAND) if is_stale else contextlib.nullcontext():
            check_use(engine, engine.fleet.urls[0], bfloat16.model.moved(1))
    engine.publish(bfloat16.model.moved(1), 2)


def test_old_cache_and_nan_weights(float32):
    """NaN in the cache would spoil the sound weights that follow. An update fails if the cache is not reset."""
    params = float32.model.params
    broken = {**params, "embed": params["embed"].at[200, 17].set(math.nan)}
    with float32.published() as engine:
        with pytest.raises(RuntimeError, match=r"'model.embed_tokens.weight' holds values that are not finite"):
            engine.publish(broken, 1)
        with cache_kept(engine), pytest.raises(VerificationError, match=OUT_OF_BAND):
            engine.publish(float32.model.moved(2), 2)
        engine.publish(float32.model.moved(2), 3)


@pytest.mark.harness  # the suite has a tensor that the worker does not load
def test_one_tensor_left_out(bfloat16, engine, monkeypatch):
    omit = ["model.layers.1.mlp.down_proj.weight"]
    change_after_writing(monkeypatch, lambda name, array: None if name in omit else array)
    with pytest.raises(VerificationError, match=rf"{OTHER_BITS}: 1 tensor differs: {omit[0]} \(not loaded\)"):
        engine.publish(bfloat16.model.moved(3), 1)
    with pytest.raises(VerificationError, match=OUT_OF_BAND):
        check_use(engine, engine.fleet.urls[0], bfloat16.model.moved(3))
    omit.clear()
    engine.publish(bfloat16.model.moved(3), 2)
