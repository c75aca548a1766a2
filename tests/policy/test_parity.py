"""Each family of policies against transformers on random tiny configurations, in float32."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.hf import INDEX_NAME, load_params, save_params
from rljax.policy.model import hidden_states, init_params, lm_head_table, param_shardings
from rljax.policy.score import make_scorer
from rljax.sharding import MeshConfig, make_mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# vocab, d, f, layers, h, g, head_dim, tied, theta
SHAPES = [
    (16, 64, 128, 2, 4, 2, 16, True, 10_000.0),
    (97, 48, 80, 3, 6, 1, 8, False, 1_000_000.0),
    (64, 32, 96, 1, 4, 4, 32, True, 500.0),
    (130, 40, 72, 4, 2, 2, 20, False, 10_000.0),
    (51, 24, 40, 2, 8, 2, 6, True, 5_000_000.0),
]


# A Qwen2 has heads of width d / h.
SHAPES_QWEN2 = [
    (16, 64, 128, 2, 4, 2, 16, True, 10_000.0),
    (97, 48, 80, 3, 6, 1, 8, False, 1_000_000.0),
    (51, 40, 40, 2, 2, 2, 20, False, 500.0),
]


def hf_model(shape, family="Qwen3", seed=0, **more):
    vocab, d, f, layers, h, g, head_dim, tied, theta = shape
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab,
        hidden_size=d,
        intermediate_size=f,
        num_hidden_layers=layers,
        num_attention_heads=h,
        num_key_value_heads=g,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        initializer_range=0.1,
        attn_implementation="eager",
        **more,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.copy_(("norm" in name) + 0.3 * torch.randn_like(parameter))
    return model


def jax_logits(params, config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with jax.default_matmul_precision("highest"):
        hidden, _ = hidden_states(params, config, jnp.asarray(tokens), jnp.ones(tokens.shape, jnp.int32), positions)
        return np.asarray(jnp.einsum("btd,vd->btv", hidden, lm_head_table(params)))


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


# experts, of them a token's, their width, whether the gates are normalised
MIXTURES = [(8, 2, 32, True), (4, 1, 24, False), (16, 8, 8, True), (5, 3, 40, False), (3, 3, 16, True)]


def mixture(experts, k, width, normalized):
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return dict(zip(names, (experts, k, width, normalized), strict=True))


CASES = [
    *(("Qwen3", shape, {}) for shape in SHAPES),
    *(("Qwen2", shape, {}) for shape in SHAPES_QWEN2),
    *(("Qwen3Moe", shape, mixture(*sizes)) for shape, sizes in zip(SHAPES, MIXTURES, strict=True)),
]


def case_name(case):
    family, shape, more = case
    sizes = f"v{shape[0]}h{shape[4]}g{shape[5]}k{shape[6]}"
    return "-".join([family, sizes, *["tied"] * shape[7], *map(str, more.values())])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_logits_match_transformers_both_ways(case, tmp_path):
    family, shape, more = case
    model = hf_model(shape, family, **more)
    model.save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    params = load_params(tmp_path / "theirs", config)
    tokens = np.random.default_rng(1).integers(0, shape[0], (3, 37))
    expected = torch_logits(model, tokens)
    np.testing.assert_allclose(jax_logits(params, config, tokens), expected, atol=1e-5, rtol=0)

    save_params(tmp_path / "ours", params, config)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    np.testing.assert_array_equal(torch_logits(back, tokens), expected)


def test_old_and_new_rope_forms_read_alike(tmp_path):
    hf_model(SHAPES[1]).save_pretrained(tmp_path)
    new = read_config(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert new.rope_theta == 1_000_000.0
    raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == new


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
        loaded = load_params(tmp_path / name, config)
        jax.tree.map(np.testing.assert_array_equal, loaded, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype=torch.float32).eval()
    tokens = np.arange(20)[None] % 32
    np.testing.assert_allclose(jax_logits(params, config, tokens), torch_logits(theirs, tokens), atol=1e-5, rtol=0)


def test_sixteen_bit_round_trip_is_bit_exact(tmp_path):
    config = small_config()
    for dtype in (jnp.bfloat16, jnp.float16):
        rounded = jax.tree.map(lambda p, d=dtype: p.astype(d).astype(jnp.float32), init_params(config, 0))
        save_params(tmp_path, rounded, config, dtype)
        jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, config), rounded)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    config = small_config(tie_word_embeddings=True)
    save_params(tmp_path, init_params(config, 0), config)
    with pytest.raises(ValueError, match=r"lm_head\.weight' is missing"):
        load_params(tmp_path, small_config())
    with pytest.raises(ValueError, match=r"proj\.weight' has shape"):
        load_params(tmp_path, small_config(tie_word_embeddings=True, head_dim=16))
    with pytest.raises(ValueError, match="no weights in"):
        load_params(tmp_path / "nowhere", config)


def test_logprobs_are_of_the_token_itself_and_start_at_zero(tmp_path):
    model = hf_model(SHAPES[1])
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    sequences = [np.random.default_rng(i).integers(0, 97, 11 + i) for i in range(3)]
    scored = make_scorer(config, jnp.float32)(load_params(tmp_path, config), sequences)
    for sequence, logprobs in zip(sequences, scored, strict=True):
        reference = torch.log_softmax(torch.tensor(torch_logits(model, sequence[None])[0]), -1).numpy()
        expected = [0.0] + [reference[t - 1, sequence[t]] for t in range(1, len(sequence))]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_long_rows_keep_their_positions(tmp_path):
    """4096 tokens: rotary frequencies must be transformers' to the last bit."""
    model = hf_model(SHAPES[0])
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    tokens = np.random.default_rng(1).integers(0, 16, (1, 4096))
    ours = jax_logits(load_params(tmp_path, config), config, tokens)
    np.testing.assert_allclose(ours, torch_logits(model, tokens), atol=1e-5, rtol=0)


@pytest.mark.mesh
@pytest.mark.parametrize(("fsdp", "tp"), [(8, 1), (4, 2), (1, 8)])
def test_loading_onto_a_mesh_reads_the_same_values(fsdp, tp, tmp_path):
    config = small_config(tie_word_embeddings=False)
    params = init_params(config, 3)
    save_params(tmp_path, params, config, max_shard_bytes=9_000)
    mesh = make_mesh(MeshConfig(fsdp, tp))
    loaded = load_params(tmp_path, config, param_shardings(config, mesh))
    assert loaded["layers"]["mlp"]["gate"].sharding.mesh == mesh
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), jax.device_get(params))
