"""Trainer and real server must agree. Each disagreement is one clear line."""

import json

import jax
import jax.numpy as jnp
import pytest
from vllm_checks import sabotaged

from rljax.errors import HandshakeError
from rljax.policy.hf import SINGLE_NAME, open_tensors
from rljax.rollout.types import SamplingParams
from rljax.weights.store import WeightDirectory

pytestmark = pytest.mark.vllm


def refused(served, **changes) -> str:
    hf_config = changes.pop("hf_config", None)
    if hf_config is not None:
        changes["hf_config"] = {**served.model.hf_config, **hf_config}
    with pytest.raises(HandshakeError) as caught:
        served.engine(**changes)
    message = str(caught.value)
    assert all(line.startswith(served.url) for line in message.splitlines())
    return message.replace(f"{served.url}: ", "")


OPTION = '--head-dtype float32, which is vLLM\'s --hf-overrides \'{"head_dtype": "float32"}\''


def test_head_dtype(bfloat16, prompts):
    """The blocks add nothing, so only the heads can differ. In float32 the server's head is the trainer's."""
    served, params = bfloat16, bfloat16.model.params
    flat = {**params, "layers": jax.tree.map(jnp.zeros_like, params["layers"])}

    def largest_gap(head_dtype):
        with served.published(flat, head_dtype=head_dtype) as engine:
            return served.gaps(flat, list(engine.generate(prompts, 4, SamplingParams(24), seed=0))).max()

    where = "(precision.lm_head_dtype): start"
    line = f"the LM head computes in {served.dtype}, expected float32 {where} with {OPTION}"
    assert refused(served, head_dtype="float32") == line
    rounded = largest_gap(served.dtype)
    with sabotaged(served, "head_dtype", "float32"):
        line = f"the LM head computes in float32, expected {served.dtype} {where} without {OPTION}"
        assert refused(served, head_dtype=served.dtype) == line
        upcast = largest_gap("float32")
    assert upcast < 1e-5
    assert rounded > 1e-3


def test_what_does_not_fit_is_a_line_each(bfloat16):
    """The files in bfloat16 repeat a tied head, for which vLLM's own configuration says untied."""
    line = refused(bfloat16, max_tokens=513)
    assert line == "max_model_len is 512, expected at least 513 for prompt plus response"
    assert refused(bfloat16, hf_config={"vocab_size": 257}) == "vocab_size is 256, expected 257 (another model)"
    lines = refused(bfloat16, hf_config={"num_hidden_layers": 3, "tie_word_embeddings": False}).splitlines()
    assert lines == [
        "num_hidden_layers is 2, expected 3 (another model)",
        "tie_word_embeddings is True, expected False (another model)",
    ]
    assert "lm_head.weight" in open_tensors(bfloat16.model.path / SINGLE_NAME)


def test_faults_in_the_worker_are_seen(float32, monkeypatch):
    """The probe file proves that both see one directory. Here the trainer claims another text than the server reads."""
    plain = float32.model.hf_config["rope_parameters"]
    changed = {"rope_type": "default"} | plain | {"rope_type": "yarn", "factor": 1.5}
    with sabotaged(float32, "rope", json.dumps(changed), undo=(json.dumps(plain),)):
        assert refused(float32) == f"rope_parameters is {changed}, expected {plain} (another model)"
    with sabotaged(float32, "logprobs_mode", "raw_logprobs"):
        assert "start with --logprobs-mode processed_logprobs" in refused(float32)
    float32.engine().close()
    sound = WeightDirectory.probe
    monkeypatch.setattr(WeightDirectory, "probe", lambda self: (sound(self)[0].with_name("elsewhere.txt"), "x"))
    assert "set transfer_dir to one that both see" in refused(float32)
