"""A server's worker: its hooks on real torch modules, some of which force tokens, and its description of the model."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rljax.rollout.servers.handshake import Expectation, state_differences  # noqa: E402
from rljax.rollout.servers.loaded import ModelTensors, described_shape, has_tied_head  # noqa: E402
from rljax.rollout.servers.vllm.hooks import ForcedDecoding, Hooks  # noqa: E402
from rljax.rollout.servers.vllm.server import FORCED_TOKENS  # noqa: E402
from rljax.rollout.servers.vllm.taps import Taps  # noqa: E402
from rljax.rollout.types import RolloutConfig  # noqa: E402

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))


class Sampler(torch.nn.Module):
    """A sampler that draws the likeliest token of each row."""

    def forward(self, logits):
        scores, tokens = torch.log_softmax(logits, -1).max(-1, keepdim=True)
        tensors = SimpleNamespace(logprob_token_ids=tokens.clone(), logprobs=scores)
        return SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=tensors)


def worker(*given, done=(), **config):
    """Returns a worker with one request for each entry of ``given``. An entry has the tokens to force, or is None."""
    asked = [SimpleNamespace(extra_args=tokens and {FORCED_TOKENS: tokens}) for tokens in given]
    requests = {str(i): SimpleNamespace(sampling_params=each, output_token_ids=[*done]) for i, each in enumerate(asked)}
    made = ForcedDecoding()
    batch = SimpleNamespace(req_ids=list(requests))
    made.model_runner = SimpleNamespace(sampler=Sampler(), requests=requests, input_batch=batch)
    model = SimpleNamespace(enable_trace_replay=config.get("replays", False))
    made.vllm_config = SimpleNamespace(speculative_config=config.get("speculates"), model_config=model)
    return made


def drawn(made):
    output = made.model_runner.sampler(logits=LOGITS.clone())
    scores = output.logprobs_tensors
    assert output.sampled_token_ids.tolist() == scores.logprob_token_ids.tolist()
    pairs = zip(output.sampled_token_ids, scores.logprobs, strict=True)
    return [(int(token), round(float(torch.exp(score)), 4)) for (token,), (score,) in pairs]


def count(*modules):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for whole in modules for part in whole.modules())


def test_a_given_token_takes_the_place_of_the_drawn_one(caplog):
    """The hooks are there once for two clients. A token that the model lacks ends the forcing alone."""
    made = worker(None, [2, 1], done=[2])
    for _ in range(2):
        assert made.rljax_force() == {"way": "extra_args", "reason": ""}
    assert count(made.model_runner.sampler) == 2
    assert drawn(made) == [(0, 0.5), (1, 0.2)]
    made.model_runner.requests["1"].output_token_ids.append(1)
    assert drawn(made) == [(0, 0.5), (2, 0.7)]
    for tokens in ([3], [-1], ["x"]):
        caplog.clear()
        made = worker([1], tokens)
        made.rljax_force()
        assert drawn(made) == [(0, 0.5), (2, 0.7)]
        assert "ValueError" in caplog.text


def test_a_server_that_cannot_says_why():
    assert "speculation" in worker(speculates="ngram").rljax_force()["reason"]
    made = worker(replays=True)
    made.model_runner = SimpleNamespace()
    assert made.rljax_force()["way"] == "trace_decode_token_ids"
    made.vllm_config.model_config.enable_trace_replay = False
    assert "needs --enable-trace-replay" in made.rljax_force()["reason"]


# ---- Any hooks ----


def test_an_error_removes_all_hooks_and_the_forward_goes_on():
    first, second, seen = torch.nn.Identity(), torch.nn.Identity(), []
    hooks = Hooks()
    hooks.before(first, lambda args, kwargs: seen.append("before"))
    hooks.after(first, lambda args, output: 2 * output)
    hooks.after(second, lambda args, output: {}["planted"])
    hooks.after(second, lambda args, output: seen.append("after an error"))
    assert (first(torch.tensor(3.0)), count(first, second), hooks.error) == (6.0, 4, "")
    assert second(torch.tensor(3.0)) == 3.0
    assert (seen, count(first, second), hooks.error) == (["before"], 0, "KeyError: 'planted'")
    assert first(torch.tensor(3.0)) == 3.0
    hooks.remove()


def test_a_model_whose_operations_are_not_known_keeps_no_hook(tmp_path):
    """The model's embedding and block are found, but the block has no attention."""
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed_tokens, model.model.layers = torch.nn.Embedding(2, 2), torch.nn.ModuleList([torch.nn.Identity()])
    with pytest.raises(AttributeError, match="self_attn"):
        Taps(SimpleNamespace(model=model), tmp_path, "a request", 0, 1)
    assert count(model) == 0


# ---- The description ----

TEXT = transformers.Qwen3Config(tie_word_embeddings=False)  # what vLLM leaves where the files repeat the head


def language_model(head, table):
    model = torch.nn.Module()
    model.lm_head, model.model = head, torch.nn.Module()
    model.model.embed_tokens = table
    return model


def test_a_head_is_tied_if_it_has_the_parameter_of_the_table():
    """Equal numbers alone are not the same parameter. A worker that lacks one of both asks the configuration."""
    head, table = torch.nn.Embedding(5, 3), torch.nn.Embedding(5, 3)
    head.weight.data.copy_(table.weight.data)
    assert not has_tied_head(language_model(head, table), TEXT)
    assert has_tied_head(language_model(table, table), TEXT)
    head.weight = table.weight
    assert has_tied_head(language_model(head, table), TEXT)
    none = torch.nn.Identity()
    for tied in (True, False):
        text = transformers.Qwen3Config(tie_word_embeddings=tied)
        for model in (language_model(none, table), language_model(table, none), none):
            assert has_tied_head(model, text) == tied


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
    text = SimpleNamespace(**TEXT.to_dict() | (settings if old else {"rope_parameters": settings}))
    assert described_shape(text, 128, tied=False)["rope_parameters"] == described


STATE = {"state_dtype": "float32", "state_cache": "align", "platform": "cpu", "dtype": "float32"}
IN_16_BITS = {"state_dtype": "bfloat16", "state_cache": "none", "platform": "cuda", "dtype": "bfloat16"}
DTYPE = "is bfloat16, expected float32 (mamba_ssm_dtype): start the server with --mamba-ssm-cache-dtype float32"


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"state_dtype": None, "platform": "cpu", "dtype": "float32"}, []),  # a model without linear attention
        (STATE | {"state_cache": "none", "dtype": "bfloat16"}, []),
        (STATE | {"platform": "cuda"}, []),
        (IN_16_BITS, [DTYPE]),
        (STATE, ["set rollout.dtype = bfloat16", "start the server with --no-enable-prefix-caching"]),
    ],
)
def test_the_state_of_linear_attention_is_compared(described, said):
    lines = state_differences(described, Expectation(RolloutConfig(), {"hidden_size": 64}, 32))
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


def test_a_fused_layer_may_have_more_sizes_than_tensors():
    """``in_proj_qkvz`` holds q, k and v in its first tensor, and z in its second one."""
    model = torch.nn.Module()
    model.in_proj_qkvz = torch.nn.Linear(3, 10, bias=False)
    model.in_proj_qkvz.output_partition_sizes = [2, 2, 3, 3]
    found = ModelTensors(model, {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}).of_model()
    assert {name: len(tensor) for name, tensor in found} == {"in_proj_qkv.weight": 7, "in_proj_z.weight": 3}
