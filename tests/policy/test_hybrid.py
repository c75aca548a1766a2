"""Qwen3.5's hybrids of delta nets and attention against transformers, in float32 where nothing else is said."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
from hybrids import SHAPES_HYBRID, hybrid_model, text_config, tiny_hybrid
from transformers_models import ROPES, saved, torch, transformers

from rljax.policy.delta_net import DeltaTokens, chunked, recurrent
from rljax.policy.families import config_from_hf, config_to_hf, read_config
from rljax.policy.hf import SINGLE_NAME, hf_tensors, load_params, open_tensors, save_params
from rljax.policy.model import init_params
from rljax.policy.score import PrefixTrees, make_scorer, packed_logprobs
from rljax.rollout.decode_sizes import cache_row_bytes
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


@functools.partial(jax.jit, static_argnames="config")
def logprobs(params, config, row):
    with jax.default_matmul_precision("highest"):
        return packed_logprobs(params, config, *row).logprobs


def of_each(params, config, sequences):
    return [np.asarray(logprobs(params, config, packed([s], len(s))))[0, 1:] for s in sequences]


def wanted_of(model, sequences):
    with torch.no_grad():
        return [torch_logprobs(model, s).numpy() for s in sequences]


# The second shape has a test of its own, with scaled rotary embeddings.
@pytest.mark.parametrize(
    "shape", [pytest.param(SHAPES_HYBRID[0], marks=pytest.mark.harness), SHAPES_HYBRID[2]], ids=["untied", "all_turn"]
)
def test_log_probabilities_match_transformers_both_ways(shape, tmp_path):
    theirs = hybrid_model(shape)
    config, params = saved(theirs, tmp_path / "theirs")
    sequences = sequences_of(config.vocab_size)
    wanted, starts = wanted_of(theirs, sequences), np.cumsum([0, *map(len, sequences)])
    row = np.asarray(logprobs(params, config, packed(sequences, 288)))[0]
    for start, expected in zip(starts, wanted, strict=False):
        np.testing.assert_allclose(row[start + 1 :][: len(expected)], expected, atol=3e-5, rtol=0)

    save_params(tmp_path / "ours", params, config)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(back) is transformers.Qwen3_5ForCausalLM
    np.testing.assert_array_equal(wanted_of(back, sequences[:1])[0], wanted[0])


@pytest.mark.harness  # the forward and the gradients of its rule have tests of their own
def test_gradients_of_packed_rows_match_autograd(tmp_path):
    """The gradient of A_log may nearly cancel, so the bound of its error is absolute."""
    theirs = hybrid_model()
    config, params = saved(theirs, tmp_path)
    sequences = sequences_of(config.vocab_size)
    weights = [np.random.default_rng(1).normal(size=len(s)).astype(np.float32) for s in sequences]
    pairs = zip(sequences, weights, strict=True)
    sum((torch_logprobs(theirs, s) * torch.tensor(w[1:])).sum() for s, w in pairs).backward()
    of_row = np.pad(np.concatenate(weights), (0, 288 - sum(map(len, sequences))))[None]
    grads = jax.jit(jax.grad(lambda p: jnp.sum(logprobs(p, config, packed(sequences, 288)) * of_row)))(params)
    found = dict(hf_tensors(grads, config, np.float32))
    wanted = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    for name, expected in wanted.items():
        most = 7e-5 if name.endswith("A_log") else 1.3e-4 * np.linalg.norm(expected)
        assert np.linalg.norm(found[name] - expected) < most, name


def tokens_of_rule(t, starts=(), strongest=1.0):
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(2, t, 3, n)).astype(np.float32) for n in (8, 8, 5))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -strongest * 10.0 ** rng.uniform(-4, 0, (2, t, 3)).astype(np.float32)
    rate = rng.uniform(0, 1, (2, t, 3)).astype(np.float32)
    if strongest == 0.0:  # equal keys that never decay, whose matrix of ones has powers beyond float32
        k, rate = np.broadcast_to(k[:, :1], k.shape), np.ones_like(rate)
    first = np.zeros((2, t), bool)
    first[0, list(starts)] = True
    return DeltaTokens(*map(jnp.asarray, (q, k, v, log_decay, rate, first)))


@functools.cache
def compiled(rule):
    def run(tokens, state):
        y, after = rule(tokens, state)
        return jnp.sum(jnp.sin(y)) + jnp.sum(after**2), (y, after)

    return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True, allow_int=True))


@pytest.mark.parametrize(("t", "starts"), [(5, ()), (192, (0, 3, 64, 65, 130, 191))])
@pytest.mark.parametrize("strongest", [0.0, 1.0, 30.0])
def test_chunks_are_the_recurrence(t, starts, strongest):
    tokens, size = tokens_of_rule(t, starts, strongest), strongest or 4.0
    state = jnp.asarray(np.random.default_rng(4).normal(size=(2, 3, 8, 5)), jnp.float32)
    ((_, one), one_grads), ((_, other), other_grads) = (compiled(rule)(tokens, state) for rule in (recurrent, chunked))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=size * 4e-6), one, other)
    for name, a, b in zip(DeltaTokens._fields[:5], one_grads[0], other_grads[0], strict=False):
        assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(a), name
    for end, start in zip((*starts, t)[1:], starts, strict=False):
        alone = DeltaTokens(*(x[:1, start:end] for x in tokens))
        found, _ = jax.jit(chunked)(alone, state[:1])
        np.testing.assert_allclose(found, other[0][:1, start:end], atol=size * 3e-6)


def test_a_scaled_rotary_embedding_turns_a_share_of_a_head(tmp_path):
    """The file has the keys at the places of both forms. transformers then reads ``rope_scaling``, also the share."""
    theirs = hybrid_model(config=text_config(SHAPES_HYBRID[1], **ROPES[2]))
    theirs.save_pretrained(tmp_path)
    raw = json.loads((file := tmp_path / "config.json").read_text())
    rope = raw["rope_parameters"]
    both = {"rope_scaling": rope, "rope_parameters": rope | {"partial_rotary_factor": 1.0}}
    file.write_text(json.dumps(raw | both))
    config = read_config(tmp_path)
    share = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["partial_rotary_factor"]
    assert config.rotary_share == share == 0.5
    sequences = sequences_of(config.vocab_size, [40])
    found = of_each(load_params(tmp_path, config), config, sequences)
    np.testing.assert_allclose(found, wanted_of(theirs, sequences), atol=3e-5, rtol=0)


def test_the_engine_samples_as_the_forward_scores():
    """Prompts have one token, a chunk, and more than two. Ten responses take turns in two slots, some of one token."""
    config = tiny_hybrid(initializer_range=0.05)
    params, score = init_params(config, 0), make_scorer(config, jnp.float32)
    engine = JaxEngine(config, jnp.float32, 140, mesh=make_mesh(MeshConfig(1, 1)), decode_tokens=300)
    engine.publish(params, 1)
    prompts = sequences_of(24, [1, 64, 140, 3, 90])
    responses = list(engine.generate(prompts, 2, SamplingParams(6, 1.0, tuple(range(8))), seed=3))
    assert {len(r.response) for r in responses} >= {1, 6}
    scored = score(params, [*(r.ids for r in responses), *prompts])
    for response, whole in zip(responses, scored[:10], strict=True):
        np.testing.assert_allclose(response["rollout_logprobs"], whole[-len(response.response) :], atol=2e-6)
    for found, whole in zip(engine.score_prefill(prompts), scored[10:], strict=True):
        np.testing.assert_allclose(found, whole[1:], atol=2e-6)


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
    assert config_from_hf(raw := config_to_hf(config, "bfloat16")) == config
    for kind in (None, "qwen3_5"):  # the wrapper names the family of its text
        assert config_from_hf({"model_type": "qwen3_5", "text_config": raw | {"model_type": kind}}) == config
    tensors = safetensors.torch.load_file(tmp_path / SINGLE_NAME)
    assert {name.split(".")[1] for name in tensors} == {"visual", "language_model", "weight"}
    wide = [name for name in tensors if name.endswith(("A_log", "linear_attn.norm.weight"))]
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    safetensors.torch.save_file(rounded | {name: tensors[name] for name in wide}, tmp_path / SINGLE_NAME)
    params, sequences = load_params(tmp_path, config), sequences_of(config.vocab_size, [90])
    save_params(tmp_path / "out", params, config, jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, params, load_params(tmp_path / "out", config))
    found = open_tensors(tmp_path / "out" / SINGLE_NAME)
    in_float32 = {name.replace("model.language_model.", "model.") for name in wide}
    assert {name for name in found if found[name].get_dtype() == "F32"} == in_float32
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(parameter if name in wide else parameter.to(torch.bfloat16))
    np.testing.assert_allclose(of_each(params, config, sequences), wanted_of(theirs, sequences), atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not supported by the qwen3_5_text policy"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"full_attention_interval": 2, "layer_types": None}, "full_attention_interval = 2 is not supported"),
        ({"layer_types": ["full_attention"] * 4}, "it must repeat linear_attention, linear_attention"),
        ({"num_hidden_layers": 6, "layer_types": None}, "num_hidden_layers of a qwen3_5_text must be a multiple of 4"),
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


def test_the_state_is_float32_and_its_bytes_are_counted():
    """Three delta nets have states of 4 x 8 x 8 floats and 3 inputs of 64 x 2 bytes, one block 20 places in 8 bits."""
    config, ones = tiny_hybrid(), jnp.ones((1, 2), jnp.int32)
    found = cache_row_bytes(config, make_mesh(MeshConfig(1, 1)), 20, jnp.bfloat16, jnp.float8_e4m3fn)
    assert found == 3 * (4 * 8 * 8 * 4 + 3 * 64 * 2) + 20 * 2 * 2 * 8
    with pytest.raises(ValueError, match="a qwen3_5_text policy cannot compute rows of trees: give packing"):
        packed_logprobs(init_params(config, 0), config, ones, ones, ones, trees=PrefixTrees(ones, ones, ones, ones))
