"""Turns a GGUF file of a Llama or a Qwen2 into a Hugging Face model directory in bfloat16.

Every tensor is dequantized. If the file has an LM head of its own, the head becomes the tied embedding: it has more
bits than the embedding of the same file. The tokenizer is rebuilt by transformers.

    python tools/gguf_to_hf.py FILE.gguf DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.numpy import save_file
from tqdm import tqdm
from transformers import AutoTokenizer

from rljax.errors import ConfigError, run_cli
from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_to_hf
from rljax.policy.hf import SINGLE_NAME

BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The names of a block's tensors in a Hugging Face directory, by their names in GGUF."""
TABLE, HEAD, NORM = "token_embd.weight", "output.weight", "output_norm.weight"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("directory", type=Path, help="the new model directory")
    options = parser.parse_args(argv)
    try:
        convert(options.file, options.directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{options.file}: {error}") from error
    print(options.directory)
    return 0


def convert(file: Path, directory: Path) -> None:
    """Writes the model directory. Raises ValueError for a file that is no Llama and no Qwen2 with a tied head."""
    reader = GGUFReader(file)
    config = read_policy(reader)
    tensors = dict(named_tensors(reader.tensors, config))
    directory.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    special = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    for name, content in (("config.json", config_to_hf(config, "bfloat16")), ("generation_config.json", special)):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    save_file(tensors, directory / SINGLE_NAME, metadata={"format": "pt"})


def read_policy(reader: GGUFReader) -> PolicyConfig:
    """Returns the sizes that the file's fields give. Raises ValueError if one is missing, or for another family."""

    def value(name: str) -> Any:
        field = reader.get_field(name)
        if field is None:
            raise ValueError(f"there is no field {name!r}")
        return field.contents()

    family = value("general.architecture")
    if family not in ("llama", "qwen2"):
        raise ValueError(f"the architecture must be llama or qwen2, got {family!r:.60}")
    table = next((tensor for tensor in reader.tensors if tensor.name == TABLE), None)
    if table is None:
        raise ValueError(f"there is no tensor {TABLE!r}")
    width, heads = int(value(f"{family}.embedding_length")), int(value(f"{family}.attention.head_count"))
    return PolicyConfig(
        family=family,
        vocab_size=int(table.shape[1]),
        hidden_size=width,
        intermediate_size=int(value(f"{family}.feed_forward_length")),
        num_layers=int(value(f"{family}.block_count")),
        num_heads=heads,
        num_kv_heads=int(value(f"{family}.attention.head_count_kv")),
        head_dim=width // heads,
        rope_theta=float(value(f"{family}.rope.freq_base")),
        rms_norm_eps=round(float(value(f"{family}.attention.layer_norm_rms_epsilon")), 9),
        max_position_embeddings=int(value(f"{family}.context_length")),
        tie_word_embeddings=True,
        bos_token_id=int(value("tokenizer.ggml.bos_token_id")),
        eos_token_id=int(value("tokenizer.ggml.eos_token_id")),
        pad_token_id=int(value("tokenizer.ggml.padding_token_id")),
    )


def named_tensors(tensors: Sequence[ReaderTensor], config: PolicyConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the Hugging Face name and the bfloat16 values of each tensor. Raises ValueError for an unknown one."""
    names = {tensor.name for tensor in tensors}
    for tensor in tqdm(tensors, desc="tensors", unit="tensor", disable=None):
        if tensor.name == TABLE and HEAD in names:
            continue
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        outside = {TABLE: "model.embed_tokens.weight", HEAD: "model.embed_tokens.weight", NORM: "model.norm.weight"}
        name = outside.get(tensor.name)
        if name is None:
            block, _, rest = tensor.name.removeprefix("blk.").partition(".")
            kind, _, leaf = rest.partition(".")
            if not tensor.name.startswith("blk.") or kind not in BLOCK:
                raise ValueError(f"the tensor {tensor.name!r} has no place in a {config.family}")
            name = f"model.layers.{block}.{BLOCK[kind]}.{leaf}"
            if config.family == "llama" and kind in ("attn_q", "attn_k"):
                values = halves_together(values, config.num_heads if kind == "attn_q" else config.num_kv_heads)
        yield name, values.astype(ml_dtypes.bfloat16)


def halves_together(weight: np.ndarray, heads: int) -> np.ndarray:
    """Puts the halves of each head one after the other. A GGUF file of a Llama has them in turn, for its rotation."""
    rows = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)


if __name__ == "__main__":
    sys.exit(run_cli(main))
