"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen policy: what they are, and the one policy that they make.

The weight of a target is W' = round(W + alpha / rank * A B): the sum in float32, rounded to the compute dtype. One
executable makes it, and both the trainer's step and the engines get that very array, so that adapters add nothing to
the mismatch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array

from rljax.errors import check_at_least
from rljax.policy.config import PolicyConfig
from rljax.policy.layers import Stored
from rljax.policy.model import Params, abstract_params, cast_params, logical_axes, param_shardings, stored_tensors
from rljax.sharding import is_on_host, named_sharding, on_devices, on_host

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a block that may get an adapter."""
Path = tuple[str, ...]
_EXACT = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA): the model of ``model.path`` stays as it is, and only adapters on it are trained."""

    rank: int = 0
    """Rank of each adapter. 0: no adapters, all weights are trained."""
    alpha: float | None = None
    """An adapter's product is multiplied by alpha / rank. None: twice the rank."""
    targets: tuple[str, ...] = LAYERS
    """Linear layers of every block that get an adapter. Those of the experts of a mixture cannot be among them."""
    dropout: float = 0.0
    """Must be 0: with dropout the trainer would compute another policy than the one that is sampled from."""
    adapter: str | None = None
    """Directory in PEFT's layout (adapter_config.json, adapter_model.safetensors) with the adapters to start from, of
    this rank and alpha and on these targets. None: A is random, B is 0, and the run starts from the model itself."""

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
            raise ValueError(f"dropout must be 0, the policy that is sampled from has none, got {self.dropout}")
        if self.adapter is not None and not self.rank:
            raise ValueError(f"adapter = {self.adapter} needs its rank: rank must be at least 1")

    @property
    def resolved_alpha(self) -> float:
        """``alpha``, or its default."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.resolved_alpha / self.rank


OFF = LoraConfig()


class _Target(NamedTuple):
    """A parameter that gets an adapter: a stack of linear layers [layers, *in, *out].

    Attributes:
      shape: of the parameter.
      axes: its logical axes.
      inputs: number of its input axes.
      module: name of the layer in a checkpoint, ``{}`` for the number of its block.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    inputs: int
    module: str


@functools.lru_cache(maxsize=32)
def find_targets(config: PolicyConfig, lora: LoraConfig) -> Mapping[Path, _Target]:
    """Path in the pytree -> the parameter that gets an adapter there.

    Raises:
      ValueError: a target is not a linear layer of the policy's blocks, or one of its experts.
    """
    shapes, axes = flatten_dict(abstract_params(config)), flatten_dict(logical_axes(config))
    found: dict[Path, _Target] = {}
    names = set()
    for path, stored in sorted(stored_tensors(config).items()):
        module, _, kind = stored.name.rpartition(".")
        name = module.rpartition(".")[2]
        if name not in lora.targets or kind != "weight":
            continue
        if "experts" in axes[path]:
            raise ValueError(
                f"lora.targets: {name} belongs to the experts of this {config.family} policy, which get no adapters; "
                "name layers of the attention (q_proj, k_proj, v_proj, o_proj)"
            )
        assert stored.inputs
        found[path] = _Target(shapes[path].shape, axes[path], stored.inputs, module)
        names.add(name)
    missing = [name for name in lora.targets if name not in names]
    if missing:
        raise ValueError(f"lora.targets: a {config.family} policy has no {missing[0]}")
    return found


def _split(target: _Target, of: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The input and the output axes of something that has an item for each axis of the parameter."""
    return of[1 : 1 + target.inputs], of[1 + target.inputs :]


def abstract_adapters(config: PolicyConfig, lora: LoraConfig) -> Params:
    """The pytree of adapters with a float32 ``jax.ShapeDtypeStruct`` at each leaf.

    Where the policy has a target [layers, *in, *out] there are ``a`` [layers, *in, rank] and ``b`` [layers, rank,
    *out]. Raises ValueError as ``find_targets``.
    """
    found = {}
    for path, target in find_targets(config, lora).items():
        ins, outs = _split(target, target.shape)
        found[*path, "a"] = jax.ShapeDtypeStruct((target.shape[0], *ins, lora.rank), jnp.float32)
        found[*path, "b"] = jax.ShapeDtypeStruct((target.shape[0], lora.rank, *outs), jnp.float32)
    return unflatten_dict(found)


def adapter_axes(config: PolicyConfig, lora: LoraConfig) -> Params:
    """The pytree of adapters with a tuple of logical axis names at each leaf."""
    found = {}
    for path, target in find_targets(config, lora).items():
        ins, outs = _split(target, target.axes)
        found[*path, "a"] = ("layers", *ins, _rank_axis(ins))
        found[*path, "b"] = ("layers", _rank_axis(outs), *outs)
    return unflatten_dict(found)


def _rank_axis(others: tuple[str, ...]) -> str:
    """The logical axis of an adapter's rank, which is split as the model's width is where that width is not in it."""
    return "rank" if "embed" in others else "split_rank"


def adapter_shardings(config: PolicyConfig, lora: LoraConfig, mesh: Mesh) -> Params:
    """The pytree of adapters with a NamedSharding at each leaf."""
    return jax.tree.map(
        lambda leaf, axes: named_sharding(mesh, axes, leaf.shape),
        abstract_adapters(config, lora),
        adapter_axes(config, lora),
    )


def stored_adapters(config: PolicyConfig, lora: LoraConfig) -> dict[Path, Stored]:
    """Path in the pytree of adapters -> where the adapter is in a file of PEFT's layout."""
    found = {}
    for path, target in find_targets(config, lora).items():
        name = f"base_model.model.{target.module}"
        found[*path, "a"] = Stored(f"{name}.lora_A.weight", target.inputs)
        found[*path, "b"] = Stored(f"{name}.lora_B.weight", 1)
    return found


def init_adapters(config: PolicyConfig, lora: LoraConfig, seed: int) -> Params:
    """Fresh float32 adapters as PEFT's, A uniform within 1 / sqrt(inputs) and B zero; a seed gives the same bits."""
    found = {}
    shapes = flatten_dict(abstract_adapters(config, lora))
    for index, (path, leaf) in enumerate(sorted(shapes.items())):
        if path[-1] == "b":
            found[path] = jnp.zeros(leaf.shape, leaf.dtype)
        else:
            key = jax.random.fold_in(jax.random.key(seed), index)
            bound = 1.0 / math.sqrt(math.prod(leaf.shape[1:-1]))
            found[path] = jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)
    return unflatten_dict(found)


def targets_of(weights: Params, config: PolicyConfig, lora: LoraConfig) -> Params:
    """The leaves of a policy's pytree that have an adapter, in a pytree of their own."""
    flat = flatten_dict(weights)
    return unflatten_dict({path: flat[path] for path in find_targets(config, lora)})


def with_targets(weights: Params, targets: Params) -> Params:
    """A policy's pytree with other leaves in the place of those in ``targets``."""
    return unflatten_dict(flatten_dict(weights) | flatten_dict(targets))


def _letters(target: _Target) -> tuple[str, str]:
    """Of the input and the output axes of one layer, for einsum."""
    return "abc"[: target.inputs], "xyz"[: len(target.shape) - 1 - target.inputs]


def merge_adapters(base: Params, adapters: Params, config: PolicyConfig, lora: LoraConfig, dtype: Any) -> Params:
    """The targets' weights W + scale * A B, summed in float32 and rounded to ``dtype``, layer by layer.

    Args:
      base: targets of the frozen policy (``targets_of``), of any float dtype.
      adapters: float32.
      config: shape of the policy.
      lora: of the adapters.
      dtype: of the result.

    Returns:
      A pytree like ``base``.
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
    """Gradients of the adapters, float32, from those of the targets' weights; rounding counts as the identity.

    dA = scale * dW B^T and dB = scale * A^T dW, layer by layer.

    Args:
      adapters: float32.
      gradients: of the weights that ``merge_adapters`` gives, of any float dtype.
      config: shape of the policy.
      lora: of the adapters.
    """
    of_weights, flat = flatten_dict(gradients), flatten_dict(adapters)
    found = {}
    for path, target in find_targets(config, lora).items():
        ins, outs = _letters(target)

        def of_layer(layer: tuple[Array, Array, Array], ins: str = ins, outs: str = outs) -> tuple[Array, Array]:
            weight, a, b = layer[0].astype(jnp.float32) * lora.scale, *layer[1:]
            to_a, to_b = f"{ins}{outs},r{outs}->{ins}r", f"{ins}{outs},{ins}r->r{outs}"
            return jnp.einsum(to_a, weight, b, precision=_EXACT), jnp.einsum(to_b, weight, a, precision=_EXACT)

        layers = (of_weights[path], flat[*path, "a"], flat[*path, "b"])
        found[*path, "a"], found[*path, "b"] = jax.lax.map(of_layer, layers)
    return unflatten_dict(found)


class MergedPolicy:
    """The policy of adapters on a frozen base: ``merged(adapters)``, by one executable for trainer and engines.

    The result for the newest adapters is kept until it is asked for others. It lies where the adapters do, on the
    devices or in the host's memory (``sharding.on_host``). Leaves without adapters are those of the base itself, and
    copies only where the base is in the host's memory and the adapters are not.
    """

    def __init__(
        self, config: PolicyConfig, lora: LoraConfig, mesh: Mesh, base: Params, dtype: Any, *, as_float32: bool = False
    ):
        """Builds the executable; it is compiled at the first call.

        Args:
          config: shape of the policy.
          lora: of the adapters.
          mesh: the trainer's.
          base: the frozen policy in ``dtype``, on the mesh; in the host's memory where adapters are to be there, too.
          dtype: that the weights are rounded to.
          as_float32: give the rounded weights in float32, for an executable that takes masters.
        """
        self.base = base
        self._mesh, self._as_float32 = mesh, as_float32
        self._targets = targets_of(base, config, lora)
        shardings = targets_of(param_shardings(config, mesh), config, lora)
        self._merge = jax.jit(
            lambda base, adapters: merge_adapters(base, adapters, config, lora, dtype), out_shardings=shardings
        )
        self._newest: tuple[Params, Params] | None = None

    def frozen(self) -> Params:
        """The base as it is, in the dtype of what this gives."""
        return cast_params(self.base, jnp.float32) if self._as_float32 else self.base

    def __call__(self, adapters: Params) -> Params:
        """The whole policy's pytree, in the dtype of the base or in float32; the caller does not donate it."""
        if self._newest is None or self._newest[0] is not adapters:
            self._newest = None  # the one before is not kept beside it
            with jax.set_mesh(self._mesh):
                targets = self._merge(on_devices(self._targets), on_devices(adapters))
            move = on_host if is_on_host(adapters) else on_devices
            merged = move(with_targets(self.base, targets))
            # A second executable: inside one XLA may drop a pair of casts.
            self._newest = adapters, cast_params(merged, jnp.float32) if self._as_float32 else merged
        return self._newest[1]
