"""Tests of a ``config.json``: settings that the policy refuses, and values that count as not given."""

import dataclasses
import json

import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_from_hf, config_to_hf, read_config

POLICY = PolicyConfig(32, 32, 64, 3, 4, 2, 8, eos_token_id=(3, 4))
RAW = config_to_hf(POLICY, "float32")

UNREAD = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}}
FULL = ["full_attention"] * 3
SIZES_OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
# Sliding windows that have a layer, or may have one.
WINDOWS = [{}, *({"max_window_layers": first} for first in (2, None, "9"))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model_type must be one of .*qwen3.*, got 'gemma'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = .*'sliding_at.* must repeat"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        *(({"use_sliding_window": True} | window, "use_sliding_window = True is not supported") for window in WINDOWS),
        ({"rope_parameters": {"type": "dynamic", "factor": 2.0}}, "rope_parameters: rope_type .*is not supported"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling: factor .*is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7e5}}}, "rope_parameters: full_attention .*is not supp"),
        ({"rope_scaling": ["yarn"]}, r"rope_scaling must be an object, got \['yarn'\]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta cannot be 0"),
        (UNREAD | {"rope_theta": None}, "rope_theta = 1000000.0 in rope_parameters is not read: give it in rope_sca"),
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


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_the_base_of_the_angles_is_transformers(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    for change in (
        {"rope_scaling": {}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 12_345.0}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"type": "default"}, "rope_theta": 3e5},
        {"rope_parameters": {"rope_theta": 12_345, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e5},
        {"rope_parameters": None, "rope_theta": None},
        {"rope_parameters": None, "rope_theta": 3e5},
        {"rope_parameters": None, "rope_theta": 3e5, "rope_scaling": {"rope_theta": 4e5}},
    ):
        raw = {name: value for name, value in (RAW | {"model_type": family} | change).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(SIZES_OF_EXPERTS | raw))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
        assert (theirs["rope_type"], theirs["rope_theta"]) == ("default", read_config(tmp_path).rope_theta), change


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_covers_no_layer_is_none(family, tmp_path):
    """For a mixture transformers reads no layers: every layer has the window."""
    transformers, window = pytest.importorskip("transformers"), {"use_sliding_window": True, "sliding_window": 8}
    for none in ({"max_window_layers": 3}, {"max_window_layers": 28}, {"sliding_window": None}, {"layer_types": FULL}):
        raw = RAW | window | {"model_type": family, "max_window_layers": 0} | none
        assert config_from_hf(raw) == dataclasses.replace(POLICY, family=family)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert transformers.AutoConfig.from_pretrained(tmp_path).layer_types == FULL
    mixture = SIZES_OF_EXPERTS | RAW | window | {"model_type": "qwen3_moe"}
    for none in ({"max_window_layers": 28}, {"layer_types": FULL}):
        with pytest.raises(ValueError, match="use_sliding_window = True is not supported by the qwen3_moe"):
            config_from_hf(mixture | none)
    assert config_from_hf(mixture | {"sliding_window": None}).family == "qwen3_moe"


def test_values_that_change_nothing_are_read():
    for key in ("attention_bias", "use_sliding_window", "hidden_act", "quantization_config"):
        left_out = {name: value for name, value in RAW.items() if name != key}
        assert config_from_hf(left_out) == config_from_hf(RAW | {key: None}) == POLICY
    llama = dataclasses.replace(POLICY, family="llama", eos_token_id=None)
    nothing = {"pretraining_tp": 2, "pad_token_id": -1, "bos_token_id": -1, "eos_token_id": -1}
    assert config_from_hf(config_to_hf(llama, "float32") | nothing) == llama


def test_stop_tokens_are_those_of_both_files(tmp_path):
    for config, generation, stops in (
        (14, [14, 13], (14, 13)),
        ([14, 12], 14, (14, 12)),
        (None, [13], (13,)),
        (14, None, (14,)),
        (14, [], (14,)),
        (14, [13, 13, 32], (14, 13)),  # the vocabulary has 32 tokens
    ):
        (tmp_path / "config.json").write_text(json.dumps(RAW | {"eos_token_id": config}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "do_sample": True}))
        assert read_config(tmp_path).stop_token_ids == stops
        assert read_config(tmp_path).stops(9, (5, 14)) == tuple(dict.fromkeys((*stops, 5, 14)))
    for text in ('{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}', '{"eos_token_id": -1}', "{"):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"generation_config\.json: .+"):
            read_config(tmp_path)
