"""The layers of a block (norms, products, SwiGLU) and the description of their parameters.

Each parameter is described in one place, by ``param(rngs, shape, logical axes, initializer, name in the file)``.
Abstract shapes, shardings, initial values and the layout of checkpoints all derive from this description.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.grouped import IN_BLOCKS, Grouped
from rljax.policy.taps import tap
from rljax.sharding import axis_size, constrain, gradient_sum_dtype, named_sharding

PRODUCT = "product"
"""The name of a product with weights for ``jax.checkpoint``."""
Init = jax.nn.initializers.Initializer


class HFTensor(NamedTuple):
    """The tensor, or the tensors, of a Hugging Face checkpoint that hold a parameter.

    A linear layer is [in, out] here and [out, in] in the file, where heads and head_dim are one axis.
    """

    # The name of the tensor. In a block it lacks the prefix "model.layers.{}.". If the slices of a leading axis of the
    # parameter are separate tensors, {} stands for their index.
    name: str
    # The number of axes, after those leading ones, that form the second axis of the tensor. 0: all axes are one axis in
    # the file. None: the layouts are the same.
    inputs: int | None = None
    blocks: range | None = None  # the numbers of the blocks along the first axis of a stack of blocks; None outside
    wide: bool = False  # whether a model's files hold it in float32 beside 16-bit tensors

    def names(self, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the names of the tensors of a parameter of this shape. They have the shape of its leading axes."""
        names = np.empty(shape[: self.name.count("{}")], object)
        for index in np.ndindex(names.shape):
            numbers = index if self.blocks is None else (self.blocks[index[0]], *index[1:])
            names[index] = self.name.format(*numbers)
        return names


class ParamDeclaration(NamedTuple):
    """The declaration of one parameter of a pytree. A parameter in a stack of blocks is that of all blocks."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # the logical axis of each dimension
    stored: HFTensor  # the tensor in the files


class Declarations(dict[tuple[str, ...], ParamDeclaration]):
    """The declarations of the parameters of a pytree, by path."""

    def abstract(self) -> Any:
        """Returns the pytree with a float32 ``jax.ShapeDtypeStruct`` at each leaf. Nothing is allocated."""
        return unflatten_dict({path: jax.ShapeDtypeStruct(each.shape, jnp.float32) for path, each in self.items()})

    def axes(self) -> Any:
        """Returns the pytree with a tuple of logical axis names at each leaf."""
        return unflatten_dict({path: each.axes for path, each in self.items()})

    def shardings(self, mesh: Mesh) -> Any:
        """Returns the pytree with a NamedSharding at each leaf."""
        return unflatten_dict({path: named_sharding(mesh, each.axes, each.shape) for path, each in self.items()})


def opaque(*arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays unchanged. On an NVIDIA GPU, XLA cannot see behind this call how they were computed.

    There are two uses. The result of a matrix product may have several readers. With this call between them, XLA puts
    the readers into one kernel, which reads the result once. And several small products may share an operand. XLA joins
    them into one product with a float32 result, and needs more kernels to cut and round it. It does not join products
    whose operands come from this call. docs/compile.md counts the memory traffic that both uses save.

    Other backends ignore this call. On a TPU XLA rounds a product inside of its kernel, which a barrier would prevent.
    Gradients pass through. The arrays have any shape and dtype, and one may be given more than once.
    """
    return jax.lax.platform_dependent(
        *arrays, cuda=lambda *each: jax.lax.optimization_barrier(each), default=lambda *each: each
    )


def features_last(*arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays unchanged. On a TPU, the values of one token then lie beside each other in memory.

    XLA may otherwise place the tokens of one feature beside each other. The products for the gradients of weights need
    the first layout if XLA computes them in parts. XLA would then copy each operand. The gradients of the arrays get
    the same layout. docs/compile.md counts the memory traffic that this saves.

    Other backends ignore this call. The arrays have any dtype, and their last axis is that of the features.
    """
    return jax.lax.platform_dependent(*arrays, tpu=_features_last, default=lambda *each: each)


def _features_last(*arrays: Array) -> tuple[Array, ...]:
    return tuple(with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in arrays)


def param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    logical: tuple[str, ...],
    init: Init,
    name: str,
    inputs: int | None = None,
    *,
    wide: bool = False,
) -> nnx.Param[Array]:
    """Declares a float32 parameter: shape, logical axis of each dimension, initializer, and fields of ``HFTensor``."""
    stored = HFTensor(name, inputs, wide=wide)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), logical=logical, stored=stored)


class Routing(NamedTuple):
    """The input of a block's router and experts besides the tokens."""

    valid: Bool[Array, "b t"] | None = None  # the tokens that count; None for all
    # The experts that each token must go to, -1 where the router is free. None: it is free everywhere.
    choices: Int[Array, "b t k"] | None = None
    grouped: Grouped = IN_BLOCKS  # the implementation of the experts' products


class RoutingRecord(NamedTuple):
    """The record of the routing in one block. Counts and sums are over the valid tokens of each row."""

    choices: Int[Array, "b t k"]  # the experts that each token went to
    tokens: Int[Array, " b"]  # the number of valid tokens
    load: Int[Array, "b e"]  # the number of tokens that went to each of the e experts
    probability: Float[Array, "b e"]  # the sum of the router's probabilities of each expert, differentiable
    entropy: Float[Array, " b"]  # the sum of the entropies of the router's distributions (nats)
    given: Int[Array, " b"]  # the number of choices that were prescribed
    differing: Int[Array, " b"]  # the number of prescribed choices that the router itself would not have made


class BlockStats(NamedTuple):
    """Measurements of a block's forward, over each of s parts of the tokens of a row."""

    inside: Float[Array, "b s f"]  # the largest absolute values inside the MLP
    outside: Float[Array, "b s d"]  # the largest absolute values of the block's output
    router: RoutingRecord | None  # the record of the routing in a block with experts, else None


def largest(x: Float[Array, "b t f"]) -> Float[Array, "b s f"]:
    """Returns each feature's largest absolute value in each device's part of the tokens, which needs no collective."""
    rows, tokens, features = x.shape
    parts = math.gcd(tokens, axis_size("split_tokens"))
    each = jnp.abs(x).reshape(rows, parts, tokens // parts, features)
    return jax.lax.stop_gradient(jnp.max(each, axis=2)).astype(jnp.float32)


def split_tokens(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """Splits ``x`` by tokens over ``tp``, for the operations on single tokens between the products of a block."""
    return constrain(x, "rows", "split_tokens", "act_embed")


def all_tokens(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """Gathers all tokens of a device's rows, for matrix products whose weights are split over ``tp``."""
    # The first constraint makes ``x`` travel in its own dtype, not in the wider dtype from which it is rounded.
    return constrain(split_tokens(x), "rows", "tokens", "act_embed")


def _product(spec: str, a: Array, b: Array) -> Array:
    """Computes the einsum, accumulated in float32. A part of a sum over devices is rounded to the dtype of ``a``."""
    dtype = jnp.float32 if axis_size("heads") == 1 else a.dtype
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(
    specs: Sequence[str], sums_in: Any, x: Array, weights: Sequence[Array], biases: Sequence[Array]
) -> tuple[Array, ...]:
    del sums_in  # the dtype in which the backward pass adds up the gradients of weights over devices
    operands = opaque(*[x] * len(specs)) if len(specs) > 1 else (x,)  # else XLA may join small products
    products = [_product(spec, each, weight) for spec, each, weight in zip(specs, operands, weights, strict=True)]
    if biases:
        wide = (bias.astype(jnp.float32)[:, None] for bias in biases)  # [b, 1, ...]
        products = [each.astype(jnp.float32) + bias for each, bias in zip(products, wide, strict=True)]
    return tuple(product.astype(x.dtype) for product in products)


def linear(specs: Sequence[str], x: Array, weights: Sequence[Array], biases: Sequence[Array] = ()) -> tuple[Array, ...]:
    """Computes ``einsum(spec, x, weight)`` for each spec and weight, and adds the biases if there are any.

    Compute all products of one ``x`` in one call: its cotangent is then summed over the mesh only once. Every product
    of forward and backward accumulates in float32, and its operands have the dtype of ``x``. The transpose of a plain
    einsum would widen the cotangent, and so the gathered weight, to float32. If the mesh splits heads or the width of
    the MLP (``tp``), a product is a part of a sum over devices. It is first rounded to the dtype of ``x``, in which the
    sum travels. The gradients of weights are added up over the devices in float32, or in the dtype of ``x``
    inside of ``narrow_gradient_sums(True)``.

    Args:
      specs: The einsum specifications, such as ``"btd,df->btf"``. Every index of a weight is an index of ``x`` or of
        the result.
      weights: The weights, in the dtype of ``x``.
      biases: The bias of each product [b, t, ...], or nothing. A bias is [...], or [b, ...] with one for each row. It
        is added before the product is rounded.

    Returns:
      The products, in the dtype of ``x``. Their name for ``jax.checkpoint`` is ``PRODUCT``.
    """
    biases = tuple(_of_rows(bias, spec, x.shape[0]) for bias, spec in zip(biases, specs, strict=bool(biases)))
    products = _linear(specs, gradient_sum_dtype(x.dtype), x, weights, biases)
    return tuple(checkpoint_name(product, PRODUCT) for product in products)


def _of_rows(bias: Array, spec: str, rows: int) -> Array:
    """Broadcasts a bias to the rows. The transpose of the broadcast adds up the gradients of the rows."""
    shared = bias.ndim == len(spec.partition("->")[2]) - 2
    return jnp.broadcast_to(bias, (rows, *bias.shape)) if shared else bias


def _linear_fwd(
    specs: Sequence[str], sums_in: Any, x: Array, weights: Sequence[Array], biases: Sequence[Array]
) -> tuple[Any, Any]:
    # The backward pass needs only the dtype of a bias.
    return _linear(specs, sums_in, x, weights, biases), (x, weights, [bias[:0] for bias in biases])


def _linear_bwd(
    specs: Sequence[str], sums_in: Any, saved: Any, cotangents: tuple[Array, ...]
) -> tuple[Array, Any, Any]:
    x, weights, biases = saved
    d_x, d_weights = [], []
    for spec, weight, cotangent in zip(specs, weights, cotangents, strict=True):
        inputs, out = spec.split("->")
        of_x, of_weight = inputs.split(",")
        d_x.append(_product(f"{out},{of_weight}->{of_x}", cotangent, weight))
        # This is a sum over the batch. Across devices it travels in the dtype of this product.
        d_weight = jnp.einsum(f"{of_x},{out}->{of_weight}", x, cotangent, preferred_element_type=sums_in)
        d_weights.append(d_weight.astype(weight.dtype))
    d_biases = [
        jnp.sum(c, 1, jnp.float32).astype(bias.dtype) for c, bias in zip(cotangents, biases, strict=bool(biases))
    ]
    return functools.reduce(jnp.add, d_x).astype(x.dtype), tuple(d_weights), tuple(d_biases)


_linear.defvjp(_linear_fwd, _linear_bwd)


def rms_norm(x: Float[Array, "b *t d"], scale: Float[Array, "*b d"], eps: float) -> Float[Array, "b *t d"]:
    """Applies root-mean-square normalisation over the last axis, in float32. The result has the dtype of ``x``.

    The scale is [d], or [b, d] with one for each row. ``eps`` is added under the root.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    of_tokens = jnp.expand_dims(scale.astype(jnp.float32), range(scale.ndim - 1, x.ndim - 1))
    return (normed * of_tokens).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation. The parameter is the scale minus ``offset``."""

    def __init__(self, size: int, eps: float, rngs: nnx.Rngs, name: str, *, offset: float = 0.0, wide: bool = False):
        self.eps, self.offset = eps, offset
        self.scale = param(rngs, (size,), ("norm",), jax.nn.initializers.constant(1.0 - offset), name, wide=wide)

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Normalises the last axis. The result has the shape and dtype of ``x``."""
        scale = self.scale[...]
        return rms_norm(x, scale.astype(jnp.float32) + self.offset if self.offset else scale, self.eps)


class MLP(nnx.Module):
    """A SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        d, f = c.hidden_size, c.intermediate_size
        self.gate = param(rngs, (d, f), ("embed", "mlp"), normal, "mlp.gate_proj.weight", 1)
        self.up = param(rngs, (d, f), ("embed", "mlp"), normal, "mlp.up_proj.weight", 1)
        self.down = param(rngs, (f, d), ("mlp", "embed"), normal, "mlp.down_proj.weight", 1)
        self.bias = c.mlp_bias
        if self.bias:
            zeros = jax.nn.initializers.zeros
            self.gate_bias = param(rngs, (f,), ("mlp",), zeros, "mlp.gate_proj.bias")
            self.up_bias = param(rngs, (f,), ("mlp",), zeros, "mlp.up_proj.bias")
            self.down_bias = param(rngs, (d,), ("embed",), zeros, "mlp.down_proj.bias")

    def __call__(self, x: Float[Array, "b t d"], routing: Routing | None) -> tuple[Array, Array, None]:
        """Returns the output in the dtype of ``x``, the ``largest`` values of the inner product [b, s, f], and None."""
        del routing
        widening = (self.gate_bias[...], self.up_bias[...]) if self.bias else ()
        gate, up = linear(("btd,df->btf",) * 2, x, (self.gate[...], self.up[...]), widening)
        # The backward pass reads both for their gradients, and for the product if it is computed again.
        gate, up = features_last(*opaque(tap("gate", gate), constrain(tap("up", up), "rows", "tokens", "act_mlp")))
        product = tap("activation", jax.nn.silu(gate) * up)
        narrowing = (self.down_bias[...],) if self.bias else ()
        return linear(("btf,fd->btd",), product, (self.down[...],), narrowing)[0], largest(product), None
