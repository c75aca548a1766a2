"""The experts of a mixture and their router. No token is dropped.

1. Gather the tokens of the devices that share the experts, and sort the pairs of token and choice by expert.
2. In rounds: compute the grouped products, weight them by the gates, and add them up for each token.
3. Return its tokens to every device.

Experts are split over the mesh axis ``expert``, which also splits rows. Each device receives the tokens of all devices
that hold other experts, and computes the pairs that go to its own experts. The results are added and scattered. The
inner width of an expert is split over ``tp``, as in a plain MLP. A round has room for somewhat more than a device's
share of the pairs. With uneven routing a device takes more rounds. The backward pass keeps only the tokens and computes
gate and up again. Products have the dtype of the activations and accumulate in float32. Across devices, sums of
activations travel in that dtype, and sums of the gradients of weights in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.grouped import Grouped
from rljax.policy.layers import Routing, RoutingRecord, param
from rljax.sharding import axis_size, on_each_device, split_over

_SLACK = 1.25  # ratio of the room of a round to a device's share of the pairs, if experts are split
_MULTIPLE = 256  # If experts are split, the room of a round (pairs) is a multiple of it, or the number of all pairs.


def _inner(width: str | None) -> tuple[tuple[str | None, ...], ...]:
    """Returns the logical axes of gate, up and down. A device computes with the whole model width (None)."""
    return ("experts", width, "mlp"), ("experts", width, "mlp"), ("experts", "mlp", width)


class Experts(nnx.Module):
    """A float32 router and e SwiGLUs, which replace a block's MLP. Each token goes to k of the SwiGLUs."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        d, e, f = c.hidden_size, c.num_experts, c.expert_size
        into, back = ("experts", "expert_embed", "mlp"), ("experts", "mlp", "expert_embed")
        self.k, self.normalize = c.experts_per_token, c.normalize_gates
        self.router = param(rngs, (d, e), ("embed", "router"), normal, "mlp.gate.weight", 1)
        self.gate = param(rngs, (e, d, f), into, normal, "mlp.experts.{}.gate_proj.weight", 1)
        self.up = param(rngs, (e, d, f), into, normal, "mlp.experts.{}.up_proj.weight", 1)
        self.down = param(rngs, (e, f, d), back, normal, "mlp.experts.{}.down_proj.weight", 1)

    def __call__(self, x: Float[Array, "b t d"], routing: Routing) -> tuple[Array, Array, RoutingRecord]:
        """Sends each token to its experts and adds up their outputs.

        Returns the output in the dtype of ``x``, the largest absolute values inside the experts [b, 1, n] for n parts
        of their inner width, and the record of the routing.
        """
        probabilities = jax.nn.softmax(router_logits(x, self.router[...]), axis=-1)
        gates, own = jax.lax.top_k(probabilities, self.k)
        choices = own
        if routing.choices is not None:
            choices = jnp.where(routing.choices < 0, own, routing.choices)
            gates = jnp.take_along_axis(probabilities, choices, axis=-1)
        if self.normalize:
            gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        weights = (self.gate[...], self.up[...], self.down[...])
        out, inside = experts(routing.grouped, x, choices, gates, weights)
        return out, jax.lax.stop_gradient(inside)[:, None], _routed(probabilities, own, choices, routing)


@jax.custom_vjp
def router_logits(x: Float[Array, "b t d"], weight: Float[Array, "d e"]) -> Float[Array, "b t e"]:
    """Computes a router's logits, float32. The operands of the backward products have the dtype of ``x``."""
    return jnp.einsum("btd,de->bte", x, weight, preferred_element_type=jnp.float32)


def _router_logits_fwd(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return router_logits(x, weight), (x, weight)


def _router_logits_bwd(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, weight = saved
    cotangent = cotangent.astype(x.dtype)
    d_x = jnp.einsum("bte,de->btd", cotangent, weight, preferred_element_type=jnp.float32)
    d_weight = jnp.einsum("btd,bte->de", x, cotangent, preferred_element_type=jnp.float32)
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype)


router_logits.defvjp(_router_logits_fwd, _router_logits_bwd)


def _routed(probabilities: Array, own: Array, choices: Array, routing: Routing) -> RoutingRecord:
    """Records the routing of a block. ``own`` are the router's choices, even if others are replayed."""
    valid = jnp.ones(choices.shape[:2], bool) if routing.valid is None else routing.valid
    chosen = choices[..., None] == jnp.arange(probabilities.shape[-1])[None, None, None]
    logarithms = jnp.log(jnp.maximum(probabilities, jnp.finfo(jnp.float32).tiny))
    of_token = -jnp.sum(probabilities * logarithms, axis=-1)
    given = jnp.zeros(choices.shape, bool) if routing.choices is None else routing.choices >= 0
    given &= valid[..., None]
    agrees = jnp.any(choices[..., None] == own[..., None, :], axis=-1)
    return RoutingRecord(
        choices=choices,
        tokens=jnp.sum(valid, axis=1, dtype=jnp.int32),
        load=jnp.sum(chosen & valid[..., None, None], axis=(1, 2), dtype=jnp.int32),
        probability=jnp.sum(jnp.where(valid[..., None], probabilities, 0.0), axis=1),
        entropy=jax.lax.stop_gradient(jnp.sum(jnp.where(valid, of_token, 0.0), axis=1)),
        given=jnp.sum(given, axis=(1, 2), dtype=jnp.int32),
        differing=jnp.sum(given & ~agrees, axis=(1, 2), dtype=jnp.int32),
    )


class _MeshAxes(NamedTuple):
    """The mesh axes of each kind of work."""

    shared: tuple[str, ...]  # Tokens are gathered over these axes, and results are scattered.
    experts: tuple[str, ...]  # Along these axes, devices hold different experts.
    inner: tuple[str, ...]  # Along these axes, devices hold different parts of every expert's inner width.
    batch: tuple[str, ...]  # Along these axes, devices hold other tokens and the same experts.
    width: tuple[str, ...]  # The axes of ``batch`` that split the gradients of weights by the model width.


class _Round(NamedTuple):
    """A window of the sorted pairs."""

    first: Int[Array, ""]  # place of the first pair
    token: Int[Array, " c"]  # token of each pair
    weight: Float[Array, "c 1"]  # gate of each pair; 0 after this device's pairs
    sizes: Int[Array, " e"]  # number of pairs of each expert


class _SortedPairs(NamedTuple):
    """Pairs of n tokens and their k choices, sorted by this device's e experts; pairs of other devices come last."""

    pair: Int[Array, " m"]  # index of each pair among the n times k, token by token; padded to whole rounds
    place: Int[Array, "n k"]  # place of each pair in the sorted order
    gates: Float[Array, "n k"]  # 0 where the expert is on another device
    ends: Int[Array, " e"]  # place after the last pair of each expert
    room: int  # number of pairs in a round

    def window(self, number: Int[Array, ""] | int) -> _Round:
        """Returns the pairs of one round."""
        first = jnp.int32(number * self.room)
        pair = jax.lax.dynamic_slice_in_dim(self.pair, first, self.room)
        inside = jnp.clip(self.ends - first, 0, self.room)
        weight = jnp.where(jnp.arange(self.room) < inside[-1], self.gates.reshape(-1)[pair], 0.0)
        return _Round(first, pair // self.gates.shape[1], weight[:, None], jnp.diff(inside, prepend=0))

    def add_up(self, pairs: _Round, values: Float[Array, "c d"], weights: Float[Array, "n k"]) -> Float[Array, "n d"]:
        """Computes for each token the weighted sum over its choices in a round, in float32."""
        place, here = self._places(pairs)
        weights = jnp.where(here, weights, 0.0)
        terms = (weights[:, i, None] * values[place[:, i]].astype(jnp.float32) for i in range(place.shape[1]))
        return functools.reduce(jnp.add, terms)

    def of_pairs(self, pairs: _Round, values: Float[Array, " c"]) -> Float[Array, "n k"]:
        """Arranges the values of a round by token and choice; 0 for pairs of other rounds."""
        place, here = self._places(pairs)
        return jnp.where(here, values[place], 0.0)

    def _places(self, pairs: _Round) -> tuple[Array, Array]:
        """Returns the index of each pair in a round, and whether the pair is in that round."""
        place = self.place - pairs.first
        here = (place >= 0) & (place < self.room)
        return jnp.where(here, place, 0), here

    def over_rounds(self, body: Callable[[_Round, Any], Any], start: Any) -> Any:
        """Folds ``body`` over the rounds. There is one round without a loop if all pairs fit."""
        if self.room == len(self.pair):
            return body(self.window(0), start)
        rounds = -(-self.ends[-1] // self.room)
        return jax.lax.fori_loop(0, rounds, lambda number, so_far: body(self.window(number), so_far), start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts(
    grouped: Grouped,
    x: Float[Array, "b t d"],
    choices: Int[Array, "b t k"],
    gates: Float[Array, "b t k"],
    weights: tuple[Float[Array, "e d f"], Float[Array, "e d f"], Float[Array, "e f d"]],
) -> tuple[Float[Array, "b t d"], Float[Array, "b n"]]:
    """Sums, over the choices of each token, its float32 gate times the output of the chosen expert.

    An expert is a SwiGLU with the matrices gate, up and down of ``weights``, in the dtype of ``x``. Returns the sums in
    this dtype, and the largest absolute values inside the experts. Only their maximum over all rows is exact.
    """
    mesh = _axes(*x.shape[::2])

    def of_device(x: Array, choices: Array, gates: Array, gate: Array, up: Array, down: Array) -> tuple[Array, Array]:
        tokens, all_choices, all_gates = _gathered(mesh, x, choices, gates)
        order = _sort(mesh, all_choices, all_gates, len(gate))

        def add(pairs: _Round, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            rows = tokens[pairs.token]
            gated, upped = (grouped.product(rows, matrix, pairs.sizes) for matrix in (gate, up))
            inner = jax.nn.silu(gated) * upped
            out = order.add_up(pairs, grouped.product(inner, down, pairs.sizes), order.gates)
            return so_far[0] + out, jnp.maximum(so_far[1], jnp.max(jnp.abs(inner)).astype(jnp.float32))

        out, largest = order.over_rounds(add, (jnp.zeros(tokens.shape, jnp.float32), jnp.float32(0.0)))
        return _given_back(mesh, out.astype(x.dtype), x.shape), jnp.broadcast_to(largest, (len(x), 1))

    rows = ("rows", None, None)
    run = on_each_device(of_device, (rows, rows, rows, *_inner(None)), (rows, ("rows", "mlp")), rows=x.shape[0])
    out, largest = run(x, choices, gates, *weights)
    return out, largest


def _forward(grouped: Grouped, x: Array, choices: Array, gates: Array, weights: Any) -> tuple[Any, Any]:
    assert x.shape[0] % axis_size("rows") == 0, "the mesh does not divide the rows of a micro-batch"
    return experts(grouped, x, choices, gates, weights), (x, choices, gates, weights)


def _backward(grouped: Grouped, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    x, choices, gates, weights = saved
    mesh = _axes(*x.shape[::2])

    def of_device(x: Array, choices: Array, gates: Array, gate: Array, up: Array, down: Array, d_out: Array) -> Any:
        tokens, all_choices, all_gates, d_tokens = _gathered(mesh, x, choices, gates, d_out)
        order = _sort(mesh, all_choices, all_gates, len(gate))
        ones = jnp.ones_like(all_gates)

        def add(pairs: _Round, so_far: Any) -> Any:
            rows, d_rows = tokens[pairs.token], d_tokens[pairs.token]
            gated, upped = (grouped.product(rows, matrix, pairs.sizes) for matrix in (gate, up))
            silu, d_silu = jax.vjp(jax.nn.silu, gated)
            inner = (silu * upped).astype(jnp.float32)
            unweighted = grouped.product(d_rows, down, pairs.sizes, transposed=True).astype(jnp.float32)
            d_inner = (pairs.weight * unweighted).astype(x.dtype)
            (d_gated,), d_upped = d_silu(d_inner * upped), d_inner * silu
            d_down = grouped.outer((pairs.weight * inner).astype(x.dtype), d_rows, pairs.sizes)
            d_gate, d_up = (grouped.outer(rows, each, pairs.sizes) for each in (d_gated, d_upped))
            parts = [
                grouped.product(each, matrix, pairs.sizes, transposed=True)
                for each, matrix in ((d_gated, gate), (d_upped, up))
            ]
            d_x = functools.reduce(jnp.add, (order.add_up(pairs, part, ones) for part in parts))
            d_gates = order.of_pairs(pairs, jnp.sum(inner * unweighted, axis=1))
            gradients = (d_x, d_gates, d_gate, d_up, d_down)
            return jax.tree.map(lambda total, more: total + more.astype(jnp.float32), so_far, gradients)

        start = [jnp.zeros(each.shape, jnp.float32) for each in (tokens, all_gates, gate, up, down)]
        d_x, d_gates, *d_weights = order.over_rounds(add, tuple(start))
        return (
            _given_back(mesh, d_x.astype(x.dtype), x.shape),
            _given_back(mesh, d_gates, gates.shape),
            *(_of_batch(mesh, each, axis) for each, axis in zip(d_weights, (1, 1, 2), strict=True)),
        )

    rows, width = ("rows", None, None), "expert_embed" if mesh.width else None
    axes = (rows, rows, rows, *_inner(None), rows)
    run = on_each_device(of_device, axes, (rows, rows, *_inner(width)), rows=x.shape[0])
    d_x, d_gates, *d_weights = run(x, choices, gates, *weights, cotangents[0])
    return d_x, None, d_gates, tuple(d.astype(w.dtype) for d, w in zip(d_weights, weights, strict=True))


def _axes(rows: int, d: int) -> _MeshAxes:
    """Returns the axes on the mesh of the context. Rows that the mesh does not divide are on every device."""
    own = split_over("experts")
    by_rows = split_over("rows") if rows % axis_size("rows") == 0 else ()
    batch = tuple(axis for axis in by_rows if axis not in own)
    width = split_over("expert_embed") if d % axis_size("expert_embed") == 0 else ()
    shared = tuple(axis for axis in own if axis in by_rows)
    return _MeshAxes(shared, own, split_over("mlp"), batch, tuple(axis for axis in width if axis in batch))


def _gathered(mesh: _MeshAxes, *arrays: Array) -> tuple[Array, ...]:
    """Gathers arrays [b, t, ...] of all devices that share these tokens, as [n, ...]."""
    if mesh.shared:
        arrays = tuple(jax.lax.all_gather(array, mesh.shared, axis=0, tiled=True) for array in arrays)
    return tuple(array.reshape(-1, *array.shape[2:]) for array in arrays)


def _given_back(mesh: _MeshAxes, values: Array, shape: tuple[int, ...]) -> Array:
    """Sums values [n, ...] over the devices that share tokens, and keeps this device's tokens [b, t, ...]."""
    whole = values.reshape(-1, *shape[1:])
    if mesh.inner:
        whole = jax.lax.psum(whole, mesh.inner)
    if mesh.shared:
        return jax.lax.psum_scatter(whole, mesh.shared, scatter_dimension=0, tiled=True)
    return jax.lax.psum(whole, mesh.experts) if mesh.experts else whole


def _sort(mesh: _MeshAxes, choices: Int[Array, "n k"], gates: Float[Array, "n k"], here: int) -> _SortedPairs:
    """Sorts the pairs by expert. ``here`` is the number of experts on this device."""
    first = jax.lax.axis_index(mesh.experts) * here if mesh.experts else 0
    local = choices - first
    mine = (local >= 0) & (local < here)
    keys = jnp.where(mine, local, here).reshape(-1)
    pair = jnp.argsort(keys, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(keys[pair], jnp.arange(here), side="right").astype(jnp.int32)
    place = jnp.zeros(len(pair), jnp.int32).at[pair].set(jnp.arange(len(pair), dtype=jnp.int32), unique_indices=True)
    room = round_size(len(pair), jax.lax.psum(1, mesh.experts) if mesh.experts else 1)
    filled = jnp.pad(pair, (0, -len(pair) % room))
    return _SortedPairs(filled, place.reshape(choices.shape), jnp.where(mine, gates, 0.0), ends, room)


def round_size(pairs: int, ways: int) -> int:
    """Returns how many of ``pairs`` pairs of token and choice a round has; all if experts are whole (``ways`` 1)."""
    if ways == 1:
        return pairs
    return min(pairs, -(-math.ceil(_SLACK * pairs / ways) // _MULTIPLE) * _MULTIPLE)


def _of_batch(mesh: _MeshAxes, gradient: Array, width: int) -> Array:
    """Sums the gradient of a weight in float32 over the devices with other tokens, and keeps this device's width."""
    gradient = gradient.astype(jnp.float32)
    if mesh.width:
        gradient = jax.lax.psum_scatter(gradient, mesh.width, scatter_dimension=width, tiled=True)
    rest = tuple(axis for axis in mesh.batch if axis not in mesh.width)
    return jax.lax.psum(gradient, rest) if rest else gradient


experts.defvjp(_forward, _backward)
