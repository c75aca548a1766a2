"""What of a ``config.json`` the policy refuses, and what it reads as nothing given."""

import pytest

from rljax.policy.config import PolicyConfig, config_from_hf, config_to_hf

POLICY = PolicyConfig(32, 32, 64, 3, 4, 2, 8, eos_token_id=(3, 4))
RAW = config_to_hf(POLICY, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'qwen3', got 'llama'"),
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


@pytest.mark.parametrize("key", ["attention_bias", "use_sliding_window", "hidden_act", "quantization_config"])
def test_a_feature_that_is_not_given_is_not_there(key):
    left_out = {name: value for name, value in RAW.items() if name != key}
    assert config_from_hf(left_out | {"eos_token_id": [3, 4]}) == config_from_hf(RAW | {key: None}) == POLICY
