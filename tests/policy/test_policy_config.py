"""Tests of a ``config.json``: settings that the policy refuses, and values that count as not given."""

import json

import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_from_hf, config_to_hf, read_config

POLICY = PolicyConfig(32, 32, 64, 3, 4, 2, 8, eos_token_id=(3, 4))
RAW = config_to_hf(POLICY, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type must be one of .*qwen3.*, got 'llama'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn' is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type = 'linear' is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config = {'bits': 4} is not supported"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"num_hidden_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4"),
    ],
)
def test_what_the_policy_does_not_compute_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(RAW | change)


def test_a_qwen2_whose_heads_vllm_would_read_otherwise_is_named():
    raw = config_to_hf(PolicyConfig(32, 32, 64, 3, 4, 2, 8, family="qwen2"), "float32")
    assert config_from_hf({name: value for name, value in raw.items() if name != "head_dim"}).head_dim == 8
    with pytest.raises(ValueError, match="head_dim of a qwen2 must be hidden_size / num_heads, got 16"):
        config_from_hf(raw | {"head_dim": 16})


def test_sliding_layers_are_named():
    with pytest.raises(ValueError, match=r"layer_types = .*'sliding_attention'.* is not supported"):
        config_from_hf(RAW | {"layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize("key", ["attention_bias", "use_sliding_window", "hidden_act", "quantization_config"])
def test_a_feature_that_is_not_given_is_not_there(key):
    left_out = {name: value for name, value in RAW.items() if name != key}
    assert config_from_hf(left_out | {"eos_token_id": [3, 4]}) == config_from_hf(RAW | {key: None}) == POLICY


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        (14, [14, 13], (14, 13)),
        (14, 13, (14, 13)),
        ([14, 12], 14, (14, 12)),
        (None, [13], (13,)),
        (14, None, (14,)),
        (14, [], (14,)),
        (14, [13, 13, 32], (14, 13)),  # the vocabulary has 32 tokens
    ],
)
def test_stop_tokens_are_those_of_both_files(config, generation, stops, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "do_sample": True}))
    assert read_config(tmp_path).stop_token_ids == stops
    assert read_config(tmp_path).stops(9, (5, 14)) == tuple(dict.fromkeys((*stops, 5, 14)))


@pytest.mark.parametrize("text", ['{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}', '{"eos_token_id": -1}', "{"])
def test_a_generation_config_that_cannot_be_read_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json: .+"):
        read_config(tmp_path)
