"""A tiny GGUF file, written here, becomes a model directory that rljax and transformers read alike."""

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from gguf_to_hf import halves_together, main
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers_models import jax_logits, torch, torch_logits, transformers

from rljax.errors import run_cli
from rljax.policy.families import read_config
from rljax.policy.hf import load_params

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 259, 64, 2, 4, 2, 96
Q8 = gguf.GGMLQuantizationType.Q8_0


def written(path, family, *, head=False, more=()):
    """Writes a random model with 8-bit matrices. Returns the values of its tensors, dequantized, by their names."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, family)
    facts = {"embedding_length": WIDTH, "block_count": LAYERS, "head_count": HEADS, "head_count_kv": KV_HEADS}
    facts |= {"feed_forward_length": INNER, "context_length": 512, "rope_freq_base": 1e5, "layer_norm_rms_eps": 1e-5}
    facts |= {"tokenizer_model": "gpt2", "tokenizer_pre": "default", "token_merges": ["a b"]}
    facts |= {"token_list": [*bytes_to_unicode().values(), "ab", "<s>", "</s>"]}
    facts |= {"token_types": [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 2}
    facts |= {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 258}
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    kept = KV_HEADS * WIDTH // HEADS
    matrices = {"attn_q": (WIDTH, WIDTH), "attn_k": (kept, WIDTH), "attn_v": (kept, WIDTH), "attn_output": (WIDTH,) * 2}
    matrices |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    shapes = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    shapes |= {"output.weight": (VOCAB, WIDTH)} if head else {}
    for block in range(LAYERS):
        shapes |= {f"blk.{block}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"blk.{block}.{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
        biased = ("attn_q", "attn_k", "attn_v") if family == "qwen2" else ()
        shapes |= {f"blk.{block}.{name}.bias": matrices[name][:1] for name in biased}
    values = {}
    for name, shape in {**shapes, **dict.fromkeys(more, (WIDTH,))}.items():
        array = (0.2 * rng.normal(size=shape) + ("norm" in name)).astype(np.float32)
        if len(shape) == 2:
            stored = gguf.quantize(array, Q8)
            writer.add_tensor(name, stored, raw_dtype=Q8)
            array = gguf.dequantize(stored, Q8)
        else:
            writer.add_tensor(name, array)
        values[name] = array
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_file_becomes_a_model_directory(family, tmp_path, capsys):
    # For a llama a file has the first row of a head's first half, then the first of its second half, and so on.
    turns = np.asarray([0, 2, 1, 3, 4, 6, 5, 7])[:, None] * np.ones((1, 3))
    np.testing.assert_array_equal(halves_together(turns, 2)[:, 0], np.arange(8))
    values = written(tmp_path / "tiny.gguf", family, head=family == "qwen2")
    assert main([str(tmp_path / "tiny.gguf"), str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model'}\n"
    config = read_config(tmp_path / "model")
    assert (config.family, config.vocab_size, config.head_dim, config.rope_theta) == (family, VOCAB, 16, 1e5)
    assert config.stop_token_ids == (258,)
    stored = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    names = {"embed_tokens": "output" if family == "qwen2" else "token_embd", "norm": "output_norm"}
    for name, given in (names | {"layers.1.mlp.down_proj": "blk.1.ffn_down"}).items():
        expected = values[f"{given}.weight"].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(stored[f"model.{name}.weight"], expected)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("1 + 2 = 3")["input_ids"], skip_special_tokens=True) == "1 + 2 = 3"
    tokens = np.asarray([list(b"what is 3 + 4?")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ours = jax_logits(load_params(tmp_path / "model", config), config, tokens)
    np.testing.assert_allclose(ours, torch_logits(theirs, tokens), atol=1e-4, rtol=0)


def test_what_cannot_be_converted_is_one_line(tmp_path, capsys):
    written(tmp_path / "more.gguf", "llama", more=["rope_freqs.weight"])
    written(tmp_path / "gemma.gguf", "gemma")
    (tmp_path / "no.gguf").write_text("no model")
    said = {
        "more": "the tensor 'rope_freqs.weight' has no place in a llama",
        "gemma": "the architecture must be llama or qwen2, got 'gemma'",
        "no": "GGUF magic invalid",
    }
    for name, text in said.items():
        assert run_cli(main, [str(tmp_path / f"{name}.gguf"), str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"error: {tmp_path / name}.gguf: {text}"
        assert not (tmp_path / name).exists()
