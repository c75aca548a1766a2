"""The families of policies: the blocks that each declares, and its form of Hugging Face's ``config.json``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from rljax.errors import naming, parse_json
from rljax.policy.config import SIZES, PolicyConfig, refuse_adapter
from rljax.policy.delta_net import DeltaNet
from rljax.policy.experts import Experts
from rljax.policy.layers import MLP, RMSNorm
from rljax.policy.mixers import Attention, Block
from rljax.policy.rotary import RopeScaling, described_rope, read_rope


class BlockKind(NamedTuple):
    """One block of a family's pattern."""

    declare: Callable[[PolicyConfig, nnx.Rngs], Block]  # a function that declares the block's parameters
    layer_type: str = "full_attention"  # its name in the ``layer_types`` of the config.json


@dataclass(frozen=True)
class Family:
    """One family of policies: its additions to the common decoder, and its form of the ``config.json``."""

    model_type: str  # the model_type of the config.json, and the value of PolicyConfig.family
    architecture: str  # the name of the model's class in transformers and vLLM
    pattern: tuple[BlockKind, ...]  # the blocks of one period; the policy repeats it
    fixed: Mapping[str, Any]  # the keys of the file with the same value in every model that the policy can compute
    # The values that transformers uses if the file has none, by our field names. A missing head_dim without a default
    # is hidden_size / num_heads.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)  # the keys of this family's own fields, by our field names
    free_head_dim: bool = True  # whether head_dim may differ from hidden_size / num_heads
    windows_by_layer: bool = True  # whether the file says which layers have a sliding window; otherwise all have it
    norm: Callable[..., RMSNorm] = RMSNorm  # the form of the final norm
    # The model_type of files of a model that reads images, too. Their ``text_config`` describes the policy.
    wrapper: str | None = None
    prepared: Callable[[dict[str, Any]], dict[str, Any]] = dict  # a function that brings a file into the common form

    def periods(self, config: PolicyConfig) -> int:
        """Returns the number of periods of a policy. Raises ValueError if its blocks do not fill the last one."""
        period = len(self.pattern)
        if config.num_layers % period:
            raise ValueError(
                f"num_hidden_layers of a {self.model_type} must be a multiple of {period}, got {config.num_layers}"
            )
        return config.num_layers // period

    def layer_types(self, layers: int) -> list[str]:
        """Returns the ``layer_types`` of a policy with this number of blocks."""
        return [self.pattern[i % len(self.pattern)].layer_type for i in range(layers)]


_FIXED = {"hidden_act": "silu", "use_sliding_window": False}
"""The features that Qwen2 and Qwen3 fix, because no policy here computes anything else."""
# Qwen2 and Qwen2.5: query, key and value have a bias and no norm. vLLM's Qwen2 does not read head_dim.
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    pattern=(BlockKind(lambda c, rngs: Block(c, rngs, Attention(c, rngs, bias=True), MLP(c, rngs))),),
    fixed=_FIXED,
    defaults={"num_kv_heads": 32},
    free_head_dim=False,
)
# Llama (SmolLM2, Llama 3, OctoThinker): no norms of heads. The file says whether attention and SwiGLU have biases.
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    pattern=(
        BlockKind(
            lambda c, rngs: Block(
                c, rngs, Attention(c, rngs, bias=c.attention_bias, output_bias=c.attention_bias), MLP(c, rngs)
            )
        ),
    ),
    fixed={"hidden_act": "silu"},
    defaults={"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    fields={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
# Dense Qwen3: grouped-query attention with a norm of each head's query and key, and a SwiGLU.
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    pattern=(BlockKind(lambda c, rngs: Block(c, rngs, Attention(c, rngs, norms=True), MLP(c, rngs))),),
    fixed={**_FIXED, "attention_bias": False},
    defaults={"num_kv_heads": 32, "head_dim": 128},
)
# Qwen3-MoE: the MLP of dense Qwen3 is replaced by a router and experts. There is no shared expert.
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    pattern=(BlockKind(lambda c, rngs: Block(c, rngs, Attention(c, rngs, norms=True), Experts(c, rngs))),),
    fixed={**_FIXED, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults={
        "num_kv_heads": 4,
        "num_experts": 128,
        "experts_per_token": 8,
        "expert_size": 768,
        "normalize_gates": False,
    },
    fields={
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_size": "moe_intermediate_size",
        "normalize_gates": "norm_topk_prob",
    },
    prepared=lambda raw: {"num_experts": raw.get("num_local_experts")} | raw,
    windows_by_layer=False,
)


def _for_text(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns a ``config.json`` of Qwen3.5 with the usual name of SiLU, and without the ``mrope_`` keys.

    These divide the features between three positions of a token. The three positions of a token of text are equal.
    """
    prepared = raw | ({"output_gate_type": "silu"} if raw.get("output_gate_type") == "swish" else {})
    for where in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := raw.get(where), dict):
            prepared[where] = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return prepared


_offset_norm = functools.partial(RMSNorm, offset=1.0)


def _mixed_by_delta_net(c: PolicyConfig, rngs: nnx.Rngs) -> Block:
    return Block(c, rngs, DeltaNet(c, rngs), MLP(c, rngs), _offset_norm)


def _mixed_by_gated_attention(c: PolicyConfig, rngs: nnx.Rngs) -> Block:
    attention = Attention(c, rngs, norms=True, gated=True, norm=_offset_norm)
    return Block(c, rngs, attention, MLP(c, rngs), _offset_norm)


# The text of dense Qwen3.5: three delta nets to one gated attention, which turns a quarter of each head.
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    pattern=(*[BlockKind(_mixed_by_delta_net, "linear_attention")] * 3, BlockKind(_mixed_by_gated_attention)),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "full_attention_interval": 4,
        # transformers does not read these. vLLM keeps the state in the dtype of the weights if the file has no dtype.
        "attn_output_gate": True,
        "output_gate_type": "silu",
        "mamba_ssm_dtype": "float32",
    },
    defaults={
        "num_kv_heads": 4,
        "head_dim": 256,
        "rotary_share": 0.25,
        "delta_key_heads": 16,
        "delta_value_heads": 32,
        "delta_key_dim": 128,
        "delta_value_dim": 128,
        "conv_width": 4,
    },
    fields={
        "rotary_share": "partial_rotary_factor",
        "delta_key_heads": "linear_num_key_heads",
        "delta_value_heads": "linear_num_value_heads",
        "delta_key_dim": "linear_key_head_dim",
        "delta_value_dim": "linear_value_head_dim",
        "conv_width": "linear_conv_kernel_dim",
    },
    norm=_offset_norm,
    wrapper="qwen3_5",
    prepared=_for_text,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_5, QWEN3_MOE)}
"""The families by ``model_type``."""


@functools.lru_cache(maxsize=32)
def blocks_of(config: PolicyConfig) -> tuple[Block, ...]:
    """Returns the blocks of one period of a policy, with a ``jax.ShapeDtypeStruct`` in each parameter."""
    pattern = FAMILIES[config.family].pattern
    blocks: tuple[Block, ...] = nnx.eval_shape(lambda: tuple(kind.declare(config, nnx.Rngs(0)) for kind in pattern))
    return blocks


def state_heads(config: PolicyConfig) -> int:
    """Returns the number of heads whose state passes along a row (``Mixer.state_heads``); 0 if there are none."""
    return math.gcd(*(block.attention.state_heads for block in blocks_of(config)))


_SPECIAL_FIELDS = {"rope_theta", "rope_scaling", "family"} | {name for f in FAMILIES.values() for name in f.fields}
"""The fields that only some families have in their files, or that are read in a way of their own."""
_KEYS = {name: name for name in (f.name for f in dataclasses.fields(PolicyConfig)) if name not in _SPECIAL_FIELDS} | {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
"""The keys of the file for the fields that every family has, by our field names."""
_TYPES = {f.name: f.type for f in dataclasses.fields(PolicyConfig)}


def config_from_hf(raw: dict[str, Any]) -> PolicyConfig:
    """Reads a ``config.json`` dictionary as transformers v5 does, in its form or the older one (``rope_scaling``).

    Raises:
      ValueError: No policy here computes the model type or a feature (sliding window, another scaling of RoPE or
        activation, quantised weights), or a size is missing or wrong. The message names the key and its value.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object, got {type(raw).__name__}")
    kind = raw.get("model_type")
    of_text = {family.wrapper: family.model_type for family in FAMILIES.values() if family.wrapper}
    if isinstance(kind, str) and kind in of_text:
        raw, wrapper = _text_part(raw), kind
        kind = of_text[wrapper] if raw.get("model_type") in (None, wrapper) else raw["model_type"]
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ValueError(f"model_type must be one of {', '.join(sorted(FAMILIES))}, got {kind!r:.60}")
    raw = family.prepared(raw)
    raw |= _rotary_share(raw)
    _check_features(raw, family)
    keys = {**_KEYS, **family.fields}
    values: dict[str, Any] = {
        **family.defaults,
        **{name: raw[key] for name, key in keys.items() if _is_given(name, raw.get(key))},
    }
    values.setdefault("num_kv_heads", values.get("num_heads"))
    longest = values.get("max_position_embeddings", PolicyConfig.max_position_embeddings)
    values["rope_theta"], scaling = _rope(raw, longest)
    for name in (*SIZES, *family.fields):
        if name not in values and name != "head_dim":
            raise ValueError(f"config.json has no {keys[name]!r}")
    for name, value in values.items():
        if not _is_of_type(name, value):
            raise ValueError(f"{keys.get(name, name)} cannot be {value!r:.60}")
    values["rope_theta"] = float(values["rope_theta"])
    values.setdefault("head_dim", values["hidden_size"] // max(1, values["num_heads"]))
    if isinstance(values.get("eos_token_id"), list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    config = PolicyConfig(**values, rope_scaling=scaling, family=family.model_type)
    family.periods(config)
    if not family.free_head_dim and config.head_dim * config.num_heads != config.hidden_size:
        raise ValueError(f"head_dim of a {config.family} must be hidden_size / num_heads, got {config.head_dim}")
    return config


def _text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of the policy in the file of a model that reads images, too."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"text_config must be an object, got {text!r:.60}")
    outside = {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if raw.get(key) is not None}
    for key, value in outside.items():
        if text.get(key) not in (None, value):
            raise ValueError(f"{key} is {value!r:.60}, and {text[key]!r:.60} in text_config: delete one")
    return text | outside


def _check_features(raw: Mapping[str, Any], family: Family) -> None:
    """Raises ValueError for a feature that the family's policy does not compute."""
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or kinds != family.layer_types(len(kinds)):
        repeated = ", ".join(family.layer_types(len(family.pattern)))
        raise ValueError(f"layer_types = {kinds!r:.60} is not supported: it must repeat {repeated}")
    fixed = {"partial_rotary_factor": 1.0, "quantization_config": None, **family.fixed}
    fixed = {key: only for key, only in fixed.items() if key not in family.fields.values()}
    if raw.get("use_sliding_window") is True and _covers_no_layer(raw, family):
        del fixed["use_sliding_window"]
    for key, only in fixed.items():
        if raw.get(key) not in (None, {}, only):
            raise ValueError(f"{key} = {raw[key]!r:.60} is not supported by the {family.model_type} policy")


def _covers_no_layer(raw: Mapping[str, Any], family: Family) -> bool:
    """Returns whether no layer uses the sliding window that the file switches on, if it has no ``layer_types``."""
    if raw.get("sliding_window", ...) is None:
        return True
    if not family.windows_by_layer:
        return False
    first, layers = raw.get("max_window_layers"), raw.get("num_hidden_layers")
    return bool(raw.get("layer_types")) or (type(first) is type(layers) is int and first >= layers)


def _rope(raw: Mapping[str, Any], longest: Any) -> tuple[Any, RopeScaling | None]:
    """Returns base and scaling of the rotary embedding. ``longest`` is the value of ``max_position_embeddings``.

    Raises ValueError for rotary settings that no policy here computes. The message names the key of the file.
    """
    found: dict[str, RopeScaling | None] = {}
    for where in ("rope_scaling", "rope_parameters"):
        rope = raw.get(where) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"{where} must be an object, got {rope!r:.60}")
        with naming(where):
            if rope:
                found[where] = read_rope(rope, longest)
    # transformers reads rope_parameters only in a file without rope_scaling.
    scaling = next(iter(found.values()), None)
    if found.get("rope_parameters") not in (None, scaling):
        raise ValueError("rope_parameters and rope_scaling differ, and transformers reads the latter: delete one")
    length = raw.get("original_max_position_embeddings")
    if scaling is not None and scaling.kind != "linear" and length not in (None, scaling.original_length):
        said = f"{scaling.original_length} in the rotary settings"
        raise ValueError(f"original_max_position_embeddings is {length!r:.60} in the file and {said}, delete one")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    thetas = rope.get("rope_theta"), raw.get("rope_theta"), 10_000.0
    theta = next(theta for theta in thetas if theta is not None)
    unread = (raw.get("rope_parameters") or {}).get("rope_theta")
    if thetas[:2] == (None, None) and unread not in (None, theta):
        raise ValueError(f"rope_theta = {unread!r:.60} in rope_parameters is not read: give it in rope_scaling, too")
    return theta, scaling


def _rotary_share(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``partial_rotary_factor`` in the rotary settings, which comes before the file's own; {} if none."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    return {} if share is None else {"partial_rotary_factor": share}


def _is_given(name: str, value: Any) -> bool:
    """Returns whether a value of a ``config.json`` counts for our field. A negative token id means none."""
    return value is not None and not (name.endswith("_token_id") and type(value) is int and value < 0)


def _is_of_type(name: str, value: Any) -> bool:
    """Returns whether a value of a ``config.json`` has the type of our field and a sensible size."""
    if name == "eos_token_id" and isinstance(value, (list, tuple)):
        return all(_is_of_type(name, one) for one in value)
    if _TYPES[name] == "bool":
        return isinstance(value, bool)
    if _TYPES[name] == "float":
        is_sensible = type(value) in (int, float) and 0 <= value < 1e30
        return is_sensible and (value > 0 or name != "rope_theta")
    return type(value) is int and 0 <= value < 2**31


def config_to_hf(config: PolicyConfig, dtype: str) -> dict[str, Any]:
    """Returns the ``config.json`` dictionary of a policy with weights in ``dtype``.

    RoPE is written in the old and the new form, so that every version of transformers and vLLM can read it.
    """
    family, rope = FAMILIES[config.family], described_rope(config.rope_theta, config.rope_scaling)
    if config.rotary_share != 1.0:
        rope["partial_rotary_factor"] = config.rotary_share
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.fixed,
        **({"layer_types": family.layer_types(config.num_layers)} if len(family.pattern) > 1 else {}),
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        **({"rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}} if config.rope_scaling else {}),
        **{key: getattr(config, name) for name, key in {**_KEYS, **family.fields}.items()},
    }


def read_config(directory: str | Path) -> PolicyConfig:
    """Reads ``directory/config.json``, and adds the end-of-sequence tokens of ``generation_config.json``.

    Raises:
      ValueError: A file is missing or cannot be used. The message names its path.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        refuse_adapter(path.parent)
        raise ValueError(f"no model at {directory}: {path} does not exist")
    with naming(path):
        config = config_from_hf(parse_json(path.read_bytes()))
    path = path.with_name("generation_config.json")
    with naming(path):
        return _with_stops(config, parse_json(path.read_bytes())) if path.is_file() else config


def _with_stops(config: PolicyConfig, raw: Any) -> PolicyConfig:
    """Adds the end-of-sequence tokens of a ``generation_config.json`` that the vocabulary has."""
    stops = raw.get("eos_token_id") if isinstance(raw, dict) else None
    stops = () if stops is None else stops if isinstance(stops, list) else (stops,)
    if not _is_of_type("eos_token_id", stops):
        raise ValueError(f"eos_token_id cannot be {stops!r:.60}")
    more = [stop for stop in dict.fromkeys(stops) if stop < config.vocab_size and stop not in config.stop_token_ids]
    return dataclasses.replace(config, eos_token_id=(*config.stop_token_ids, *more)) if more else config
