"""Estimates from shapes the bytes that a step works with on one device, besides its state.

A step keeps the batch, the gradients of a micro-batch and the activations for the backward pass. Its peak is either in
the backward pass of a block or in the head's chunk of logits. The arrays alive at each peak come from XLA's buffer
assignment of steps compiled for H100s; the documentation compares estimate and compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.policy.attention import PackedAttention, choose_attention, find_implementation, packed_attention
from rljax.policy.config import PolicyConfig
from rljax.policy.cudnn import CAPABILITY, CUDNN
from rljax.policy.delta_net import CHUNK
from rljax.policy.experts import round_size
from rljax.policy.families import blocks_of
from rljax.policy.head import are_few_logits, vocabulary_chunks
from rljax.policy.kernels import Kernels, is_one_cpu
from rljax.policy.lora import TrainedParams
from rljax.policy.model import abstract_params, hidden_states, logical_axes
from rljax.run.config import Config
from rljax.run.packing import batch_shape, flat_rows, responses_per_update, shares_prefixes
from rljax.sharding import named_sharding
from rljax.trainer.micro_batches import BATCH_AXES

# The bytes of a batch for each token: seven arrays of four bytes for policy and loss, two masks of one byte, and two
# arrays of log-probabilities.
_BATCH_BYTES = 38
# The four further arrays of a batch of trees. Its other arrays are planned as if responses filled rows of that length.
_TREE_BYTES = 16
# The bytes of a likeliest token: its id and its log-probability.
TOP_BYTES = 8
_FLOAT32 = 4
HOPPER = SimpleNamespace(platform="gpu", device_kind="Hopper GPU", compute_capability=CAPABILITY)
_LAYERS = 1009  # a size that no other dimension has; no array of it is allocated


def working_bytes(config: Config, policy: PolicyConfig, mesh: Any) -> dict[str, int]:
    """Returns the bytes that a step works with on one device, by purpose; ``mesh`` may be an abstract mesh."""
    micro, *shape = batch_shape(config, responses_per_update(config))
    local_rows, tokens = local_batch(mesh, *shape)
    part = local_policy(policy, mesh)
    itemsize = jnp.dtype(config.precision.compute_dtype).itemsize
    attention = planned_attention(config, policy, mesh)
    ways = tokens // named_sharding(mesh, ("split_tokens",), (tokens,)).shard_shape((tokens,))[0]
    kept = kept_by_a_block(part, local_rows, tokens, config, attention, ways=ways)
    trained = TrainedParams(policy, config.lora)
    sizes = jax.tree.map(
        lambda leaf, axes: math.prod(named_sharding(mesh, axes, leaf.shape).shard_shape(leaf.shape)),
        trained.targets(abstract_params(policy)),
        trained.targets(logical_axes(policy)),
    )
    gradients = sum(jax.tree.leaves(sizes)) * itemsize
    places = local_rows * tokens
    block = gradients + block_bytes(part, places, itemsize)
    if policy.num_experts:
        block += experts_bytes(part, places, mesh.shape["expert"], itemsize)
    scored = local_rows * (flat_rows(config, tokens) or tokens)  # the head sees only responses where prompts are shared
    head = head_bytes(policy, mesh, scored, itemsize)
    if is_one_cpu(mesh) and are_few_logits(scored, policy.vocab_size):
        head += scored * policy.vocab_size * _FLOAT32
    return {
        "batch": micro * places * (_BATCH_BYTES + _TREE_BYTES * shares_prefixes(config)),
        "kept for the backward pass": kept * policy.num_layers,
        "at work in a micro-batch": max(block, head),
    }


def working_top_bytes(config: Config, mesh: Any) -> int:
    """Returns the bytes on one device of the sampler's likeliest tokens, of a batch and of a micro-batch at work.

    At work, every device has the arrays of all rows of the micro-batch (``trainer.micro_batches.with_all_rows``). The
    trainer's log-probabilities of these tokens and their gradients take as much again.
    """
    micro, rows, tokens = batch_shape(config)
    places = micro * math.prod(local_batch(mesh, rows, tokens)) + 2 * rows * tokens
    return places * config.trained_tops * TOP_BYTES


def local_batch(mesh: Any, rows: int, tokens: int) -> tuple[int, int]:
    """Returns the shape of one device's part of a micro-batch: its rows, and the tokens of each row."""
    local_rows, local_tokens = named_sharding(mesh, BATCH_AXES[1:], (rows, tokens)).shard_shape((rows, tokens))
    return local_rows, local_tokens


def local_policy(policy: PolicyConfig, mesh: Any) -> PolicyConfig:
    """Returns the configuration of a policy whose activations have the shapes of one device's part."""

    def part(logical: str, size: int) -> int:
        return int(named_sharding(mesh, (logical,), (size,)).shard_shape((size,))[0])

    heads, keys = part("act_heads", policy.num_heads), part("act_heads", policy.delta_key_heads)
    return dataclasses.replace(
        policy,
        intermediate_size=part("act_mlp", policy.intermediate_size),
        expert_size=part("mlp", policy.expert_size) if policy.num_experts else 0,
        num_heads=heads,
        num_kv_heads=math.gcd(heads, part("kv_heads", policy.num_kv_heads)),
        delta_key_heads=keys,
        delta_value_heads=keys * policy.delta_value_heads // max(1, policy.delta_key_heads),
    )


def planned_attention(config: Config, policy: PolicyConfig, mesh: Any) -> PackedAttention:
    """Returns the attention function of the mesh's devices, or of Hopper GPUs if the mesh is abstract.

    Only cuDNN's attention keeps more for the backward pass than attention in blocks. All others are planned as blocks.

    Raises:
      ValueError: ``policy.attention`` does not fit the devices or the heads.
    """
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else HOPPER
    asked, dtype = config.policy.attention, config.precision.compute_dtype
    if asked == "splash" or find_implementation(asked, device, dtype, policy.head_dim) != "cudnn":
        return packed_attention
    return choose_attention(asked, device, dtype, policy.head_dim, trees=shares_prefixes(config))


def kept_by_a_block(
    part: PolicyConfig,
    rows: int,
    tokens: int,
    config: Config,
    attention: PackedAttention = packed_attention,
    *,
    ways: int = 1,
) -> int:
    """Returns the bytes of activations that a block keeps for its backward pass under ``precision.remat``.

    ``part`` has the shapes of one device. Activations of the model's width are split by tokens over ``ways`` devices.
    """
    dtype = jnp.dtype(config.precision.compute_dtype)
    remat = config.precision.remat_policy
    if remat == "offload":
        return 0
    layers = _LAYERS * len(blocks_of(part))
    part = dataclasses.replace(part, num_layers=layers)
    params = jax.tree.map(lambda leaf: leaf.update(dtype=dtype), abstract_params(part))
    ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)

    def hidden(params: Any, ids: Any) -> Any:
        return hidden_states(params, part, ids, ids, ids, remat=remat, kernels=Kernels(attention))[0]

    with compiled_for_hopper():
        pullback = jax.eval_shape(lambda params, ids: jax.vjp(lambda each: hidden(each, ids), params)[1], params, ids)
        kept = jax.tree.leaves(pullback)
    # The scan stacks the arrays that a block keeps; its weights are among them.

    def parts(leaf: Any) -> int:
        # Without remat, kept arrays of the model's width in the compute dtype are gathered operands of products.
        is_split = leaf.shape[1:] == (rows, tokens, part.hidden_size) and (remat != "none" or leaf.dtype != dtype)
        return ways if is_split else 1

    of_blocks = sum(leaf.size * leaf.dtype.itemsize // parts(leaf) for leaf in kept if leaf.shape[:1] == (_LAYERS,))
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params["layers"]))
    return int(max(0, of_blocks - weights)) // layers


@contextlib.contextmanager
def compiled_for_hopper() -> Iterator[None]:
    """Opens a ``with`` block in which JAX traces for an H100 SXM: its capability, cuDNN and 132 multiprocessors.

    JAX asks the GPU of the process for these. A process that compiles ahead of time has none, and JAX would refuse.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as outer

    answers: list[tuple[Any, str, Any]] = [
        (attention, "check_compute_capability", lambda asked: asked <= CAPABILITY),
        (attention, "check_cudnn_version", lambda: CUDNN),
        (outer, "jax", SimpleNamespace(**vars(jax) | {"devices": lambda: [SimpleNamespace(core_count=132)]})),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in answers]
    try:
        for module, name, answer in answers:
            setattr(module, name, answer)
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def block_bytes(part: PolicyConfig, places: int, itemsize: int) -> int:
    """Estimates the bytes of a block's backward pass while attention is recomputed and the MLP's cotangents wait.

    These are four arrays of the MLP's width, seven of the heads' width, and three of the model's width. The gradients
    of the heads are in float32. The weights of one product are complete, and the gradients of two. A delta net has
    float32 arrays of its value heads in place of the arrays of the heads' width. There are two to three times as many
    as the backward pass of one block needs, because the compiler lets the blocks of a period overlap.
    """
    heads = part.num_heads * part.head_dim
    inner = 0 if part.num_experts else part.intermediate_size
    rule = part.delta_value_heads * (24 * (part.delta_key_dim + part.delta_value_dim) + 22 * CHUNK)
    of_mixer = max(itemsize * 7 * heads + _FLOAT32 * 3 * heads // 2, _FLOAT32 * rule)
    weight = part.hidden_size * inner
    return places * (itemsize * (4 * inner + 3 * part.hidden_size) + of_mixer) + weight * (itemsize + 2 * _FLOAT32)


def experts_bytes(part: PolicyConfig, places: int, ways: int, itemsize: int) -> int:
    """Estimates the bytes of the backward pass of a mixture's experts. A device has 1 / ``ways`` of the experts.

    Each token of the devices that share experts has two arrays of the model's width, and their sum in float32. Each
    pair (token, expert) of a round has two arrays of the model's width, six of an expert's. The weights of the device's
    experts are complete over the model's width. Rounds add up the gradients of all three matrices in float32; a single
    round holds one gradient at a time.
    """
    d, f, tokens = part.hidden_size, part.expert_size, places * ways
    pairs = round_size(tokens * part.experts_per_token, ways)
    weights = 3 * d * f * part.num_experts // ways
    of_tokens = tokens * d * (2 * itemsize + _FLOAT32)
    gradients = weights if ways > 1 else weights // 3
    return of_tokens + pairs * itemsize * (2 * d + 6 * f) + weights * itemsize + gradients * _FLOAT32


def head_bytes(policy: PolicyConfig, mesh: Any, places: int, itemsize: int) -> int:
    """Estimates the bytes of a chunk of logits in the backward pass: three copies, hidden states and table rows."""
    (shard,) = named_sharding(mesh, ("vocab",), (policy.vocab_size,)).shard_shape((policy.vocab_size,))
    chunk = shard // vocabulary_chunks(shard)
    logits = places * chunk * (2 * _FLOAT32 + itemsize)
    return logits + (places + chunk) * policy.hidden_size * (_FLOAT32 + 2 * itemsize)
