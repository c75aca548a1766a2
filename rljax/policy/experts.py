"""A mixture's experts, applied to the tokens that were sent to them: no token is dropped, none waits for room.

    gather the tokens of the devices that share the experts -> sort pairs of token and choice by expert -> grouped
    products -> weigh by the gates, add up each token's -> give every device its tokens back

Experts are split over the mesh axis ``expert``, which splits rows, too. Each device gets the tokens of all that hold
other experts beside its own, computes what goes to its experts, and the results are added and scattered. Inside an
expert the inner width is split over ``tp``, as that of a dense MLP. Products are of the activations' dtype and
accumulate in float32; sums across devices of activations travel in that dtype, those of weights' gradients in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rljax.policy.grouped import Grouped
from rljax.policy.linear import PRODUCT
from rljax.sharding import axis_size, on_each_device, split_over

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


class _Sorted(NamedTuple):
    """Pairs of n tokens and their k choices, in the order of this device's e experts, all others at the end."""

    token: Int[Array, " m"]
    pair: Int[Array, " m"]
    place: Int[Array, "n k"]  # of each pair in the order
    mine: Array  # bool [n, k]: the expert is on this device
    sizes: Int[Array, " e"]


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
    out, inside, _, _ = _apply(grouped, x, choices, gates, weights)
    return out, inside


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


def _sort(mesh: _Mesh, choices: Int[Array, "n k"], here: int) -> _Sorted:
    first = jax.lax.axis_index(mesh.experts) * here if mesh.experts else 0
    local = choices - first
    mine = (local >= 0) & (local < here)
    keys = jnp.where(mine, local, here).reshape(-1)
    pair = jnp.argsort(keys, stable=True)
    ends = jnp.searchsorted(keys[pair], jnp.arange(here), side="right").astype(jnp.int32)
    place = jnp.zeros(len(pair), jnp.int32).at[pair].set(jnp.arange(len(pair), dtype=jnp.int32), unique_indices=True)
    return _Sorted(pair // choices.shape[1], pair, place.reshape(choices.shape), mine, jnp.diff(ends, prepend=0))


def _add_up(values: Float[Array, "m d"], weights: Float[Array, "n k"], place: Int[Array, "n k"]) -> Array:
    """Of each token the weighed sum over its choices [n, d], in float32."""
    terms = (weights[:, i, None] * values[place[:, i]].astype(jnp.float32) for i in range(place.shape[1]))
    return functools.reduce(jnp.add, terms)


def _apply(grouped: Grouped, x: Array, choices: Array, gates: Array, weights: Any) -> tuple[Array, ...]:
    """(sums [b, t, d], largest inside, and of each sorted pair what gate and up give [m, f])."""
    mesh = _axes(*x.shape[::2])

    def of_device(x: Array, choices: Array, gates: Array, gate: Array, up: Array, down: Array) -> tuple[Array, ...]:
        tokens, chosen, weighed = _gathered(mesh, x, choices, gates)
        order = _sort(mesh, chosen, len(gate))
        rows = tokens[order.token]
        gated, upped = (grouped.product(rows, matrix, order.sizes) for matrix in (gate, up))
        inner = jax.nn.silu(gated) * upped
        out = _add_up(grouped.product(inner, down, order.sizes), jnp.where(order.mine, weighed, 0.0), order.place)
        largest = jnp.broadcast_to(jnp.max(jnp.abs(inner)).astype(jnp.float32), (len(x), 1))
        return _given_back(mesh, out.astype(x.dtype), x.shape), largest, gated, upped

    rows = ("rows", None, None)
    run = on_each_device(of_device, (rows, rows, rows, *_INNER), (rows, *[("rows", "mlp")] * 3), rows=x.shape[0])
    return run(x, choices, gates, *weights)


def _forward(grouped: Grouped, x: Array, choices: Array, gates: Array, weights: Any) -> tuple[Any, Any]:
    assert x.shape[0] % axis_size("rows") == 0, "the mesh does not divide the rows of a micro-batch"
    out, inside, *products = _apply(grouped, x, choices, gates, weights)
    return (out, inside), (x, choices, gates, weights, [checkpoint_name(each, PRODUCT) for each in products])


def _backward(grouped: Grouped, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    x, choices, gates, weights, products = saved
    mesh = _axes(*x.shape[::2])

    def of_device(
        x: Array, choices: Array, gates: Array, gate: Array, up: Array, down: Array, gated: Any, upped: Any, d_out: Any
    ) -> tuple[Array, ...]:
        tokens, chosen, weighed, d_tokens = _gathered(mesh, x, choices, gates, d_out)
        order = _sort(mesh, chosen, len(gate))
        rows, d_rows = tokens[order.token], d_tokens[order.token]
        of_pair = jnp.where(order.mine, weighed, 0.0).reshape(-1)[order.pair][:, None]
        silu, d_silu = jax.vjp(jax.nn.silu, gated)
        inner = silu * upped
        unweighed = grouped.product(d_rows, down, order.sizes, transposed=True)
        d_of_pair = jnp.sum(inner.astype(jnp.float32) * unweighed.astype(jnp.float32), axis=1)
        d_inner = (of_pair * unweighed.astype(jnp.float32)).astype(x.dtype)
        (d_gated,), d_upped = d_silu(d_inner * upped), d_inner * silu
        d_down = grouped.outer((of_pair * inner.astype(jnp.float32)).astype(x.dtype), d_rows, order.sizes)
        d_gate, d_up = (grouped.outer(rows, each, order.sizes) for each in (d_gated, d_upped))
        parts = (
            grouped.product(d_gated, gate, order.sizes, transposed=True),
            grouped.product(d_upped, up, order.sizes, transposed=True),
        )
        ones = order.mine.astype(jnp.float32)
        d_x = functools.reduce(jnp.add, (_add_up(part, ones, order.place) for part in parts))
        d_gates = jnp.where(order.mine, d_of_pair[order.place], 0.0)
        return (
            _given_back(mesh, d_x.astype(x.dtype), x.shape),
            _given_back(mesh, d_gates, gates.shape),
            *(_of_batch(mesh, each, axis) for each, axis in ((d_gate, 1), (d_up, 1), (d_down, 2))),
        )

    rows, width = ("rows", None, None), "expert_embed" if mesh.width else None
    by_weights = (("experts", width, "mlp"), ("experts", width, "mlp"), ("experts", "mlp", width))
    pairs = ("rows", "mlp")
    run = on_each_device(
        of_device, (rows, rows, rows, *_INNER, pairs, pairs, rows), (rows, rows, *by_weights), rows=x.shape[0]
    )
    d_x, d_gates, *d_weights = run(x, choices, gates, *weights, *products, cotangents[0])
    return d_x, None, d_gates, tuple(d.astype(w.dtype) for d, w in zip(d_weights, weights, strict=True))


def _of_batch(mesh: _Mesh, gradient: Array, width: int) -> Array:
    """A weight's gradient summed over the devices that have other tokens, in float32; of its width a device's part."""
    gradient = gradient.astype(jnp.float32)
    if mesh.width:
        gradient = jax.lax.psum_scatter(gradient, mesh.width, scatter_dimension=width, tiled=True)
    rest = tuple(axis for axis in mesh.batch if axis not in mesh.width)
    return jax.lax.psum(gradient, rest) if rest else gradient


_experts.defvjp(_forward, _backward)
