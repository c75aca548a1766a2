"""Adapters in PEFT's layout are compared with ``peft`` itself. The logits are the same both ways."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrids import hybrid_model
from safetensors.numpy import load, load_file, save_file
from tiny_adapters import ATTENTION, MIXTURE, random_adapters
from transformers_models import MIXTURES, SHAPES, SHAPES_QWEN2, hf_model, jax_logits, mixture, saved, torch_logits

from rljax.policy.families import read_config
from rljax.policy.hf import load_params, save_params
from rljax.policy.lora import LoraConfig, TrainedParams, merge_adapters, with_targets
from rljax.policy.model import init_params
from rljax.policy.peft import ADAPTER_CONFIG, WEIGHTS_NAME, load_adapters, save_adapters

OF_ATTENTION = LoraConfig(rank=2, targets=ATTENTION)
OF_ONE_RANK = LoraConfig(rank=1, alpha=0.75, targets=("o_proj", "gate_proj", "q_proj"))
OF_DELTA_NETS = LoraConfig(rank=2, targets=("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "up_proj"))
CASES = [
    (lambda: hf_model(SHAPES[0]), LoraConfig(rank=4)),
    pytest.param(lambda: hf_model(SHAPES[1]), OF_ONE_RANK, marks=pytest.mark.harness),
    pytest.param(lambda: hf_model(SHAPES_QWEN2[2], "Qwen2"), LoraConfig(rank=16, alpha=5.0), marks=pytest.mark.harness),
    (lambda: hf_model(SHAPES[0], "Qwen3Moe", **mixture(*MIXTURES[0])), LoraConfig(rank=3, targets=ATTENTION)),
    (hybrid_model, OF_DELTA_NETS),
]


def merged_logits(params, adapters, config, lora, tokens):
    targets = TrainedParams(config, lora).targets(params)
    merged = merge_adapters(targets, adapters, config, lora, jnp.float32)
    return jax_logits(with_targets(params, merged), config, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "lora"), CASES, ids=["qwen3-r4", "qwen3-r1", "qwen2-r16", "mixture-r3", "hybrid-r2"])
def test_logits_are_those_of_peft_both_ways(make, lora, tmp_path):
    peft = pytest.importorskip("peft")
    model = make()
    config, params = saved(model, tmp_path / "base")
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (3, 21))
    without = torch_logits(model, tokens)

    adapters = random_adapters(config, lora, 0.2)
    save_adapters(tmp_path / "ours", adapters, config, lora, tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    expected = torch_logits(theirs, tokens)
    assert np.abs(expected - without).max() > 0.05
    atol = 5e-5 if lora is OF_DELTA_NETS else 1e-5
    np.testing.assert_allclose(merged_logits(params, adapters, config, lora, tokens), expected, atol=atol, rtol=0)

    theirs.save_pretrained(tmp_path / "theirs")
    same = functools.partial(np.testing.assert_array_equal, strict=True)  # of one dtype, too
    jax.tree.map(same, load_adapters(tmp_path / "theirs", config, lora), adapters)


def test_names_of_a_model_that_reads_images_are_read(tmp_path):
    adapters = random_adapters(MIXTURE, OF_ATTENTION)
    save_adapters(tmp_path, adapters, MIXTURE, OF_ATTENTION, "base")
    assert json.loads((tmp_path / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == "base"
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    renamed = {name.replace("model.layers", "model.language_model.layers"): tensors[name] for name in tensors}
    save_file(renamed, tmp_path / WEIGHTS_NAME)
    jax.tree.map(np.testing.assert_array_equal, load_adapters(tmp_path, MIXTURE, OF_ATTENTION), adapters)


def test_a_directory_with_an_adapter_is_no_model(tmp_path):
    save_adapters(tmp_path, random_adapters(MIXTURE, OF_ATTENTION), MIXTURE, OF_ATTENTION, "some/base")
    said = f"^{tmp_path} holds an adapter, .*: set model.path to .* and lora.adapter to {tmp_path}, or move its files"
    with pytest.raises(ValueError, match=said):
        read_config(tmp_path)
    save_params(tmp_path, init_params(MIXTURE, 0), MIXTURE)
    with pytest.raises(ValueError, match=said):
        load_params(tmp_path, read_config(tmp_path))


K_A = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
BAD_CONFIGS = [
    ({"r": 8}, "r = 8, but lora.rank = 2"),
    ({"lora_alpha": 16}, "lora_alpha = 16, but lora.alpha = 4"),
    ({"use_dora": True}, "use_dora = True is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "lora_only"}, "bias = 'lora_only' is not supported"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa_niter_16'"),
    *(({"init_lora_weights": x}, f"init_lora_weights = '{x}' is not supported") for x in ("LoftQ", "corda", "lora_ga")),
    ({"init_lora_weights": ["eva"]}, "init_lora_weights = .'eva'. is not supported"),
    ({"kasa_config": {"beta": 1e-4}}, "kasa_config = .* is not supported"),
    ({"of_a_later_peft": {"k": 1}}, "of_a_later_peft = .'k': 1. is not supported"),
]
BAD_TENSORS = [
    (lambda t: t.pop(K_A), "k_proj.lora_A.weight' is missing"),
    (lambda t: t.update({K_A: t[K_A][:, 1:].copy()}), "has shape .2, 31."),
    (lambda t: t.update({"more": t[K_A]}), "'more' belongs to no layer"),
    (lambda t: t.update({K_A: t[K_A] * np.inf}), "k_proj.lora_A.weight' holds values that are NaN, infinite"),
]
BAD_FILES = [
    (ADAPTER_CONFIG, None, "adapter_config.json does not exist"),
    (WEIGHTS_NAME, None, "adapter_model.safetensors does not exist; peft's save_pretrained .* adapter_model.bin"),
    (WEIGHTS_NAME, b"x" * 40, "cannot be read"),
    (ADAPTER_CONFIG, b"[]", "expected an object, got list"),
]


def refuse(said, folder, config=MIXTURE):
    with pytest.raises(ValueError, match=said) as raised:
        load_adapters(folder, config, OF_ATTENTION)
    assert "\n" not in str(raised.value)


def test_other_adapters_are_refused(tmp_path):
    save_adapters(tmp_path, random_adapters(MIXTURE, OF_ATTENTION), MIXTURE, OF_ATTENTION, "base")
    assert jax.tree.leaves(load_adapters(tmp_path, MIXTURE, OF_ATTENTION))[0].dtype == jnp.float32
    refuse(r"layers\.2.* is missing", tmp_path, dataclasses.replace(MIXTURE, num_layers=3))
    described, weights = ((tmp_path / name).read_bytes() for name in (ADAPTER_CONFIG, WEIGHTS_NAME))
    for values, said in BAD_CONFIGS:
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(json.loads(described) | values))
        refuse(said, tmp_path)
    (tmp_path / ADAPTER_CONFIG).write_bytes(described)
    for change, said in BAD_TENSORS:
        tensors = load(weights)
        change(tensors)
        save_file(tensors, tmp_path / WEIGHTS_NAME)
        refuse(said, tmp_path)
    (tmp_path / WEIGHTS_NAME).write_bytes(weights)
    for name, content, said in BAD_FILES:
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_bytes(content)
        refuse(said, tmp_path)
        (tmp_path / name).write_bytes(before)


SAME = (True, False, "gaussian", "orthogonal", "eva", "mica")
FURTHER = [pytest.param(start, marks=pytest.mark.harness) for start in (*SAME[1:4], SAME[5], "pissa_niter_4", "olora")]


@pytest.mark.slow
@pytest.mark.parametrize("start", [True, "eva", "pissa", *FURTHER], ids=str)
def test_each_initialisation_of_peft_is_the_same_or_refused(start, tmp_path):
    peft = pytest.importorskip("peft")
    model, tokens = hf_model(SHAPES[0]), np.random.default_rng(1).integers(0, SHAPES[0][0], (2, 9))
    config, params = saved(model, tmp_path / "base")
    lora = LoraConfig(rank=4, targets=("q_proj", "o_proj", "up_proj"))
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "init_lora_weights": start}
    theirs = peft.LoraConfig(target_modules=list(lora.targets), **settings)
    adapted = peft.get_peft_model(model, theirs, low_cpu_mem_usage=False).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    if start not in SAME:
        with pytest.raises(ValueError, match=f"init_lora_weights = '{start}' is not supported, because it changes"):
            load_adapters(tmp_path / "adapter", config, lora)
        return
    adapters, expected = load_adapters(tmp_path / "adapter", config, lora), torch_logits(adapted, tokens)
    np.testing.assert_allclose(merged_logits(params, adapters, config, lora, tokens), expected, atol=1e-5, rtol=0)
