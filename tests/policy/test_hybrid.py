"""Qwen3.5's hybrids of delta nets and attention against transformers, in float32 where nothing else is said."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
from hybrids import SHAPES_HYBRID, hybrid_model, text_config, tiny_hybrid
from safetensors.numpy import load_file
from tiny_adapters import random_adapters
from transformers_models import ROPES, saved, torch, transformers

from rljax.policy.delta_net import DeltaTokens, chunked, recurrent, unit_lower_inverse
from rljax.policy.families import config_from_hf, config_to_hf, read_config
from rljax.policy.hf import SINGLE_NAME, hf_tensors, load_params, open_tensors, save_params
from rljax.policy.lora import LoraConfig, TrainedParams, merge_adapters, with_targets
from rljax.policy.model import cast_params, embed_tokens, init_params, run_blocks
from rljax.policy.peft import WEIGHTS_NAME, save_adapters
from rljax.policy.score import PrefixTrees, make_scorer, packed_logprobs
from rljax.rollout.decode_sizes import cache_row_bytes, cache_spec
from rljax.rollout.decoding import cached
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh

LENGTHS = (7, 64, 65, 1, 130, 3)  # shorter than a chunk, as long and longer; sequences that start inside of chunks


def sequences_of(vocab, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


def packed(sequences, tokens):
    """Returns tokens, segment ids and positions [1, tokens] of one row."""
    row, ids, positions = (np.zeros((1, tokens), np.int32) for _ in range(3))
    used = sum(len(s) for s in sequences)
    row[0, :used] = np.concatenate(sequences)
    ids[0, :used] = np.concatenate([np.full(len(s), i + 1) for i, s in enumerate(sequences)])
    positions[0, :used] = np.concatenate([np.arange(len(s)) for s in sequences])
    return row, ids, positions


def torch_logprobs(model, sequence):
    """Returns the log-probability of each token but the first, a torch tensor with a gradient."""
    x = torch.tensor(np.asarray(sequence)[None], dtype=torch.long)
    scores = model(x, use_cache=False).logits.float().log_softmax(-1)
    return scores[0, :-1].gather(-1, x[0, 1:, None])[:, 0]


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def logprobs(params, config, row, dtype="float32"):
    with jax.default_matmul_precision("highest"):
        return packed_logprobs(cast_params(params, dtype), config, *row).logprobs


def of_each(params, config, sequences, **how):
    return [np.asarray(logprobs(params, config, packed([s], len(s)), **how))[0, 1:] for s in sequences]


# The second shape has a test of its own, with scaled rotary embeddings.
FORMS = [SHAPES_HYBRID[0], pytest.param(SHAPES_HYBRID[1], marks=pytest.mark.harness), SHAPES_HYBRID[2]]


@pytest.fixture(params=FORMS, ids=["untied", "eight_layers", "all_turn"])
def model(request, tmp_path):
    made = hybrid_model(request.param)
    return made, *saved(made, tmp_path / "theirs")


def test_log_probabilities_match_transformers_both_ways(model, tmp_path):
    theirs, config, params = model
    sequences = sequences_of(config.vocab_size)
    single = of_each(params, config, sequences)
    with torch.no_grad():
        wanted = [torch_logprobs(theirs, s).numpy() for s in sequences]
    for ours, expected in zip(single, wanted, strict=True):
        np.testing.assert_allclose(ours, expected, atol=3e-5, rtol=0)
    row = np.asarray(logprobs(params, config, packed(sequences, 288)))[0]
    starts = np.cumsum([0, *map(len, sequences)])
    for start, ours in zip(starts, single, strict=False):
        np.testing.assert_allclose(row[start + 1 :][: len(ours)], ours, atol=1e-5, rtol=0)

    save_params(tmp_path / "ours", params, config)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(back) is transformers.Qwen3_5ForCausalLM
    with torch.no_grad():
        np.testing.assert_array_equal(torch_logprobs(back, sequences[0]).numpy(), wanted[0])


def test_gradients_of_packed_rows_match_autograd(tmp_path):
    """The gradient of A_log may nearly cancel, so the bound of its error is absolute."""
    theirs = hybrid_model()
    config, params = saved(theirs, tmp_path)
    sequences = sequences_of(config.vocab_size)
    weights = [np.random.default_rng(1).normal(size=len(s)).astype(np.float32) for s in sequences]
    sum(
        (torch_logprobs(theirs, s) * torch.tensor(w[1:])).sum() for s, w in zip(sequences, weights, strict=True)
    ).backward()
    of_row = np.pad(np.concatenate(weights), (0, 288 - sum(map(len, sequences))))[None]
    grads = jax.grad(lambda p: jnp.sum(logprobs(p, config, packed(sequences, 288)) * of_row))(params)
    found = dict(hf_tensors(grads, config, np.float32))
    wanted = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    off = {name: np.linalg.norm(found[name] - wanted[name]) for name in wanted}
    for name, of_name in off.items():
        assert of_name < (7e-5 if name.endswith("A_log") else 1.3e-4 * np.linalg.norm(wanted[name])), name


def test_every_layer_of_the_adapters_has_a_gradient(tmp_path):
    """The gradients are saved as adapters are, so their names are those of PEFT's file."""
    names = ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj")
    config, lora = tiny_hybrid(), LoraConfig(rank=2, targets=names)
    params, adapters = init_params(config, 0), random_adapters(config, lora)
    row = packed(sequences_of(24, [9]), 12)

    @jax.jit
    def objective(adapters):
        merged = merge_adapters(TrainedParams(config, lora).targets(params), adapters, config, lora, jnp.float32)
        return jnp.sum(logprobs(with_targets(params, merged), config, row))

    save_adapters(tmp_path, jax.grad(objective)(adapters), config, lora, "base")
    found = load_file(tmp_path / WEIGHTS_NAME)
    layers = [f"{i}.linear_attn.{name}" for i in range(3) for name in names[:3]] + ["3.self_attn.q_proj"]
    assert set(found) == {f"base_model.model.model.layers.{each}.lora_{x}.weight" for each in layers for x in "AB"}
    assert all(tensor.any() for tensor in found.values())


def tokens_of_rule(t, starts=(), strongest=1.0):
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(2, t, 3, n)).astype(np.float32) for n in (8, 8, 5))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -strongest * 10.0 ** rng.uniform(-4, 0, (2, t, 3)).astype(np.float32)
    rate = rng.uniform(0, 1, (2, t, 3)).astype(np.float32)
    first = np.zeros((2, t), bool)
    first[0, list(starts)] = True
    return DeltaTokens(*map(jnp.asarray, (q, k, v, log_decay, rate, first)))


def test_two_tokens_by_hand():
    """S1 = k1 v1' b1; the second token halves it, removes what its key reads, and writes its own value there."""
    one = {"q": [[1.0, 0.0], [1.0, 1.0]], "k": [[1.0, 0.0], [0.6, 0.8]], "v": [[2.0], [1.0]]}
    of_heads = [jnp.asarray(x)[None, :, None] for x in one.values()]
    rows = jnp.asarray([[[0.0], [np.log(0.5)]]], jnp.float32), jnp.asarray([[[1.0], [0.5]]])
    tokens = DeltaTokens(*of_heads, *rows, jnp.zeros((1, 2), bool))
    # The key of the second token reads 0.6 from S = [1, 0], so 0.5 (1 - 0.6) = 0.2 is written at [0.6, 0.8].
    for rule in (recurrent, chunked):
        y, state = jax.jit(rule)(tokens, jnp.zeros((1, 1, 2, 1)))
        np.testing.assert_allclose(y[0, :, 0, 0], [2.0, 1.28], atol=1e-6)
        np.testing.assert_allclose(state[0, 0, :, 0], [1.12, 0.16], atol=1e-6)


@pytest.mark.parametrize(("t", "starts"), [(5, ()), (192, (0, 3, 64, 65, 130, 191))])
@pytest.mark.parametrize("strongest", [1.0, 30.0])
def test_chunks_are_the_recurrence(t, starts, strongest):
    tokens = tokens_of_rule(t, starts, strongest)
    state = jnp.asarray(np.random.default_rng(4).normal(size=(2, 3, 8, 5)), jnp.float32)

    def run(rule, tokens, state):
        y, after = rule(tokens, state)
        return jnp.sum(jnp.sin(y)) + jnp.sum(after**2), (y, after)

    pulled = [
        jax.jit(jax.value_and_grad(functools.partial(run, rule), (0, 1), has_aux=True, allow_int=True))
        for rule in (recurrent, chunked)
    ]
    ((_, one), one_grads), ((_, other), other_grads) = (each(tokens, state) for each in pulled)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=strongest * 4e-6), one, other)
    for name, a, b in zip(DeltaTokens._fields[:5], one_grads[0], other_grads[0], strict=False):
        assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(a), name
    for end, start in zip((*starts, t)[1:], starts, strict=False):
        alone = DeltaTokens(*(x[:1, start:end] for x in tokens))
        found, _ = jax.jit(chunked)(alone, state[:1])
        np.testing.assert_allclose(found, other[0][:1, start:end], atol=strongest * 3e-6)


@pytest.mark.parametrize("rope", ROPES[1:3], ids=lambda rope: rope["rope_type"])
def test_a_scaled_rotary_embedding_turns_a_share_of_a_head(rope, tmp_path):
    """The file has the keys at the places of both forms. transformers then reads ``rope_scaling``, also the share."""
    theirs = hybrid_model(config=text_config(SHAPES_HYBRID[1], **rope))
    theirs.save_pretrained(tmp_path)
    raw = json.loads((file := tmp_path / "config.json").read_text())
    rope = raw["rope_parameters"]
    both = {"rope_scaling": rope, "rope_parameters": rope | {"partial_rotary_factor": 1.0}}
    file.write_text(json.dumps(raw | both))
    config = read_config(tmp_path)
    share = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["partial_rotary_factor"]
    assert config.rotary_share == share == 0.5
    (tokens,) = sequences_of(config.vocab_size, [40])
    with torch.no_grad():
        wanted = torch_logprobs(theirs, tokens).numpy()
    np.testing.assert_allclose(of_each(load_params(tmp_path, config), config, [tokens])[0], wanted, atol=3e-5, rtol=0)


def test_the_engine_samples_as_the_forward_scores():
    """Prompts have one token, a chunk, and more than two. Ten responses take turns in two slots, some of one token."""
    config = tiny_hybrid(initializer_range=0.05)
    params, score = init_params(config, 0), make_scorer(config, jnp.float32)
    engine = JaxEngine(config, jnp.float32, 140, mesh=make_mesh(MeshConfig(1, 1)), decode_tokens=300)
    engine.publish(params, 1)
    prompts = sequences_of(24, [1, 64, 140, 3, 90])
    responses = list(engine.generate(prompts, 2, SamplingParams(6, 1.0, tuple(range(8))), seed=3))
    assert {len(r.response) for r in responses} >= {1, 6}
    for response, whole in zip(responses, score(params, [r.ids for r in responses]), strict=True):
        np.testing.assert_allclose(response["rollout_logprobs"], whole[-len(response.response) :], atol=2e-6)
    for found, whole in zip(engine.score_prefill(prompts), score(params, prompts), strict=True):
        np.testing.assert_allclose(found, whole[1:], atol=2e-6)


@functools.partial(jax.jit, static_argnames=("config", "places"))
def piece(params, config, tokens, states, start, places):
    """Returns the log-probabilities of tokens after ``start`` others, of ``places`` in all, and the states after."""
    with jax.default_matmul_precision("highest"):
        positions = start + jnp.arange(tokens.shape[1])[None]
        seen = jnp.arange(places)[None, None] <= positions[..., None]
        where = cached(config, positions, positions >= 0, seen, start)
        hidden, states, _ = run_blocks(params, config, embed_tokens(params, tokens), where, states)
        return jax.nn.log_softmax(hidden[0] @ params["lm_head"].T), states


def forward_in_pieces(params, config, tokens, pieces):
    """Returns the log-probabilities of one sequence. Each piece goes on from the states after the one before it."""
    spec = cache_spec(config, 1, len(tokens), jnp.float32, jnp.float32)
    states = tuple(tuple(jnp.zeros(a.shape, a.dtype) for a in of_block) for of_block in spec)
    found, start = [], 0
    for n in pieces:
        one, states = piece(params, config, tokens[None, start : start + n], states, start, len(tokens))
        found.append(np.asarray(one))
        start += n
    return np.concatenate(found)


def test_a_carried_state_is_the_whole_forward():
    config = tiny_hybrid(initializer_range=0.05)
    params, (tokens,) = init_params(config, 0), sequences_of(24, [110])
    whole = forward_in_pieces(params, config, tokens, [110])
    other = forward_in_pieces(params, config, np.append(tokens[:1] ^ 1, tokens[1:]), [110])
    assert np.abs(other[-1] - whole[-1]).max() > 1e-4  # it remembers
    for pieces in ([70, *[1] * 40], [1, 70, *[1] * 39]):
        np.testing.assert_allclose(forward_in_pieces(params, config, tokens, pieces), whole, atol=2e-6)


def test_files_of_a_model_that_reads_images_are_read(tmp_path):
    """Qwen3.5 is published in this form. Its A_log and the norm of its delta nets are F32, and in Qwen3.6 BF16."""
    shape = SHAPES_HYBRID[0]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": shape[1]}
    text = text_config(shape).to_dict() | {"mamba_ssm_dtype": "float32", "output_gate_type": "swish"}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    whole = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    theirs = hybrid_model(make=transformers.Qwen3_5ForConditionalGeneration, config=whole)
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config_from_hf(config_to_hf(config, "bfloat16")) == config
    tensors = safetensors.torch.load_file(tmp_path / SINGLE_NAME)
    assert {name.split(".")[1] for name in tensors} == {"visual", "language_model", "weight"}
    wide = [name for name in tensors if name.endswith(("A_log", "linear_attn.norm.weight"))]
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    safetensors.torch.save_file(rounded | {name: tensors[name] for name in wide}, tmp_path / SINGLE_NAME)
    params, (tokens,) = load_params(tmp_path, config), sequences_of(config.vocab_size, [90])
    save_params(tmp_path / "out", params, config, jnp.bfloat16)
    back = load_params(tmp_path / "out", config)
    jax.tree.map(np.testing.assert_array_equal, params, back)
    found = open_tensors(tmp_path / "out" / SINGLE_NAME)
    assert sorted(n for n in found if found[n].get_dtype() == "F32") == sorted(
        name.replace("model.language_model.", "model.") for name in wide
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(parameter if name in wide else parameter.to(torch.bfloat16))
        wanted = torch_logprobs(theirs, tokens).numpy()
    np.testing.assert_allclose(of_each(params, config, [tokens])[0], wanted, atol=3e-5, rtol=0)


@pytest.mark.parametrize("kind", [None, "qwen3_5"])
def test_the_wrapper_names_the_family_of_its_text(kind):
    raw = config_to_hf(tiny_hybrid(), "float32")
    assert config_from_hf({"model_type": "qwen3_5", "text_config": raw | {"model_type": kind}}) == config_from_hf(raw)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not supported by the qwen3_5_text policy"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"full_attention_interval": 2, "layer_types": None}, "full_attention_interval = 2 is not supported"),
        (
            {"layer_types": ["full_attention"] * 4},
            "it must repeat linear_attention, linear_attention, linear_attention",
        ),
        ({"linear_num_value_heads": 3}, "linear_num_key_heads must divide linear_num_value_heads, got 2 and 3"),
        ({"linear_conv_kernel_dim": 0}, "conv_width must be at least 1, got 0"),
        ({"partial_rotary_factor": 1.5}, "head_dim must be even for rotary embeddings, got 8 with partial_rotary_fa"),
        ({"model_type": "qwen3_5"}, "text_config must be an object, got None"),
        (
            {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
            "tie_word_embeddings is True, and False in text_config: delete one",
        ),
    ],
)
def test_a_file_that_no_policy_computes_is_refused(changes, said):
    raw = config_to_hf(tiny_hybrid(), "float32")
    assert raw["mamba_ssm_dtype"] == "float32"
    if "partial_rotary_factor" in changes:
        raw["rope_parameters"] = None
    with pytest.raises(ValueError, match=said):
        config_from_hf(raw | changes)


def test_rows_of_trees_are_refused():
    config, ones = tiny_hybrid(), jnp.ones((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="a qwen3_5_text policy cannot compute rows of trees: give packing"):
        packed_logprobs(init_params(config, 0), config, ones, ones, ones, trees=PrefixTrees(ones, ones, ones, ones))


def test_the_state_is_float32_and_its_bytes_are_counted():
    """A row has, in three delta nets, states of 4 x 8 x 8 x 4 bytes and 3 inputs of 64 x 2 bytes, and in one block
    20 places of 2 x 2 x 8 bytes."""
    mesh = make_mesh(MeshConfig(1, 1), jax.devices()[:1])
    found = cache_row_bytes(tiny_hybrid(), mesh, 20, jnp.bfloat16, jnp.float8_e4m3fn)
    assert found == 3 * (4 * 8 * 8 * 4 + 3 * 64 * 2) + 20 * 2 * 2 * 8


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_the_inverse_of_a_triangle(size):
    """Equal keys that never decay give a matrix of ones, whose powers are beyond float32."""
    draw = np.random.default_rng(size)
    for below in (0.3 * draw.normal(size=(2, 3, size, size)), np.ones((1, size, size))):
        expected = np.linalg.inv(np.eye(size) + np.tril(below, -1))
        found = jax.jit(unit_lower_inverse)(jnp.asarray(below, jnp.float32))
        np.testing.assert_allclose(found, expected, atol=8e-7 * np.abs(expected).max())
