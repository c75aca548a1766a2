"""Random tiny Qwen3.5 models of transformers, and their packed rows.

Their heads forget slowly. With the A of new models almost every head forgets within a few tokens, and then no test
would see a state that is lost, rounded or left over.
"""

import json
import math

from toy_runs import TOY_BASE
from transformers_models import hf_config, torch, transformers

from rljax.policy.config import SIZES, PolicyConfig
from rljax.policy.families import config_from_hf, config_to_hf
from rljax.policy.hf import save_params
from rljax.policy.model import init_params

# vocab, d, f, layers, h, g, head_dim, tied, key heads, value heads, key width, value width, taps, rotary share
SHAPES_HYBRID = [
    (97, 48, 80, 4, 4, 2, 16, False, 2, 4, 16, 8, 4, 0.25),
    (64, 32, 48, 8, 2, 1, 32, True, 2, 2, 8, 16, 3, 0.5),
    (51, 40, 40, 4, 2, 2, 8, True, 2, 6, 12, 20, 2, 1.0),
]


def tiny_hybrid(**changes):
    """Returns the sizes of the first shape, with 24 tokens."""
    sizes = {"delta_key_heads": 2, "delta_value_heads": 4, "delta_key_dim": 8, "delta_value_dim": 8, "conv_width": 4}
    more = {"family": "qwen3_5_text", "rotary_share": 0.25, "initializer_range": 0.2, **sizes, **changes}
    return PolicyConfig(**dict(zip(SIZES, (24, 32, 64, 4, 4, 2, 8), strict=True)) | more)


def hybrid_base(path, **changes):
    """Writes a fresh hybrid with the toy's tokenizer to a folder, from which a run can start. Returns the path.

    Its config.json has the ``mrope_`` keys, as the published ones have.
    """
    toy = json.loads((TOY_BASE / "config.json").read_text())
    special = {name: toy[name] for name in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")}
    config = config_from_hf(config_to_hf(tiny_hybrid(**changes), "float32") | special)
    save_params(path, init_params(config, 0), config, side_files_from=TOY_BASE)
    raw, pairs = json.loads((path / "config.json").read_text()), int(config.head_dim * config.rotary_share) // 2
    section = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    raw["rope_parameters"] |= {"mrope_section": section, "mrope_interleaved": True}
    (path / "config.json").write_text(json.dumps(raw))
    return path


def text_config(shape, **rope):
    *sizes, hk, hv, dk, dv, taps, share = shape
    heads = {"linear_num_key_heads": hk, "linear_num_value_heads": hv, "linear_conv_kernel_dim": taps}
    widths = {"linear_key_head_dim": dk, "linear_value_head_dim": dv}
    rope = {"rope_type": "default", "partial_rotary_factor": share, **rope}
    return hf_config((*sizes, 10_000.0), "Qwen3_5Text", rope, **heads, **widths)


def hybrid_model(shape=SHAPES_HYBRID[0], seed=0, make=None, config=None):
    """Returns a model with perturbed norms and biases, and with A between 1e-4 and 1e-2."""
    torch.manual_seed(seed)
    model = (make or transformers.Qwen3_5ForCausalLM)(config or text_config(shape)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(math.log(1e-4), math.log(1e-2))
            elif "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model
