"""A server's plugin describes its model: the LM head, rotary settings and recurrent state."""

import types

import pytest

from rljax.rollout.servers.handshake import Expectation, state_differences
from rljax.rollout.servers.loaded import ModelTensors, described_shape, has_tied_head
from rljax.rollout.types import RolloutConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TEXT = transformers.Qwen3Config(tie_word_embeddings=False)  # what vLLM leaves where the files repeat the head


def language_model(head, table):
    model = torch.nn.Module()
    model.lm_head, model.model = head, torch.nn.Module()
    model.model.embed_tokens = table
    return model


def test_a_head_is_tied_if_it_has_the_parameter_of_the_table():
    head, table = torch.nn.Embedding(5, 3), torch.nn.Embedding(5, 3)
    head.weight.data.copy_(table.weight.data)
    assert not has_tied_head(language_model(head, table), TEXT)  # equal numbers alone are not the same parameter
    assert has_tied_head(language_model(table, table), TEXT)
    head.weight = table.weight
    assert has_tied_head(language_model(head, table), TEXT)


@pytest.mark.parametrize("tied", [True, False])
def test_a_worker_that_lacks_one_of_both_asks_the_configuration(tied):
    text, table = transformers.Qwen3Config(tie_word_embeddings=tied), torch.nn.Embedding(5, 3)
    for model in (language_model(torch.nn.Identity(), table), language_model(table, torch.nn.Identity())):
        assert has_tied_head(model, text) == tied
    assert has_tied_head(torch.nn.Identity(), text) == tied


OLD = {"rope_theta": 3e5, "rope_parameters": None}  # a configuration of transformers before version 5
PLAIN = {"rope_type": "default", "rope_theta": 3e5}
LINEAR = {"rope_type": "linear", "rope_theta": 3e5, "factor": 2.0}
OF_IMAGES = PLAIN | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
DUAL = {"dual_chunk_attention_config": {"chunk_size": 8}}


@pytest.mark.parametrize(
    ("settings", "described"),
    [
        (PLAIN, PLAIN),
        ({"rope_theta": 3e5, "type": "default"}, PLAIN),
        ({"rope_theta": 3e5, "partial_rotary_factor": 1.0}, PLAIN),
        ({"rope_theta": 3e5, "partial_rotary_factor": 0.5}, PLAIN | {"partial_rotary_factor": 0.5}),
        (LINEAR, LINEAR),
        (OLD, PLAIN),
        (OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}}, LINEAR),
        (OLD | DUAL, PLAIN | DUAL),
        (OF_IMAGES, OF_IMAGES),
        ({"rope_parameters": OF_IMAGES, "linear_num_key_heads": 16}, PLAIN),  # Qwen3.5, as it is published
    ],
)
def test_rotary_settings_that_change_an_angle_are_described(settings, described):
    old = "rope_parameters" in settings
    text = types.SimpleNamespace(**TEXT.to_dict() | (settings if old else {"rope_parameters": settings}))
    assert described_shape(text, 128, tied=False)["rope_parameters"] == described


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"state_dtype": None, "platform": "cpu", "dtype": "float32"}, []),  # a model without linear attention
        ({"state_dtype": "float32", "state_cache": "none", "platform": "cpu", "dtype": "bfloat16"}, []),
        ({"state_dtype": "float32", "state_cache": "align", "platform": "cuda", "dtype": "float32"}, []),
        (
            {"state_dtype": "bfloat16", "state_cache": "none", "platform": "cuda", "dtype": "bfloat16"},
            ["is bfloat16, expected float32 (mamba_ssm_dtype): start the server with --mamba-ssm-cache-dtype float32"],
        ),
        (
            {"state_dtype": "float32", "state_cache": "align", "platform": "cpu", "dtype": "float32"},
            ["set rollout.dtype = bfloat16", "start the server with --no-enable-prefix-caching"],
        ),
    ],
)
def test_the_state_of_linear_attention_is_compared(described, said):
    expected = Expectation(RolloutConfig(), {"hidden_size": 64}, 32)
    lines = state_differences(described, expected)
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


def test_a_fused_layer_may_have_more_sizes_than_tensors():
    """``in_proj_qkvz`` holds q, k and v in its first tensor, and z in its second one."""
    model = torch.nn.Module()
    model.in_proj_qkvz = torch.nn.Linear(3, 10, bias=False)
    model.in_proj_qkvz.output_partition_sizes = [2, 2, 3, 3]
    fused = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}
    found = dict(ModelTensors(model, fused).of_model())
    assert {name: len(tensor) for name, tensor in found.items()} == {"in_proj_qkv.weight": 7, "in_proj_z.weight": 3}
