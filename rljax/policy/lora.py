"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen policy, and the merged policy that they give.

A target is a weight with an adapter. It becomes W' = round(W + alpha / rank * A B): a float32 sum, rounded to the
compute dtype. The trainer's step and the engines use this same array, so adapters add nothing to the mismatch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array

from rljax.errors import check_at_least
from rljax.policy.config import PolicyConfig
from rljax.policy.layers import Declarations, ParamDeclaration
from rljax.policy.model import Params, cast_params, declared_params, logical_axes, param_shardings
from rljax.sharding import constrain_tree, is_on_host, on_devices, on_host

_COMMON = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS = (*_COMMON, "in_proj_qkv", "in_proj_z", "out_proj")
"""The linear layers of a block that may have an adapter. The last three belong to delta nets."""
_EXACT = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA). The model of ``model.path`` is frozen, and only adapters on it are trained."""

    rank: int = 0
    """Rank of each adapter. 0: no adapters, all weights are trained."""
    alpha: float | None = None
    """The product A B of an adapter is multiplied by alpha / rank. None: twice the rank."""
    targets: tuple[str, ...] = _COMMON
    """Linear layers of every block that get an adapter. The experts of a mixture cannot have one. Delta nets also have
    in_proj_qkv, in_proj_z and out_proj."""
    dropout: float = 0.0
    """Must be 0, because with dropout the trainer would compute another policy than the engine samples from."""
    adapter: str | None = None
    """Directory in PEFT's layout (adapter_config.json, adapter_model.safetensors) with the initial adapters. Their
    rank, alpha and targets must be the same. None: A is random, B is 0, and the run starts from the model itself."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "rank")
        if self.alpha is not None and not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be positive and finite, got {self.alpha}")
        for name in self.targets:
            if name not in LAYERS:
                raise ValueError(f"targets must be among {', '.join(LAYERS)}, got {name!r:.60}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets must be different layers, and at least one, got {list(self.targets)}")
        if self.dropout != 0.0:
            raise ValueError(f"dropout must be 0, because the engine samples without it, got {self.dropout}")
        if self.adapter is not None and not self.rank:
            raise ValueError(f"adapter = {self.adapter} needs its rank: rank must be at least 1")

    @property
    def resolved_alpha(self) -> float:
        """The value of ``alpha``, or its default."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """The factor alpha / rank of the product A B."""
        return self.resolved_alpha / self.rank


OFF = LoraConfig()


def _letters(target: ParamDeclaration) -> tuple[str, str]:
    """Returns the letters of the input and the output axes of one layer of a target, for einsum."""
    inputs = target.stored.inputs or 0
    return "abc"[:inputs], "xyz"[: len(target.shape) - 1 - inputs]


@functools.lru_cache(maxsize=32)
def find_targets(config: PolicyConfig, lora: LoraConfig) -> Declarations:
    """Returns the declarations of the parameters that have an adapter: stacks of linear layers [layers, *in, *out].

    Raises ValueError if a target is not a linear layer of the policy's blocks, or belongs to its experts.
    """
    targets, names = Declarations(), set()
    for path, declared in sorted(declared_params(config).items()):
        name, kind = declared.stored.name.split(".")[-2:]
        if name not in lora.targets or kind != "weight" or "experts" in declared.axes:
            continue
        targets[path] = declared
        names.add(name)
    if missing := [name for name in lora.targets if name not in names]:
        raise ValueError(f"lora.targets: a {config.family} policy has no {missing[0]} that may have an adapter")
    return targets


def declared_adapters(config: PolicyConfig, lora: LoraConfig) -> Declarations:
    """Returns the declarations of the matrices of all adapters, with the names of tensors in PEFT's files.

    A target [layers, *in, *out] of the policy has ``a`` [layers, *in, rank] and ``b`` [layers, rank, *out] at its path.
    Raises ValueError if a target is not a linear layer of the policy's blocks, or belongs to its experts.
    """
    adapters = Declarations()
    for path, (shape, axes, stored) in find_targets(config, lora).items():
        inputs = stored.inputs or 0
        (layers, *ins), outs = shape[: 1 + inputs], shape[1 + inputs :]
        (_, *in_axes), out_axes = axes[: 1 + inputs], axes[1 + inputs :]
        # A rank is split over the devices if none of the other axes is the width.
        of_a, of_b = ("rank" if "embed" in others else "split_rank" for others in (in_axes, out_axes))
        module = "base_model.model." + stored.name.removesuffix(".weight")
        a, b = (stored._replace(name=f"{module}.lora_{x}.weight", inputs=n) for x, n in (("A", inputs), ("B", 1)))
        adapters[*path, "a"] = ParamDeclaration((layers, *ins, lora.rank), ("layers", *in_axes, of_a), a)
        adapters[*path, "b"] = ParamDeclaration((layers, lora.rank, *outs), ("layers", of_b, *out_axes), b)
    return adapters


def init_adapters(config: PolicyConfig, lora: LoraConfig, seed: int) -> Params:
    """Returns new float32 adapters with PEFT's initial values: A uniform within +-1 / sqrt(inputs), B zero.

    The same seed gives the same bits.
    """
    adapters = {}
    for index, (path, (shape, *_)) in enumerate(sorted(declared_adapters(config, lora).items())):
        if path[-1] == "b":
            adapters[path] = jnp.zeros(shape, jnp.float32)
        else:
            key = jax.random.fold_in(jax.random.key(seed), index)
            bound = 1.0 / math.sqrt(math.prod(shape[1:-1]))
            adapters[path] = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    return unflatten_dict(adapters)


def with_targets(weights: Params, targets: Params) -> Params:
    """Returns the pytree ``weights`` of a policy, with the leaves of ``targets`` in place of its own."""
    return unflatten_dict(flatten_dict(weights) | flatten_dict(targets))


def merge_adapters(base: Params, adapters: Params, config: PolicyConfig, lora: LoraConfig, dtype: Any) -> Params:
    """Computes the targets' weights W + scale * A B, summed in float32 and rounded to ``dtype``, layer by layer.

    ``base`` has only the leaves W that ``TrainedParams.targets`` selects, in any float dtype. The adapters A and B are
    float32.
    """
    frozen, flat = flatten_dict(base), flatten_dict(adapters)
    merged = {}
    for path, target in find_targets(config, lora).items():
        ins, outs = _letters(target)

        def of_layer(layer: tuple[Array, Array, Array], spec: str = f"{ins}r,r{outs}->{ins}{outs}") -> Array:
            weight, a, b = layer
            change = jnp.einsum(spec, a, b, precision=_EXACT, preferred_element_type=jnp.float32)
            return (weight.astype(jnp.float32) + lora.scale * change).astype(dtype)

        merged[path] = jax.lax.map(of_layer, (frozen[path], flat[*path, "a"], flat[*path, "b"]))
    return unflatten_dict(merged)


def adapter_gradients(adapters: Params, gradients: Params, config: PolicyConfig, lora: LoraConfig) -> Params:
    """Computes the gradients of the adapters, float32, from the gradients of the targets' weights.

    dA = scale * dW B^T and dB = scale * A^T dW, layer by layer. The rounding of the weights counts as the identity. The
    gradients dW may have any float dtype.
    """
    of_weights, flat = flatten_dict(gradients), flatten_dict(adapters)
    of_adapters = {}
    for path, target in find_targets(config, lora).items():
        ins, outs = _letters(target)

        def of_layer(layer: tuple[Array, Array, Array], ins: str = ins, outs: str = outs) -> tuple[Array, Array]:
            weight, a, b = layer[0].astype(jnp.float32) * lora.scale, *layer[1:]
            to_a, to_b = f"{ins}{outs},r{outs}->{ins}r", f"{ins}{outs},{ins}r->r{outs}"
            return jnp.einsum(to_a, weight, b, precision=_EXACT), jnp.einsum(to_b, weight, a, precision=_EXACT)

        layers = (of_weights[path], flat[*path, "a"], flat[*path, "b"])
        of_adapters[*path, "a"], of_adapters[*path, "b"] = jax.lax.map(of_layer, layers)
    return unflatten_dict(of_adapters)


@dataclass(frozen=True)
class TrainedParams:
    """The parameters that the optimizer holds, and their relation to the weights that the forward pass reads.

    If ``lora`` has a rank they are the adapters, and ``MergedPolicy`` computes the weights. Otherwise they are all
    weights.
    """

    config: PolicyConfig
    lora: LoraConfig

    @property
    def declared(self) -> Declarations:
        """The declarations of the trained parameters."""
        return declared_adapters(self.config, self.lora) if self.lora.rank else declared_params(self.config)

    def targets(self, weights: Params) -> Params:
        """Returns the leaves of a policy's pytree that need a gradient: those with an adapter, or all without adapters.

        The leaves may be arrays, shardings or anything else.
        """
        if not self.lora.rank:
            return weights
        flat = flatten_dict(weights)
        return unflatten_dict({path: flat[path] for path in find_targets(self.config, self.lora)})

    def residuals(self, params: Params) -> Any:
        """Returns the values that ``gradients`` needs from the trained parameters."""
        return params if self.lora.rank else ()

    def gradients(self, residuals: Any, target_gradients: Params) -> Params:
        """Computes the gradients of the trained parameters from the gradients of the leaves of ``targets``."""
        if not self.lora.rank:
            return target_gradients
        # The gradients are summed over the rows on the devices of the weights and in their dtype, as for all weights.
        placed = constrain_tree(target_gradients, self.targets(logical_axes(self.config)))
        return adapter_gradients(residuals, placed, self.config, self.lora)


class MergedPolicy:
    """A function of adapters that merges them with a frozen base. Trainer and engines use its one executable.

    The merged policy is kept until a call with other adapters. It is in the same memory as the adapters: on the devices
    or on the host (``sharding.on_host``). Leaves without adapters are the arrays of the base. They are copied only if
    they are cast to float32, or if the base is in the host's memory and the adapters are not.
    """

    def __init__(
        self, config: PolicyConfig, lora: LoraConfig, mesh: Mesh, base: Params, dtype: Any, *, as_float32: bool = False
    ):
        """Builds the executable, which is compiled at the first call.

        ``base`` is the frozen policy in ``dtype``, on the mesh. It must be in the host's memory if adapters may be
        there. The weights are rounded to ``dtype``. With ``as_float32`` they are returned in float32, for an executable
        that takes masters.
        """
        self.base, self._mesh, self._as_float32 = base, mesh, as_float32
        trained = TrainedParams(config, lora)
        self._targets, shardings = trained.targets(base), trained.targets(param_shardings(config, mesh))
        self._merge = jax.jit(
            lambda base, adapters: merge_adapters(base, adapters, config, lora, dtype), out_shardings=shardings
        )
        self._newest: tuple[Params, Params] | None = None

    def frozen(self) -> Params:
        """Returns the base without adapters, in the dtype of the merged policy."""
        return cast_params(self.base, jnp.float32) if self._as_float32 else self.base

    def __call__(self, adapters: Params) -> Params:
        """Returns the merged policy's pytree, in the dtype of the base or in float32. Callers must not donate it."""
        if self._newest is None or self._newest[0] is not adapters:
            self._newest = None  # This frees the last result before the next one is computed.
            with jax.set_mesh(self._mesh):
                targets = self._merge(on_devices(self._targets), on_devices(adapters))
            move = on_host if is_on_host(adapters) else on_devices
            merged = move(with_targets(self.base, targets))
            # The cast is a second executable, because XLA may drop a pair of casts inside one.
            self._newest = adapters, cast_params(merged, jnp.float32) if self._as_float32 else merged
        return self._newest[1]
