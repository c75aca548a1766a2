"""A mixture's experts, applied to the tokens that were sent to them: no token is dropped, none waits for room.

    gather the tokens of the devices that share the experts -> sort pairs of token and choice by expert -> in rounds:
    grouped products, weighed by the gates and added up for each token -> give every device its tokens back

Experts are split over the mesh axis ``expert``, which splits rows, too. Each device gets the tokens of all that hold
other experts beside its own, computes what goes to its experts, and the results are added and scattered. Inside an
expert the inner width is split over ``tp``, as that of a dense MLP. A round has room for somewhat more than a device's
share of the pairs; where the routing is uneven a device takes more rounds. The backward pass keeps the tokens alone and
computes gate and up again. Products are of the activations' dtype and accumulate in float32; sums across devices of
activations travel in that dtype, those of weights' gradients in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.policy.grouped import Grouped
from rljax.sharding import axis_size, on_each_device, split_over

_SLACK = 1.25
"""Room of a round over a device's share of the pairs, where experts are split."""
_MULTIPLE = 256
_INNER: tuple[tuple[str | None, ...], ...] = (
    ("experts", None, "mlp"),
    ("experts", None, "mlp"),
    ("experts", "mlp", None),
)
"""Logical axes of gate, up and down as a device computes with them: of the model's width it has all."""


class _Mesh(NamedTuple):
    """Mesh axes by what the work across them is."""

    shared: tuple[str, ...]  # tokens are gathered over them, and results scattered
    experts: tuple[str, ...]  # a device has some of the experts
    inner: tuple[str, ...]  # a device has a part of every expert's inner width
    batch: tuple[str, ...]  # a device has other tokens, and the same experts
    width: tuple[str, ...]  # of them, those that split the gradients of weights by the model's width


class _Round(NamedTuple):
    """A window of the sorted pairs."""

    first: Int[Array, ""]
    token: Int[Array, " c"]
    weight: Float[Array, "c 1"]  # the gate of each pair; 0 after this device's pairs
    sizes: Int[Array, " e"]  # pairs of each expert


class _Sorted(NamedTuple):
    """Pairs of n tokens and their k choices, in the order of this device's e experts, all others at the end."""

    pair: Int[Array, " m"]  # of n times k, token by token; filled up to whole rounds
    place: Int[Array, "n k"]  # of each pair in the order
    gates: Float[Array, "n k"]  # 0 where the expert is on another device
    ends: Int[Array, " e"]  # place after the last pair of each expert
    room: int  # pairs of a round

    @property
    def rounds(self) -> Int[Array, ""]:
        """How many hold this device's pairs."""
        return -(-self.ends[-1] // self.room)

    def window(self, number: Int[Array, ""] | int) -> _Round:
        """The pairs of one round."""
        first = jnp.int32(number * self.room)
        pair = jax.lax.dynamic_slice_in_dim(self.pair, first, self.room)
        inside = jnp.clip(self.ends - first, 0, self.room)
        weight = jnp.where(jnp.arange(self.room) < inside[-1], self.gates.reshape(-1)[pair], 0.0)
        return _Round(first, pair // self.gates.shape[1], weight[:, None], jnp.diff(inside, prepend=0))

    def add_up(self, one: _Round, values: Float[Array, "c d"], weights: Float[Array, "n k"]) -> Float[Array, "n d"]:
        """Of each token the weighed sum over its choices in a round, in float32."""
        place, here = self._places(one)
        weights = jnp.where(here, weights, 0.0)
        terms = (weights[:, i, None] * values[place[:, i]].astype(jnp.float32) for i in range(place.shape[1]))
        return functools.reduce(jnp.add, terms)

    def of_pairs(self, one: _Round, values: Float[Array, " c"]) -> Float[Array, "n k"]:
        """A round's values by token and choice; 0 where the pair is in another round."""
        place, here = self._places(one)
        return jnp.where(here, values[place], 0.0)

    def _places(self, one: _Round) -> tuple[Array, Array]:
        """Place of each pair in a round, and whether it is in it."""
        place = self.place - one.first
        here = (place >= 0) & (place < self.room)
        return jnp.where(here, place, 0), here

    def over_rounds(self, body: Callable[[_Round, Any], Any], start: Any) -> Any:
        """``body`` folded over the rounds; of one alone where all pairs fit."""
        if self.room == len(self.pair):
            return body(self.window(0), start)
        return jax.lax.fori_loop(0, self.rounds, lambda number, so_far: body(self.window(number), so_far), start)


def experts(
    grouped: Grouped,
    x: Float[Array, "b t d"],
    choices: Int[Array, "b t k"],
    gates: Float[Array, "b t k"],
    weights: tuple[Float[Array, "e d f"], Float[Array, "e d f"], Float[Array, "e f d"]],
) -> tuple[Float[Array, "b t d"], Float[Array, "b f"]]:
    """The sum over a token's choices of gate times down(silu(gate(x)) * up(x)) of that expert.

    Args:
      grouped: implementation of the grouped products.
      x: tokens.
      choices: experts that each token goes to.
      gates: float32, what each is weighed by.
      weights: gate, up and down of all experts, in the dtype of ``x``.

    Returns:
      The sums, in the dtype of ``x``, and largest absolute values inside the experts, of which the largest is right.
    """
    out, inside = _experts(grouped, x, choices, gates, weights)
    return out, jax.lax.stop_gradient(inside)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(grouped: Grouped, x: Array, choices: Array, gates: Array, weights: Any) -> tuple[Array, Array]:
    mesh = _axes(*x.shape[::2])

    def of_device(x: Array, choices: Array, gates: Array, gate: Array, up: Array, down: Array) -> tuple[Array, Array]:
        tokens, chosen, weighed = _gathered(mesh, x, choices, gates)
        order = _sort(mesh, chosen, weighed, len(gate))

        def add(one: _Round, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            rows = tokens[one.token]
            gated, upped = (grouped.product(rows, matrix, one.sizes) for matrix in (gate, up))
            inner = jax.nn.silu(gated) * upped
            out = order.add_up(one, grouped.product(inner, down, one.sizes), order.gates)
            return so_far[0] + out, jnp.maximum(so_far[1], jnp.max(jnp.abs(inner)).astype(jnp.float32))

        out, largest = order.over_rounds(add, (jnp.zeros(tokens.shape, jnp.float32), jnp.float32(0.0)))
        return _given_back(mesh, out.astype(x.dtype), x.shape), jnp.broadcast_to(largest, (len(x), 1))

    rows = ("rows", None, None)
    run = on_each_device(of_device, (rows, rows, rows, *_INNER), (rows, ("rows", "mlp")), rows=x.shape[0])
    out, largest = run(x, choices, gates, *weights)
    return out, largest


def _forward(grouped: Grouped, x: Array, choices: Array, gates: Array, weights: Any) -> tuple[Any, Any]:
    assert x.shape[0] % axis_size("rows") == 0, "the mesh does not divide the rows of a micro-batch"
    return _experts(grouped, x, choices, gates, weights), (x, choices, gates, weights)


def _backward(grouped: Grouped, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    x, choices, gates, weights = saved
    mesh = _axes(*x.shape[::2])

    def of_device(
        x: Array, choices: Array, gates: Array, gate: Array, up: Array, down: Array, d_out: Array
    ) -> tuple[Array, ...]:
        tokens, chosen, weighed, d_tokens = _gathered(mesh, x, choices, gates, d_out)
        order = _sort(mesh, chosen, weighed, len(gate))
        ones = jnp.ones_like(weighed)

        def add(one: _Round, so_far: Any) -> Any:
            rows, d_rows = tokens[one.token], d_tokens[one.token]
            gated, upped = (grouped.product(rows, matrix, one.sizes) for matrix in (gate, up))
            silu, d_silu = jax.vjp(jax.nn.silu, gated)
            inner = (silu * upped).astype(jnp.float32)
            unweighed = grouped.product(d_rows, down, one.sizes, transposed=True).astype(jnp.float32)
            d_inner = (one.weight * unweighed).astype(x.dtype)
            (d_gated,), d_upped = d_silu(d_inner * upped), d_inner * silu
            d_down = grouped.outer((one.weight * inner).astype(x.dtype), d_rows, one.sizes)
            d_gate, d_up = (grouped.outer(rows, each, one.sizes) for each in (d_gated, d_upped))
            parts = [
                grouped.product(each, matrix, one.sizes, transposed=True)
                for each, matrix in ((d_gated, gate), (d_upped, up))
            ]
            d_x = functools.reduce(jnp.add, (order.add_up(one, part, ones) for part in parts))
            d_gates = order.of_pairs(one, jnp.sum(inner * unweighed, axis=1))
            found = (d_x, d_gates, d_gate, d_up, d_down)
            return jax.tree.map(lambda total, more: total + more.astype(jnp.float32), so_far, found)

        start = [jnp.zeros(each.shape, jnp.float32) for each in (tokens, weighed, gate, up, down)]
        d_x, d_gates, *d_weights = order.over_rounds(add, tuple(start))
        return (
            _given_back(mesh, d_x.astype(x.dtype), x.shape),
            _given_back(mesh, d_gates, gates.shape),
            *(_of_batch(mesh, each, axis) for each, axis in zip(d_weights, (1, 1, 2), strict=True)),
        )

    rows, width = ("rows", None, None), "expert_embed" if mesh.width else None
    by_weights = (("experts", width, "mlp"), ("experts", width, "mlp"), ("experts", "mlp", width))
    run = on_each_device(of_device, (rows, rows, rows, *_INNER, rows), (rows, rows, *by_weights), rows=x.shape[0])
    d_x, d_gates, *d_weights = run(x, choices, gates, *weights, cotangents[0])
    return d_x, None, d_gates, tuple(d.astype(w.dtype) for d, w in zip(d_weights, weights, strict=True))


def _axes(rows: int, d: int) -> _Mesh:
    """On the mesh of the context; ``rows`` that it does not divide are on every device."""
    own = split_over("experts")
    by_rows = split_over("rows") if rows % axis_size("rows") == 0 else ()
    batch = tuple(axis for axis in by_rows if axis not in own)
    width = split_over("expert_embed") if d % axis_size("expert_embed") == 0 else ()
    shared = tuple(axis for axis in own if axis in by_rows)
    return _Mesh(shared, own, split_over("mlp"), batch, tuple(axis for axis in width if axis in batch))


def _gathered(mesh: _Mesh, *arrays: Array) -> tuple[Array, ...]:
    """Arrays [b, t, ...] of all devices that share these tokens, as [n, ...]."""
    if mesh.shared:
        arrays = tuple(jax.lax.all_gather(array, mesh.shared, axis=0, tiled=True) for array in arrays)
    return tuple(array.reshape(-1, *array.shape[2:]) for array in arrays)


def _given_back(mesh: _Mesh, values: Array, shape: tuple[int, ...]) -> Array:
    """Values [n, ...] summed over the devices that hold parts of them, for the tokens of this device [b, t, ...]."""
    whole = values.reshape(-1, *shape[1:])
    if mesh.inner:
        whole = jax.lax.psum(whole, mesh.inner)
    if mesh.shared:
        return jax.lax.psum_scatter(whole, mesh.shared, scatter_dimension=0, tiled=True)
    return jax.lax.psum(whole, mesh.experts) if mesh.experts else whole


def _sort(mesh: _Mesh, choices: Int[Array, "n k"], gates: Float[Array, "n k"], here: int) -> _Sorted:
    """The pairs by expert; ``here`` experts are on this device."""
    first = jax.lax.axis_index(mesh.experts) * here if mesh.experts else 0
    local = choices - first
    mine = (local >= 0) & (local < here)
    keys = jnp.where(mine, local, here).reshape(-1)
    pair = jnp.argsort(keys, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(keys[pair], jnp.arange(here), side="right").astype(jnp.int32)
    place = jnp.zeros(len(pair), jnp.int32).at[pair].set(jnp.arange(len(pair), dtype=jnp.int32), unique_indices=True)
    room = round_size(len(pair), jax.lax.psum(1, mesh.experts) if mesh.experts else 1)
    filled = jnp.pad(pair, (0, -len(pair) % room))
    return _Sorted(filled, place.reshape(choices.shape), jnp.where(mine, gates, 0.0), ends, room)


def round_size(pairs: int, ways: int) -> int:
    """Pairs of a round: all of them where experts are not split."""
    if ways == 1:
        return pairs
    return min(pairs, -(-math.ceil(_SLACK * pairs / ways) // _MULTIPLE) * _MULTIPLE)


def _of_batch(mesh: _Mesh, gradient: Array, width: int) -> Array:
    """A weight's gradient summed over the devices that have other tokens, in float32; of its width a device's part."""
    gradient = gradient.astype(jnp.float32)
    if mesh.width:
        gradient = jax.lax.psum_scatter(gradient, mesh.width, scatter_dimension=width, tiled=True)
    rest = tuple(axis for axis in mesh.batch if axis not in mesh.width)
    return jax.lax.psum(gradient, rest) if rest else gradient


_experts.defvjp(_forward, _backward)
