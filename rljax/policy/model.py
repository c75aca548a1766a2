"""A policy: the decoder that its family declares, as a plain pytree of arrays.

Abstract shapes, shardings, initial values and the layout of checkpoints all derive from the declaration. The optimizer,
checkpoints and engines hold the pytree (``nnx.to_pure_dict``). The family's pattern of blocks is repeated in periods.
Each block of the pattern is stacked on a leading axis over the periods, and the forward scans over the periods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.context import fold
from rljax.policy.families import FAMILIES, blocks_of
from rljax.policy.flash import LSE_NAME, OUT_NAME
from rljax.policy.kernels import ON_ANY_BACKEND, Kernels
from rljax.policy.layers import (
    PRODUCT,
    BlockStats,
    Declarations,
    ParamDeclaration,
    Routing,
    RoutingRecord,
    all_tokens,
    param,
    split_tokens,
)
from rljax.policy.mixers import BlockState, Where
from rljax.policy.rotary import rotation
from rljax.policy.taps import Substitutes, Values, record_stack, recording_layer, stack_paths, substitutes_of_stack, tap
from rljax.sharding import constrain

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
States = tuple[tuple[Array, ...], ...]
"""The states of decoding: for each block of a period, the arrays of its mixer with a leading axis over the periods."""


class ForwardStats(NamedTuple):
    """Measurements of a forward.

    In float16 the residual stream and the MLPs' products overflow first, at 65,504.
    """

    activation_max: Float[Array, ""]  # the largest absolute value in the residual stream and in the MLPs' products
    router: RoutingRecord | None  # the routing of a policy with experts, with a leading layers axis; else None


class _Decoder(nnx.Module):
    """The declaration of all parameters. ``layers`` is a stack of blocks, or has one for each block of a period."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        table = (c.vocab_size, c.hidden_size)
        self.embed = param(rngs, table, ("vocab", "embed"), normal, "model.embed_tokens.weight")
        family = FAMILIES[c.family]
        periods = family.periods(c)
        stacks = [
            nnx.vmap(functools.partial(kind.declare, c), in_axes=0, axis_size=periods)(rngs.split(periods))
            for kind in family.pattern
        ]
        self.layers = stacks[0] if len(stacks) == 1 else nnx.Dict({str(i): stack for i, stack in enumerate(stacks)})
        self.final_norm = family.norm(c.hidden_size, c.rms_norm_eps, rngs, "model.norm.weight")
        if not c.tie_word_embeddings:
            self.lm_head = param(rngs, table, ("vocab", "embed"), normal, "lm_head.weight")


class _Declaration(NamedTuple):
    blocks: list[Any]  # the graphdef of each block of a period
    final_norm: Any  # the graphdef of the final norm
    params: Declarations


@functools.lru_cache(maxsize=32)
def _declaration(config: PolicyConfig) -> _Declaration:
    model = nnx.eval_shape(lambda: _Decoder(config, nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    params: Any = Declarations()
    shapes = flatten_dict(nnx.to_pure_dict(state))
    blocks = blocks_of(config)
    stacks = stack_paths(len(blocks))
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        axes, stored = metadata["logical"], metadata["stored"]
        for first, stack in enumerate(stacks):
            if path[: len(stack)] == stack:
                numbers = range(first, config.num_layers, len(stacks))
                axes = ("layers", *axes)
                stored = stored._replace(name="model.layers.{}." + stored.name, blocks=numbers)
        params[path] = ParamDeclaration(shapes[path].shape, axes, stored)
    return _Declaration([nnx.split(block)[0] for block in blocks], nnx.split(model.final_norm)[0], params)


def declared_params(config: PolicyConfig) -> Declarations:
    """Returns the declarations of a policy's parameters. In tensors' names, the first ``{}`` is the block's number."""
    return _declaration(config).params


def abstract_params(config: PolicyConfig) -> Params:
    """Returns a policy's pytree with a float32 ``jax.ShapeDtypeStruct`` at each leaf."""
    return declared_params(config).abstract()


def logical_axes(config: PolicyConfig) -> Params:
    """Returns a policy's pytree with a tuple of logical axis names at each leaf."""
    return declared_params(config).axes()


def gathered_axes(config: PolicyConfig) -> Params:
    """Returns the ``logical_axes`` with None for the model width, which is then not split over the mesh."""

    def gathered(axes: tuple[str, ...]) -> tuple[str | None, ...]:
        return tuple(None if axis in ("embed", "expert_embed") else axis for axis in axes)

    return jax.tree.map(gathered, logical_axes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))


def param_shardings(config: PolicyConfig, mesh: jax.sharding.Mesh) -> Params:
    """Returns a policy's pytree with a NamedSharding at each leaf."""
    return declared_params(config).shardings(mesh)


def init_params(config: PolicyConfig, seed: int) -> Params:
    """Returns new random parameters of a policy, float32. The same seed gives the same bits."""
    return nnx.to_pure_dict(nnx.state(_Decoder(config, nnx.Rngs(seed)), nnx.Param))


def cast_params(params: Params, dtype: Any) -> Params:
    """Casts every parameter to ``dtype``, such as the compute dtype of the trainer or of an engine."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def copy_params(params: Params, dtype: Any) -> Params:
    """Copies every parameter into new memory in ``dtype``, so that a donation of ``params`` leaves the copy intact."""
    return jax.tree.map(lambda p: jnp.array(p, dtype=dtype, copy=True), params)


def lm_head_table(params: Params) -> Float[Array, "v d"]:
    """Returns the table of the LM head, which is the embedding table if the two are tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


@jax.custom_vjp
def _rows(table: Array, tokens: Array) -> Array:
    """Looks up rows without gathering the table: each device looks in its own piece for the tokens of all devices."""
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
    where: Where,
    states: States = (),
    *,
    routing: Routing = Routing(),  # noqa: B008 (it is immutable)
    remat: Remat = "none",
    unrolled: int = 0,
) -> tuple[Float[Array, "b t d"], States, ForwardStats]:
    """Runs the blocks on ``x``, in a scan over the periods, and applies the final norm.

    Args:
      params: The pytree of parameters, in the compute dtype.
      where: The tokens of ``x``: the position of each token, and which tokens see each other.
      states: The states of decoding before the tokens, or () for packed rows.
      routing: The input of the routers of a policy with experts. Its choices have a leading layers axis.
      remat: The choice between values that the forward pass saves and values that the backward pass recomputes.
      unrolled: The value of ``Kernels.unrolled``.

    Returns:
      The hidden states in the dtype of ``x``, the states after the tokens, and the measurements of the forward.
    """
    graphs, final_norm, *_ = _declaration(config)
    stacks = stack_paths(len(graphs))

    def run_block(
        graph: Any, x: Array, state: Any, weights: Any, period: Array, choices: Any, given: Substitutes
    ) -> Any:
        x, block = checkpoint_name(x, _BLOCK_INPUT), nnx.merge(graph, weights)
        with recording_layer(given) as recorded:
            before = BlockState(state, period) if state else None
            x, after, stats = block(x, where, before, routing._replace(choices=choices))
        return x, () if after is None else after.arrays, (stats, recorded)

    blocks: list[Callable[..., Any]] = [functools.partial(run_block, graph) for graph in graphs]
    if remat != "none":
        blocks = [jax.checkpoint(run, prevent_cse=False, policy=_SAVED[remat]) for run in blocks]

    def body(carry: tuple[Array, States], layers: Any) -> tuple[tuple[Array, States], list[tuple[BlockStats, Values]]]:
        (x, states), (weights, period, choices, substitutes) = carry, layers
        after, measured = [], []
        for run, state, *of_block in zip(blocks, states, weights, choices, substitutes, strict=True):
            x, state, numbers = run(x, state, of_block[0], period, *of_block[1:])
            after.append(state)
            measured.append(numbers)
        return (x, tuple(after)), measured

    x, states = split_tokens(x), states or ((),) * len(graphs)
    weights = [functools.reduce(lambda tree, key: tree[key], stack, params) for stack in stacks]
    periods, choices = jnp.arange(config.num_layers // len(graphs)), _by_block(routing.choices, len(graphs))
    layers = weights, periods, choices, [substitutes_of_stack(stack) for stack in stacks]
    one_by_one = remat == "none" and config.num_layers <= unrolled
    (x, states), measured = jax.lax.scan(body, (x, states), layers, unroll=one_by_one)
    for stack, (_, recorded) in zip(stacks, measured, strict=True):
        record_stack(stack, recorded)
    hidden = tap("final_norm", all_tokens(nnx.merge(final_norm, params["final_norm"])(x)))
    stats = [of_block for of_block, _ in measured]
    largest = functools.reduce(jnp.maximum, [jnp.max(x) for each in stats for x in (each.inside, each.outside)])
    return hidden, states, ForwardStats(largest, _in_order([each.router for each in stats]))


def _by_block(x: Array | None, period: int) -> list[Array | None]:
    """Splits an array over the layers into one array over the periods for each block of a period."""
    return [x] if period == 1 else [None if x is None else x[i::period] for i in range(period)]


def _in_order(each: Sequence[Any]) -> Any:
    """Joins pytrees of arrays over the periods, one for each block of a period, into one pytree over the layers."""
    if len(each) == 1:
        return each[0]
    return jax.tree.map(lambda *x: jnp.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *each)


def _vectors_of_rows(layers: Params, rows: int) -> Params:
    """Copies each norm's scale and each bias of the blocks for every row, float32 [layers, b, ...].

    The gradients of the rows are then added up once for all blocks, not in every block.
    """

    def copied(path: tuple[Any, ...], leaf: Array) -> Array:
        if not path[-1].key.endswith(("scale", "_bias")):
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
    """Computes the hidden states of packed rows of trees (``score.PrefixTrees``), ready for the LM head.

    If several devices share a row (``kernels.parts``), all arrays but ``ends`` are folded (``context.fold``).

    Args:
      params: The pytree of parameters, in the compute dtype.
      ends: The index after the last token of each token's subtree, as in ``rljax.policy.score``; 0 for padding.
      positions: The position 0, 1, 2, ... of each token in its sequences.
      remat: The choice between values that the forward pass saves and values that the backward pass recomputes.
      choices: The experts that each token must go to, [b, t, layers, k], -1 where the router is free. None: it is free
        everywhere.

    Returns:
      The hidden states in the compute dtype, and the measurements of the forward.
    """

    def attend(q: Array, k: Array, v: Array, state: BlockState | None) -> tuple[Array, BlockState | None]:
        return kernels.attention(q, k, v, ends), state

    x = embed_tokens(params, tokens)
    params = params | {"layers": _vectors_of_rows(params["layers"], tokens.shape[0])}
    valid = fold(ends, kernels.parts) > 0
    routing = Routing(valid, None if choices is None else jnp.moveaxis(choices, 2, 0), kernels.grouped)
    where = Where(rotation(config, positions, kernels.rotate), attend, positions, valid, kernels.parts)
    how: dict[str, Any] = {"routing": routing, "remat": remat, "unrolled": kernels.unrolled}
    hidden, _, stats = run_blocks(params, config, x, where, **how)
    return hidden, stats
