"""A server's plugin describes its model: the state of the LM head, and the rotary settings."""

import types

import pytest

from rljax.rollout.servers.loaded import described_shape, has_tied_head

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


@pytest.mark.parametrize(
    ("settings", "described"),
    [
        ({"rope_type": "default", "rope_theta": 3e5}, {"rope_type": "default", "rope_theta": 3e5}),
        ({"rope_theta": 3e5, "type": "default"}, {"rope_type": "default", "rope_theta": 3e5}),
        ({"rope_theta": 3e5, "partial_rotary_factor": 1.0}, {"rope_type": "default", "rope_theta": 3e5}),
        (
            {"rope_theta": 3e5, "partial_rotary_factor": 0.5},
            {"rope_type": "default", "rope_theta": 3e5, "partial_rotary_factor": 0.5},
        ),
        (
            {"rope_type": "linear", "rope_theta": 3e5, "factor": 2.0},
            {"rope_type": "linear", "rope_theta": 3e5, "factor": 2.0},
        ),
        (OLD, {"rope_type": "default", "rope_theta": 3e5}),
        (
            OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 3e5, "factor": 2.0},
        ),
        (
            OLD | {"dual_chunk_attention_config": {"chunk_size": 8}},
            {"rope_type": "default", "rope_theta": 3e5, "dual_chunk_attention_config": {"chunk_size": 8}},
        ),
    ],
)
def test_rotary_settings_that_change_an_angle_are_described(settings, described):
    old = "rope_parameters" in settings
    text = types.SimpleNamespace(**TEXT.to_dict() | (settings if old else {"rope_parameters": settings}))
    assert described_shape(text, 128, tied=False)["rope_parameters"] == described
