"""Qwen3.5, whose layers are mostly linear attention, in a real vLLM server. transformers stands in for the trainer."""

import json
from contextlib import closing
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from stopping import StopWhen
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from vllm_checks import rpc

from rljax.errors import HandshakeError, VerificationError
from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import VllmConfig
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.weights.sums import array_checksum

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.harness]
PROMPT = 200  # tokens; a seeded prompt above 128 tokens ends the engine of a CPU that computes it in parts


def torch_model(*, tied: bool) -> Qwen3_5ForCausalLM:
    """Returns a random model of three linear layers and one of attention, whose heads forget slowly."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128,
        linear_value_head_dim=128, max_position_embeddings=1024, tie_word_embeddings=tied, bos_token_id=None,
        eos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    config.mamba_ssm_dtype = "float32"
    model = Qwen3_5ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(np.log(1e-4), np.log(1e-2))
        elif parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.to(torch.bfloat16)


def moved(model: Qwen3_5ForCausalLM) -> Qwen3_5ForCausalLM:
    """Moves all tensors of a model by a third of their spread, in place."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        step = 0.3 * max(float(parameter.detach().float().std(correction=0)), 0.1)
        parameter.data.add_(step * torch.randn(parameter.shape, dtype=torch.bfloat16))
    return model


def tensors(model):
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            yield name, tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def score(model, sequences):
    with torch.no_grad():
        for ids in sequences:
            logits = model(torch.tensor(np.asarray(ids)[None], dtype=torch.long)).logits[0].float()
            found = torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(ids[1:], dtype=torch.long)[:, None])
            yield np.concatenate([[0], found[:, 0].numpy()]).astype(np.float32)


FUNCTIONS = PolicyFunctions(
    tensors,
    lambda model: {name: array_checksum(array) for name, array in tensors(model)},
    lambda model, sequences: list(score(model, sequences)),
)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def hybrid(request, start_server, tmp_path_factory):
    """Returns a running server, and the configuration and the path of its model."""
    path = tmp_path_factory.mktemp("hybrid")
    torch_model(tied=request.param).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())

    server = start_server(SimpleNamespace(path=path), "bfloat16")
    yield server, config, path
    server.stop()


def engine(server, config, **settings):
    settings = {"dtype": "bfloat16", **settings}
    rollout = RolloutConfig(engine="vllm", urls=(server.url,), **settings)
    stop = StopWhen(lambda: not server.alive())
    return ServedEngine(rollout, VllmBackend(), FUNCTIONS, hf_config=config, max_tokens=512, stop=stop)


def test_all_tensors_are_replaced_and_proven(hybrid):
    server, config, path = hybrid
    model = Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    prompts = [np.random.default_rng(i).integers(2, 256, PROMPT).astype(np.int32) for i in range(4)]
    with closing(engine(server, config)) as served:
        for version, weights in enumerate([model, moved(model)]):
            proven = served.publish(weights, version)["publish/verified_tensors"]
            responses = list(served.generate(prompts, 2, SamplingParams(32), seed=0))
            scored = score(weights, [r.ids for r in responses])
            gaps = [np.abs(s[PROMPT:] - r["rollout_logprobs"]) for s, r in zip(scored, responses, strict=True)]
            names = {name for name, _ in tensors(weights)}
            assert proven == len(names)
            assert {name.rpartition("linear_attn.")[2] for name in names if "layers.0.linear_attn" in name} == {
                "A_log", "dt_bias", "conv1d.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight",
                "in_proj_a.weight", "norm.weight", "out_proj.weight",
            }  # fmt: skip
            assert np.concatenate(gaps).mean() < 0.05


@pytest.mark.parametrize("name", ["A_log", "conv1d.weight", "in_proj_z.weight"])
def test_a_dropped_tensor_is_refused(hybrid, name):
    server, config, path = hybrid
    model = Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with closing(engine(server, config)) as served:
        served.publish(model, 0)
        rpc(server, "sabotage_load", "skip", f"model.layers.1.linear_attn.{name}")
        with pytest.raises(VerificationError, match=rf"1 tensor differs: model.layers.1.linear_attn.{name} "):
            served.publish(moved(model), 1)
        rpc(server, "sabotage_load", "off", "")


def test_another_state_dtype_or_size_is_refused(hybrid):
    server, config, _ = hybrid
    other = config | {"mamba_ssm_dtype": "bfloat16", "linear_num_value_heads": 2}
    with pytest.raises(HandshakeError) as error:
        engine(server, other)
    assert "the state of linear attention is float32, expected bfloat16 (mamba_ssm_dtype): start" in str(error.value)
    assert "linear_num_value_heads is 4, expected 2 (another model)" in str(error.value)


def test_a_cpu_has_no_prefix_cache_of_a_hybrid(tmp_path):
    torch_model(tied=True).save_pretrained(tmp_path)
    config = VllmConfig(str(tmp_path))
    assert "--no-enable-prefix-caching" in config.command(1, gpu=False)
    assert "--enable-prefix-caching" in config.command(1, gpu=True)
