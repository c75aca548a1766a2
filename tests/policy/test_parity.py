"""Each family of policies is compared with transformers on random tiny configurations, in float32."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers_models
from transformers_models import MIXTURES, ROPES, SHAPES, SHAPES_QWEN2, hf_model, jax_logits, mixture, torch_logits

from rljax.policy import hf
from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.hf import INDEX_NAME, SINGLE_NAME, load_params, open_tensors, save_params
from rljax.policy.model import init_params, param_shardings
from rljax.sharding import MeshConfig, make_mesh

CASES = [
    *(("Qwen3", shape, {}) for shape in SHAPES[1:4]),
    *(("Qwen2", shape, {}) for shape in SHAPES_QWEN2[1:]),
    ("Llama", SHAPES[2], {}),
    ("Llama", SHAPES[3], {"attention_bias": True, "mlp_bias": True}),
    *(("Llama", SHAPES[3], {"rope": rope}) for rope in ROPES),
    ("Qwen2", SHAPES_QWEN2[0], {"rope": ROPES[2]}),
    ("Qwen3", SHAPES[0], {"rope": ROPES[3]}),
    *(("Qwen3Moe", shape, mixture(*sizes)) for shape, sizes in zip(SHAPES, MIXTURES, strict=True)),
]
FURTHER = (1, 2, 4, 5, 10, 12, 16, 17, 18)  # further sizes, and scalings of rotary embeddings that other cases have
EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_size": 6}


def read_by_transformers(path):
    automatic = transformers_models.transformers.AutoModelForCausalLM
    return automatic.from_pretrained(path, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("family", "shape", "more"),
    [pytest.param(*case, marks=[pytest.mark.harness] * (i in FURTHER)) for i, case in enumerate(CASES)],
)
def test_logits_match_transformers_both_ways(family, shape, more, tmp_path):
    model = hf_model(shape, family, **more)
    config, params = transformers_models.saved(model, tmp_path / "theirs")
    tokens = np.random.default_rng(1).integers(0, shape[0], (3, 37))
    expected = torch_logits(model, tokens)
    np.testing.assert_allclose(jax_logits(params, config, tokens), expected, atol=1e-5, rtol=0)

    save_params(tmp_path / "ours", params, config)
    back = read_by_transformers(tmp_path / "ours")
    np.testing.assert_array_equal(torch_logits(back, tokens), expected)


@pytest.mark.parametrize(("family", "more"), [("Llama", {}), ("Qwen3Moe", mixture(*MIXTURES[0]))])
def test_a_head_that_the_files_repeat_is_the_table(family, more, tmp_path):
    model = hf_model(SHAPES[0], family, **more)
    config, before = transformers_models.saved(model, tmp_path)
    transformers_models.repeat_head(tmp_path)
    params = load_params(tmp_path, config)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    theirs = read_by_transformers(tmp_path)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    tokens = np.random.default_rng(1).integers(0, SHAPES[0][0], (2, 9))
    np.testing.assert_allclose(jax_logits(params, config, tokens), torch_logits(theirs, tokens), atol=1e-5, rtol=0)
    save_params(tmp_path, params, config)
    assert "lm_head.weight" not in open_tensors(tmp_path / SINGLE_NAME)


def test_packed_experts_are_named(tmp_path):
    hf_model(SHAPES[0], "Qwen3Moe", **mixture(*MIXTURES[0])).save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(ValueError, match=r"experts\.\w+' packs its layer's experts; save .* save_original_format=True"):
        load_params(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize(
    ("name", "value", "file", "computes_in", "beyond"),
    [
        ("model.norm.weight", np.nan, torch.float32, "float32", "float32"),
        ("model.layers.1.mlp.up_proj.weight", np.inf, torch.bfloat16, "bfloat16", "bfloat16"),
        ("model.layers.0.self_attn.k_proj.weight", -np.inf, torch.float16, None, "float32"),
        ("model.embed_tokens.weight", 1e300, torch.float64, None, "float32"),
        ("model.embed_tokens.weight", -65_520.0, torch.float32, "float16", "float16"),
        ("model.embed_tokens.weight", 65_519.0, torch.float32, "float16", None),
        ("model.embed_tokens.weight", 3.39e38, torch.float32, "bfloat16", None),
        ("model.embed_tokens.weight", 3.4e38, torch.float32, "bfloat16", "bfloat16"),
    ],
)
def test_a_value_that_is_not_finite_is_refused_by_its_tensor(name, value, file, computes_in, beyond, tmp_path, recwarn):
    config = small_config()
    save_params(tmp_path, init_params(config, 0), config)
    tensors = safetensors.torch.load_file(tmp_path / SINGLE_NAME)
    tensors[name] = tensors[name].to(file)
    tensors[name].view(-1)[-1] = value
    safetensors.torch.save_file(tensors, tmp_path / SINGLE_NAME)
    said = f"tensor '{name}' holds values that are NaN, infinite, or beyond the range of {beyond}"
    for shardings in (None, param_shardings(config, make_mesh(MeshConfig(1, 1)))):
        with pytest.raises(ValueError, match=f"^{tmp_path}: {said}$") if beyond else contextlib.nullcontext():
            load_params(tmp_path, config, shardings, computes_in=computes_in)
    assert not [warning for warning in recwarn if "cast" in str(warning.message)]


def small_config(**changes):
    base = PolicyConfig(32, 32, 64, 3, 4, 2, 8, tie_word_embeddings=False)
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("tied", [True, False])
def test_save_then_load_is_bit_exact_also_in_shards(tied, tmp_path):
    config = small_config(tie_word_embeddings=tied, eos_token_id=(3, 4), rope_theta=777.0)
    params = init_params(config, 5)
    save_params(tmp_path / "one", params, config)
    save_params(tmp_path / "many", params, config, max_shard_bytes=9_000)
    assert not (tmp_path / "one" / INDEX_NAME).exists()
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    for name in ("one", "many"):
        assert read_config(tmp_path / name) == config
        jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / name, config), params)
    theirs = read_by_transformers(tmp_path / "many")
    tokens = np.arange(20)[None] % 32
    np.testing.assert_allclose(jax_logits(params, config, tokens), torch_logits(theirs, tokens), atol=1e-5, rtol=0)


def test_each_form_of_a_vocabulary_is_copied(tmp_path):
    names = ("vocab.json", "merges.txt", "tokenizer.model")
    for name in names:
        (tmp_path / name).write_text(name)
    save_params(tmp_path / "out", init_params(small_config(), 0), small_config(), side_files_from=tmp_path)
    assert [(tmp_path / "out" / name).read_text() for name in names] == [*names]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.harness), "float64"])
def test_each_dtype_is_read_to_the_bit(dtype, tmp_path):
    """The policy writes 16 bits itself. Torch writes float64."""
    params, written = init_params(small_config(), 0), dtype if dtype != "float64" else "float32"
    rounded = jax.tree.map(lambda p: p.astype(written).astype(jnp.float32), params)
    save_params(tmp_path, rounded, small_config(), written)
    tensors = safetensors.torch.load_file(tmp_path / SINGLE_NAME)
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    safetensors.torch.save_file(stored, tmp_path / SINGLE_NAME)
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, small_config()), rounded)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    config = small_config(tie_word_embeddings=True)
    save_params(tmp_path, init_params(config, 0), config)
    with pytest.raises(ValueError, match=r"lm_head\.weight' is missing"):
        load_params(tmp_path, small_config())
    with pytest.raises(ValueError, match=r"proj\.weight' has shape"):
        load_params(tmp_path, small_config(tie_word_embeddings=True, head_dim=16))
    with pytest.raises(ValueError, match=r"no weights in .*; transformers' save_pretrained .* pytorch_model\.bin"):
        load_params(tmp_path / "nowhere", config)


@pytest.mark.parametrize(("dtype", "stored"), [("float8_e4m3fn", "F8_E4M3"), ("int8", "I8"), ("uint8", "U8")])
def test_a_tensor_that_is_no_plain_float_is_named(dtype, stored, tmp_path, monkeypatch):
    save_params(tmp_path, init_params(small_config(), 0), small_config())
    tensors = safetensors.torch.load_file(tmp_path / SINGLE_NAME)
    last = "model.norm.weight"
    safetensors.torch.save_file(tensors | {last: tensors[last].to(getattr(torch, dtype))}, tmp_path / SINGLE_NAME)
    monkeypatch.setattr(jnp, "asarray", lambda *_: pytest.fail("a tensor was placed before the check"))
    with pytest.raises(ValueError, match=f"tensor '{last}' has dtype {stored}, expected one of F16, BF16, F32, F64"):
        load_params(tmp_path, small_config())


def test_two_sets_of_weights_are_refused(tmp_path):
    config = small_config()
    save_params(tmp_path, init_params(config, 0), config, max_shard_bytes=9_000)
    load_params(tmp_path, config)
    save_params(tmp_path / "other", init_params(config, 1), config)
    (tmp_path / SINGLE_NAME).write_bytes((tmp_path / "other" / SINGLE_NAME).read_bytes())
    with pytest.raises(ValueError, match=f"has {SINGLE_NAME}, and {INDEX_NAME} names other files: delete one"):
        load_params(tmp_path, config)
    names = safetensors.torch.load_file(tmp_path / SINGLE_NAME)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE_NAME)}))
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, config), init_params(config, 1))


def test_another_head_of_a_tied_policy_is_refused(tmp_path):
    config = small_config(tie_word_embeddings=True, vocab_size=5000)
    save_params(tmp_path, init_params(config, 0), config, jnp.bfloat16)
    tensors = safetensors.torch.load_file(tmp_path / SINGLE_NAME)
    table = tensors["model.embed_tokens.weight"]
    first, last = table.clone(), table.clone()
    first[0], last[-1] = 0.5, 0.5
    for head in (first, last, table[:-1].clone(), table.to(torch.int8)):
        safetensors.torch.save_file(tensors | {"lm_head.weight": head}, tmp_path / SINGLE_NAME)
        with pytest.raises(ValueError, match=r"tensor 'lm_head.weight' is not 'model.embed_tokens.weight'"):
            load_params(tmp_path, config)
    safetensors.torch.save_file(tensors | {"lm_head.weight": table.float()}, tmp_path / SINGLE_NAME)
    assert "lm_head" not in load_params(tmp_path, config)


@pytest.mark.harness
@pytest.mark.slow
def test_long_rows_keep_their_positions(tmp_path):
    """The row has 4096 tokens, so rotary frequencies must equal those of transformers to the last bit."""
    model = hf_model(SHAPES[0])
    config, params = transformers_models.saved(model, tmp_path)
    tokens = np.random.default_rng(1).integers(0, 16, (1, 4096))
    np.testing.assert_allclose(jax_logits(params, config, tokens), torch_logits(model, tokens), atol=1e-5, rtol=0)


@pytest.mark.mesh
def test_loading_onto_a_mesh_reads_the_same_values(tmp_path):
    config, mesh = small_config(), make_mesh(MeshConfig(4, 2))
    params = init_params(config, 3)
    save_params(tmp_path, params, config, max_shard_bytes=9_000)
    loaded = load_params(tmp_path, config, param_shardings(config, mesh))
    assert loaded["layers"]["mlp"]["gate"].sharding.mesh == mesh
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), jax.device_get(params))


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "mixture"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_of_any_size_are_the_same_bits(experts, dtype):
    """NaN, infinities, signed zeros and subnormal numbers keep their bits in float32."""
    config = small_config(**experts)
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40, -1e-45], np.float32)
    params = jax.tree.map(lambda leaf: jnp.asarray(np.resize(odd, leaf.shape)), init_params(config, 0))
    whole = dict(hf.hf_tensors(params, config, dtype))
    for chunk_bytes in (1, 8200):  # one layer at a time, and two
        parts = dict(hf.host_tensors(params, hf.policy_leaves(config), dtype, chunk_bytes))
        assert {type(name) for name in parts} == {str}
        assert [(name, part.dtype, part.tobytes()) for name, part in parts.items()] == [
            (name, jnp.dtype(dtype), array.tobytes()) for name, array in whole.items()
        ]
    assert dtype != "float32" or whole["model.embed_tokens.weight"].tobytes() == np.resize(odd, (32, 32)).tobytes()
