"""A policy: the decoder that its family declares, as a plain pytree of arrays.

Abstract shapes, shardings, initial values and the layout of checkpoints all derive from the declaration. The optimizer,
checkpoints and engines hold the pytree (``nnx.to_pure_dict``). Blocks are stacked on a leading layers axis, and the
forward scans over them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.context import fold
from rljax.policy.families import FAMILIES
from rljax.policy.flash import LSE_NAME, OUT_NAME
from rljax.policy.kernels import ON_ANY_BACKEND, Kernels
from rljax.policy.layers import (
    PRODUCT,
    BlockStats,
    HFTensor,
    RMSNorm,
    Routing,
    RoutingRecord,
    all_tokens,
    param,
    rms_norm,
    split_tokens,
)
from rljax.policy.rotary import Rotate, rotary_tables, rotate
from rljax.policy.taps import Substitutes, Values, record_layers, recording_layer, substitutes_of_layers, tap
from rljax.sharding import constrain, tree_shardings

Params = dict[str, Any]
Remat = Literal["none", "dots", "blocks", "offload"]
# The values of a block, besides its input, that the forward pass saves for the backward pass.
_BLOCK_INPUT = "block_input"
_SAVED: dict[str, Any] = {
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, OUT_NAME, LSE_NAME),
    "blocks": None,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
# A function (carry, layer index, q, k, v) -> (attention output, carry). The carry is a cache, or ().
AttentionFn = Callable[[Any, Array, Array, Array, Array], tuple[Array, Any]]


class ForwardStats(NamedTuple):
    """Measurements of a forward.

    In float16 the residual stream and the MLPs' products overflow first, at 65,504.
    """

    activation_max: Float[Array, ""]  # the largest absolute value in the residual stream and in the MLPs' products
    router: RoutingRecord | None  # the routing of a policy with experts, with a leading layers axis; else None


class _Decoder(nnx.Module):
    """The declaration of all parameters. ``layers`` is a stack of blocks on a leading axis."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        table = (c.vocab_size, c.hidden_size)
        self.embed = param(rngs, table, ("vocab", "embed"), normal, "model.embed_tokens.weight")
        stack = nnx.vmap(functools.partial(_block, c), in_axes=0, axis_size=c.num_layers)
        self.layers = stack(rngs.split(c.num_layers))
        self.final_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs, "model.norm.weight")
        if not c.tie_word_embeddings:
            self.lm_head = param(rngs, table, ("vocab", "embed"), normal, "lm_head.weight")


def _block(config: PolicyConfig, rngs: nnx.Rngs) -> nnx.Module:
    return FAMILIES[config.family].block(config, rngs)


class _Declaration(NamedTuple):
    block: Any  # the graphdef of one block
    abstract: Params
    logical: Params
    stored: dict[Any, HFTensor]  # by path


@functools.lru_cache(maxsize=32)
def _declaration(config: PolicyConfig) -> _Declaration:
    model = nnx.eval_shape(lambda: _Decoder(config, nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    logical, stored = {}, {}
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        in_block = path[0] == "layers"
        logical[path] = (("layers",) if in_block else ()) + metadata["logical"]
        name, inputs = metadata["stored"]
        stored[path] = HFTensor("model.layers.{}." + name if in_block else name, inputs)
    block = nnx.eval_shape(lambda: _block(config, nnx.Rngs(0)))
    return _Declaration(nnx.split(block)[0], nnx.to_pure_dict(state), traverse_util.unflatten_dict(logical), stored)


def abstract_params(config: PolicyConfig) -> Params:
    """Returns the pytree with a float32 ``jax.ShapeDtypeStruct`` at each leaf. Nothing is allocated."""
    return _declaration(config).abstract


def logical_axes(config: PolicyConfig) -> Params:
    """Returns the pytree with a tuple of logical axis names at each leaf, one for each dimension."""
    return _declaration(config).logical


def stored_tensors(config: PolicyConfig) -> dict[tuple[str, ...], HFTensor]:
    """Returns the checkpoint tensor of each parameter, by path. In blocks, the first ``{}`` is the block's number."""
    return _declaration(config).stored


def gathered_axes(config: PolicyConfig) -> Params:
    """Returns the logical axes of weights that are gathered over the mesh axes that split the model width."""

    def gathered(axes: tuple[str, ...]) -> tuple[str | None, ...]:
        return tuple(None if axis in ("embed", "expert_embed") else axis for axis in axes)

    return jax.tree.map(gathered, logical_axes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))


def param_shardings(config: PolicyConfig, mesh: jax.sharding.Mesh) -> Params:
    """Returns the pytree with a NamedSharding at each leaf."""
    return tree_shardings(mesh, logical_axes(config), abstract_params(config))


def init_params(config: PolicyConfig, seed: int) -> Params:
    """Returns new float32 parameters. The same seed gives the same bits."""
    return nnx.to_pure_dict(nnx.state(_Decoder(config, nnx.Rngs(seed)), nnx.Param))


def cast_params(params: Params, dtype: Any) -> Params:
    """Casts every parameter to ``dtype``, the dtype of an engine's computation."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def lm_head_table(params: Params) -> Float[Array, "v d"]:
    """Returns the output table, which is the embedding if they are tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


@jax.custom_vjp
def _rows(table: Array, tokens: Array) -> Array:
    """Looks up rows without gathering the table: each device serves its width and vocabulary for the tokens of all."""
    table, tokens = constrain(table, "vocab", "embed"), constrain(tokens, None, None)
    return split_tokens(constrain(table[tokens], None, None, "embed"))


def _rows_fwd(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    # The empty slice carries the number of rows and the dtype of the table to the backward pass.
    return _rows(table, tokens), (tokens, table[:, :0])


def _rows_bwd(saved: tuple[Array, Array], d_rows: Array) -> tuple[Array, None]:
    tokens, empty = saved
    tokens, d_rows = constrain(tokens, None, None), constrain(d_rows, None, None, "embed")
    zeros = constrain(jnp.zeros((empty.shape[0], d_rows.shape[-1]), jnp.float32), "vocab", "embed")
    d_table = zeros.at[tokens].add(d_rows.astype(jnp.float32))
    return constrain(d_table, "vocab", "embed").astype(empty.dtype), None


_rows.defvjp(_rows_fwd, _rows_bwd)


def embed_tokens(params: Params, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Looks up the embedding of each token, in the dtype of the table. Gradients are summed in float32."""
    return tap("embedding", _rows(params["embed"], tokens))


def run_blocks(
    params: Params,
    config: PolicyConfig,
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    attention_fn: AttentionFn,
    carry: Any = (),
    *,
    routing: Routing | None = None,
    remat: Remat = "none",
    unrolled: int = 0,
    rotate: Rotate = rotate,
) -> tuple[Float[Array, "b t d"], Any, ForwardStats]:
    """Scans the blocks over ``x`` and applies the final norm.

    Args:
      params: The pytree of parameters, in the compute dtype.
      positions: The rotary position of each token inside its own segment.
      attention_fn: A function that computes the attention of one layer's heads. It takes and returns ``carry``.
      carry: The state that is passed through the blocks, such as a cache.
      routing: The input of the routers of a policy with experts. Its choices have a leading layers axis.
      remat: The choice between values that the forward pass saves and values that the backward pass recomputes.
      unrolled: The value of ``Kernels.unrolled``.
      rotate: The implementation of the rotary embedding.

    Returns:
      The hidden states in the dtype of ``x``, the carry, and the measurements of the forward.
    """
    graphdef = _declaration(config).block
    if config.num_experts and routing is None:
        routing = Routing()
    tables = rotary_tables(positions, config.head_dim, config.rope_theta)

    def at_positions(heads: Array) -> Array:
        return rotate(heads, tables)

    def body(
        state: tuple[Array, Any], layer: tuple[Any, Array, Any, Substitutes]
    ) -> tuple[tuple[Array, Any], tuple[BlockStats, Values]]:
        x, carry = checkpoint_name(state[0], _BLOCK_INPUT), state[1]
        block = nnx.merge(graphdef, layer[0])
        routed = None if routing is None else routing._replace(choices=layer[2])
        with recording_layer(layer[3]) as recorded:
            x, carry, stats = block(x, at_positions, functools.partial(attention_fn, carry, layer[1]), routed)
        return (x, carry), (stats, recorded)

    if remat != "none":
        body = jax.checkpoint(body, prevent_cse=False, policy=_SAVED[remat])
    x = split_tokens(x)
    choices = None if routing is None else routing.choices
    layers = (params["layers"], jnp.arange(config.num_layers), choices, substitutes_of_layers())
    one_by_one = remat == "none" and config.num_layers <= unrolled
    (x, carry), (stats, recorded) = jax.lax.scan(body, (x, carry), layers, unroll=one_by_one)
    record_layers(recorded)
    hidden = tap("final_norm", all_tokens(rms_norm(x, params["final_norm"]["scale"], config.rms_norm_eps)))
    return hidden, carry, ForwardStats(jnp.maximum(jnp.max(stats.inside), jnp.max(stats.outside)), stats.router)


_OF_ROWS = ("scale", "query_bias", "key_bias", "value_bias")
"""The vectors of a block that multiply every token or are added to it."""


def _vectors_of_rows(layers: Params, rows: int) -> Params:
    """Copies each norm's scale and each bias of the blocks for every row, float32 [layers, b, ...].

    The gradients of the rows are then added up once for all blocks, not in every block.
    """

    def copied(path: tuple[Any, ...], leaf: Array) -> Array:
        if path[-1].key not in _OF_ROWS:
            return leaf
        copies = jnp.broadcast_to(leaf.astype(jnp.float32)[:, None], (leaf.shape[0], rows, *leaf.shape[1:]))
        return constrain(copies, "layers", "rows", *[None] * (leaf.ndim - 1))

    return jax.tree_util.tree_map_with_path(copied, layers)


def hidden_states(
    params: Params,
    config: PolicyConfig,
    tokens: Int[Array, "b t"],
    ends: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    *,
    remat: Remat = "none",
    kernels: Kernels = ON_ANY_BACKEND,
    choices: Int[Array, "b t l k"] | None = None,
) -> tuple[Float[Array, "b t d"], ForwardStats]:
    """Computes the hidden states of packed rows of trees, ready for the LM head. A token sees the tokens of its path.

    If several devices share a row (``kernels.parts``), all arrays but ``ends`` are folded (``context.fold``).

    Args:
      params: The pytree of parameters, in the compute dtype.
      ends: The place after the last token of each token's subtree, as in ``rljax.policy.trees``; 0 for padding.
      positions: The position 0, 1, 2, ... of each token in its sequences.
      remat: The choice between values that the forward pass saves and values that the backward pass recomputes.
      choices: The experts that each token must go to, [b, t, layers, k], -1 where the router is free. None: it is free
        everywhere.

    Returns:
      The hidden states in the compute dtype, and the measurements of the forward.
    """

    def attention_fn(carry: Any, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        del layer
        return kernels.attention(q, k, v, ends), carry

    x = embed_tokens(params, tokens)
    params = params | {"layers": _vectors_of_rows(params["layers"], tokens.shape[0])}
    routing = None
    if config.num_experts:
        is_token = fold(ends, kernels.parts) > 0
        routing = Routing(is_token, None if choices is None else jnp.moveaxis(choices, 2, 0), kernels.grouped)
    how: dict[str, Any] = {"remat": remat, "unrolled": kernels.unrolled, "rotate": kernels.rotate}
    hidden, _, stats = run_blocks(params, config, x, positions, attention_fn, routing=routing, **how)
    return hidden, stats
