"""The frequencies of scaled rotary embeddings are those of transformers and vLLM, and other settings are named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers_models import ROPES, transformers

from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_from_hf, config_to_hf
from rljax.policy.rotary import RopeScaling, described_rope, frequencies, read_rope

YARN = {"rope_type": "yarn", "factor": 4.0}
RAW = config_to_hf(PolicyConfig(32, 32, 64, 3, 4, 2, 8, family="llama"), "float32")
FACTOR, LENGTH = {"factor": st.floats(1.0, 64.0)}, {"original_max_position_embeddings": st.integers(2, 131_072)}
BANDS = {"low_freq_factor": st.floats(0.1, 2.0), "high_freq_factor": st.floats(2.1, 64.0)}
OF_YARN = {
    **{"attention_factor": st.floats(0.5, 2.0), "beta_fast": st.floats(4.0, 64.0), "beta_slow": st.floats(0.5, 4.0)},
    **{"truncate": st.booleans(), "mscale": st.floats(0.1, 2.0), "mscale_all_dim": st.floats(0.1, 2.0)},
}
SCALINGS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear")} | FACTOR),
    st.fixed_dictionaries({"rope_type": st.just("llama3")} | FACTOR | LENGTH | BANDS),
    st.fixed_dictionaries({"rope_type": st.just("yarn")} | FACTOR | LENGTH, optional=OF_YARN),
)


@settings(max_examples=150, deadline=None)
@given(SCALINGS, st.sampled_from([1e4, 5e5, 1e6]), st.sampled_from([8, 64, 128]))
def test_frequencies_are_those_of_transformers(rope, theta, head_dim):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, sizes = read_rope(rope, 2048), {"hidden_size": head_dim, "num_attention_heads": 1, "head_dim": head_dim}
    config = transformers.LlamaConfig(**sizes, rope_parameters={**rope, "rope_theta": theta})
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    np.testing.assert_allclose(frequencies(head_dim, theta, scaling), expected.numpy(), rtol=2e-6)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("rope", ROPES)
def test_a_config_keeps_its_scaling(rope):
    raw = {key: value for key, value in RAW.items() if key != "rope_parameters"} | {"rope_theta": 3e4}
    config = config_from_hf(raw | {"rope_scaling": rope})
    assert config_from_hf(raw | {"rope_parameters": rope}) == config
    assert (config.rope_scaling, config.rope_theta) == (read_rope(rope, 0), 3e4)
    written = config_to_hf(config, "float32")
    assert config_from_hf(written) == config
    assert read_rope(written["rope_parameters"], 0) == config.rope_scaling
    assert "rope_theta" not in written["rope_scaling"]


def test_an_embedding_without_a_length_has_the_models():
    """A second one is refused: transformers computes with the file's own key, and vLLM with that of the embedding."""
    raw = RAW | {"rope_scaling": YARN, "max_position_embeddings": 400}
    theirs = transformers.LlamaConfig.from_dict(raw).rope_parameters["original_max_position_embeddings"]
    assert config_from_hf(raw).rope_scaling.original_length == theirs == 400
    raw = RAW | {"rope_scaling": {**YARN, "original_max_position_embeddings": 100}}
    assert config_from_hf(raw | {"original_max_position_embeddings": 100}).rope_scaling.original_length == 100
    with pytest.raises(ValueError, match="is 200 in the file and 100 in the rotary settings"):
        config_from_hf(raw | {"original_max_position_embeddings": 200})


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"'dynamic' is not supported \(its angles depend on the other"),
        ({"rope_type": "yarn"}, "'yarn' has no factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' has no low_freq_factor"),
        ({**YARN, "factor": 0.5}, "factor must be at least 1, got 0.5"),
        ({**YARN, "factor": "4"}, "factor cannot be '4'"),
        ({**YARN, "factor": -1.0}, "factor cannot be -1.0"),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": -20.0}, "mscale_all_dim cannot be -20.0"),
        ({**YARN, "truncate": 1}, "truncate cannot be 1"),
        ({**YARN, "beta_slow": 0}, "beta_slow must be positive and at most beta_fast, got 0"),
        ({**YARN, "attention_factor": 0.0}, "attention_factor must be positive, got 0.0"),
        ({**YARN, "original_max_position_embeddings": 10.5}, "original_max_position_embeddings cannot be 10.5"),
        ({**YARN, "attn_factor": 0.9}, "attn_factor = 0.9 is not supported with rope_type = 'yarn'"),
        ({**YARN, "type": "linear"}, "type = 'linear' is not supported with rope_type = 'yarn'"),
        ({**YARN, "mrope_section": [1, 2]}, r"mrope_section = \[1, 2\] is not supported"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast = 3.0 is not supported with"),
    ],
)
def test_what_is_not_computed_is_named(rope, said):
    with pytest.raises(ValueError, match=f"^rope_scaling: .*{said}"):
        config_from_hf(RAW | {"rope_scaling": rope})


def test_two_different_embeddings_are_refused():
    raw = RAW | {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8.0}}
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling differ"):
        config_from_hf(raw)
    same = config_from_hf(raw | {"rope_parameters": YARN})
    assert same.rope_scaling == read_rope(YARN, same.max_position_embeddings)


def test_a_plain_embedding_has_no_scaling():
    assert read_rope({"rope_type": "default", "rope_theta": 5.0, "factor": None}, 7) is None
    assert described_rope(5.0, None) == {"rope_type": "default", "rope_theta": 5.0}
    assert described_rope(5.0, RopeScaling("linear", 2.0)) == {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}
