"""Describes the needs of a run, from shapes only. It reads the model's config.json and allocates nothing.

The command is ``rljax train CONFIG.yaml --dry-run``. The mesh may have more devices than JAX has here.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from rljax.plan.budget import (
    Card,
    Decoding,
    Demand,
    device_demands,
    disk_demands,
    find_devices,
    host_demand,
    plan_decoding,
    resident_bytes,
    route_bytes,
)
from rljax.plan.memory import working_bytes, working_top_bytes
from rljax.policy.config import PolicyConfig
from rljax.policy.hub import is_hub_id, policy_shape
from rljax.policy.kernels import check_mesh
from rljax.policy.lora import TrainedParams, find_targets
from rljax.policy.model import Params, abstract_params, gathered_axes, logical_axes
from rljax.record.rows import text_table
from rljax.rollout.build import version_bytes
from rljax.rollout.kinds import can
from rljax.run.config import Config
from rljax.run.packing import batch_shape, flat_rows, micro_batch_shape, settle_prefixes
from rljax.run.training import has_separate_forward, wanted_state
from rljax.sharding import MESH_AXES, MeshConfig, named_sharding, num_parts

ENGINE = "weights of the embedded engine"
_SMALL = 2**30  # bytes of float32 weights below which a start does not look for room


def dry_run(config: Config, card: Card | None = None) -> str:
    """Describes a run in lines, from shapes only. The last lines name memories and disks that are too small.

    ``card`` is the card of each device of a machine that is not present. None: see ``budget.find_devices``. With a
    card, ``config`` is that of a ``CompiledStep``.

    Raises:
      ValueError: Settings do not fit one another or the model, or the model's shape is unknown.
    """
    policy = policy_shape(config.model.path)
    mesh = shape_mesh(config.mesh)
    config = settle_prefixes(config, policy, says=False)
    check_shapes(config, policy, mesh)
    sizes = planned_bytes(config, policy, mesh)
    lines = _batch(config) | _model(config, policy, mesh)
    demands, decoding = find_demands(config, policy, mesh, card)
    if decoding is not None:
        lines["decoding"] = (
            f"{decoding.slots:,} of {config.num_sequences:,} responses at once, whose cache of "
            f"{decoding.slots * decoding.places:,} tokens takes {in_units(decoding.bytes)} of each device"
        )
    lines |= {demand.label: _describe(demand) for demand in demands}
    head = f"dry run of {config.run.dir}: no weights read, no server asked, no run directory made"
    in_all, per_device = map(sum, zip(*sizes.values(), strict=True))
    rows = (sizes | {"sum": (in_all, per_device)}).items()
    table = [("bytes", "in all", "per device"), *((name, *map(in_units, pair)) for name, pair in rows)]
    missing = [f"does not fit  {_describe_lack(each)}" for each in demands if not each.fits]
    return "\n".join([head, text_table(list(lines.items())), text_table(table), *missing])


def find_demands(
    config: Config, policy: PolicyConfig, mesh: Any, card: Card | None = None
) -> tuple[list[Demand], Decoding | None]:
    """Returns the run's demands on a device, the host and disks, and the embedded engine's batch (None without)."""
    sizes, devices = state_bytes(config, policy, mesh), find_devices(mesh, card)
    training = sum(part for _, part in planned_bytes(config, policy, mesh).values())
    resident = resident_bytes(sizes)
    decoding = plan_decoding(config, policy, mesh, devices, resident) if can(config.rollout.engine, "decodes") else None
    return [
        *device_demands(config, devices, training, resident, decoding),
        host_demand(config, policy, sizes, devices, training, decoding),
        *disk_demands(config, policy, sizes),
    ], decoding


def lacks_at_start(config: Config, policy: PolicyConfig, mesh: Any) -> list[str]:
    """Returns a line for each memory or disk that is too small; [] if the policy has less than 1 GiB in float32."""
    if version_bytes(policy, "float32") < _SMALL:
        return []
    demands, _ = find_demands(config, policy, mesh)
    return [f"this run may not fit {_describe_lack(demand)}" for demand in demands if not demand.fits]


def shape_mesh(config: MeshConfig) -> AbstractMesh:
    """Returns an abstract mesh of this shape. With ``fsdp: -1`` it has as many devices as JAX has here."""
    return AbstractMesh(config.shape(jax.device_count()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def check_shapes(config: Config, policy: PolicyConfig, mesh: Any) -> None:
    """Raises ValueError if the sizes of batch, model and mesh do not fit one another."""
    if config.max_engine_tokens > policy.max_position_embeddings:
        longest = "rollout" if config.max_engine_tokens == config.max_sequence_tokens else "eval"
        raise ValueError(
            f"data.max_prompt_tokens + {longest}.max_response_tokens = {config.max_engine_tokens} is longer than the "
            f"model's max_position_embeddings = {policy.max_position_embeddings}"
        )
    if max(config.rollout.stop_token_ids, default=0) >= policy.vocab_size:
        raise ValueError(
            f"rollout.stop_token_ids = {list(config.rollout.stop_token_ids)} must be in the model's vocabulary, "
            f"0..{policy.vocab_size - 1}"
        )
    check_mesh(policy, mesh)
    if config.lora.rank:
        find_targets(policy, config.lora)
    ways, replay = num_parts(mesh.shape, "batch_rows"), config.rollout.router_replay
    if replay != "none" and not policy.num_experts:
        raise ValueError(f"rollout.router_replay = {replay} is for a mixture of experts; this policy is dense")
    if config.loss.router_balance and not policy.num_experts:
        raise ValueError("loss.router_balance is for a mixture of experts; this policy is dense: give 0")
    if replay == "r2" and not has_separate_forward(config):
        raise ValueError("rollout.router_replay = r2 is for several updates a batch (loss.mini_batches, loss.epochs)")
    if config.rollout.reported > policy.vocab_size:
        most = f"the model's vocabulary, {policy.vocab_size} tokens"
        key = "top_k" if config.rollout.is_cut else "top_logprobs"
        raise ValueError(f"rollout.{key} = {config.rollout.reported} must be at most {most}")
    if config.packing.tokens_per_device == 0 and config.packing.rows_per_micro_batch % ways:
        raise ValueError(
            f"packing.rows_per_micro_batch = {config.packing.rows_per_micro_batch} must be a multiple of the "
            f"{ways} ways that the mesh splits rows (mesh.replica x mesh.fsdp x mesh.expert)"
        )
    batch_shape(config)
    if can(config.rollout.engine, "is_exact"):  # its executable also scores the responses of evaluations
        rows, _ = micro_batch_shape(config, config.max_engine_tokens)
        if config.rollout.refill and config.rollout.group_size % rows:
            raise ValueError(
                "rollout.refill with rollout.engine = exact: each response is trained in the row that sampled it, so "
                f"rollout.group_size = {config.rollout.group_size} must be a multiple of the {rows} rows of a "
                "micro-batch; set packing.rows_per_micro_batch"
            )


def state_bytes(config: Config, policy: PolicyConfig, mesh: Any) -> dict[str, tuple[int, int]]:
    """Returns (bytes in all, bytes on one device) of the arrays of trainer and engine by name, except activations."""
    state = wanted_state(config, policy, mesh)
    dtype = jnp.dtype(config.precision.compute_dtype)

    def weights(axes: Params, dtype: Any = dtype) -> Params:
        def place(leaf: Any, names: Any) -> Any:
            return leaf.update(dtype=jnp.dtype(dtype), sharding=named_sharding(mesh, names, leaf.shape))

        return jax.tree.map(place, abstract_params(policy), axes)

    axes = gathered_axes(policy) if config.mesh.keep_gathered else logical_axes(policy)
    trees = {"moments": state.opt_state, "gradients": state.params}
    if not config.lora.rank:
        trees = {"masters": state.params, **trees, f"{dtype} copy": weights(axes)}
        reference = state.params
    else:
        base = weights(logical_axes(policy))
        merged = TrainedParams(policy, config.lora).targets(base)
        trees = {f"frozen {dtype} base": base, f"{dtype} merged": merged, "adapters": state.params, **trees}
        if config.mesh.keep_gathered:
            trees[f"{dtype} gathered"] = weights(axes)
        # Without ``lora.adapter`` the reference policy is the base.
        reference = merged if config.lora.adapter else {}
    if config.loss.kl != "none":
        trees["reference policy"] = reference
    if not can(config.rollout.engine, "serves"):  # the exact one has an embedded one that guesses
        trees[ENGINE] = weights(logical_axes(policy), config.rollout.dtype)
    keeps = config.diagnosis.behaviour_responses or config.correction.part != "whole"
    if versions := config.max_version_lag if keeps else 0:
        copy = state.params if config.lora.rank else weights(logical_axes(policy))
        trees[f"policies of {versions + 1} versions"] = [copy] * (versions + 1)
    return {name: _bytes(tree) for name, tree in trees.items()}


def beside_bytes(config: Config, policy: PolicyConfig, mesh: Any) -> int:
    """Returns the bytes on one device of arrays that the step does not read.

    These are a reference policy, the weights under adapters, the embedded engine's weights, and older policies.
    """
    sizes = state_bytes(config, policy, mesh)
    # The weights under the adapters have the shapes and the dtype of the merged weights.
    names = ("reference policy", ENGINE, f"{jnp.dtype(config.precision.compute_dtype)} merged")
    return sum(part for name, (_, part) in sizes.items() if name in names or name.startswith("policies of "))


def planned_bytes(config: Config, policy: PolicyConfig, mesh: Any) -> dict[str, tuple[int, int]]:
    """Returns (bytes in total, bytes on one device) of the trainer's arrays and of the step's working memory."""
    working, devices = working_bytes(config, policy, mesh), math.prod(mesh.shape.values())
    routes = route_bytes(config, policy) // num_parts(mesh.shape, "rows")
    further = {"routes": routes, "likeliest tokens": working_top_bytes(config, mesh)}
    working |= {name: size for name, size in further.items() if size}
    return state_bytes(config, policy, mesh) | {name: (size * devices, size) for name, size in working.items()}


def _bytes(tree: Any) -> tuple[int, int]:
    """Returns the bytes of a tree's leaves, and of one device's part of them."""
    leaves = jax.tree.leaves(tree)
    part = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves), part


def in_units(count: int) -> str:
    """Formats a number of bytes with a binary unit: 1536 is 1.50 KiB."""
    exponent = max(0, min(3, (count.bit_length() - 1) // 10))
    return f"{count} B" if exponent == 0 else f"{count / 1024**exponent:.2f} {'KMG'[exponent - 1]}iB"


def _describe(demand: Demand) -> str:
    parts = ", ".join(f"{name} {in_units(size)}" for name, size in demand.parts.items())
    whole = f"{in_units(demand.total)} ({parts})" if len(demand.parts) > 1 else parts
    return whole if demand.free is None else f"{whole}; free: {in_units(demand.free)} {demand.place}"


def _describe_lack(demand: Demand) -> str:
    return f"{demand.label}: {_describe(demand)}; try {demand.remedy}"


def _batch(config: Config) -> dict[str, str]:
    prompts, group, count = config.data.batch_size, config.rollout.group_size, config.num_sequences
    of_update, updates = count // config.loss.mini_batches, config.loss.mini_batches * config.loss.epochs
    micro, rows, tokens = batch_shape(config, of_update)
    each = f", {updates} updates of {of_update}" if updates > 1 else ""
    return {
        "a step": f"{prompts} prompts x {group} responses = {count:,} responses{each}",
        "tokens a step": f"at most {count * config.max_sequence_tokens:,}: {config.data.max_prompt_tokens:,} + "
        f"{config.rollout.max_response_tokens:,} each",
        "packing": f"at most {micro} micro-batches of {rows} rows of {tokens:,} tokens",
        "prefixes": f"shared by the sequences of a row, whose responses are in rows of {flat:,} tokens for the head"
        if (flat := flat_rows(config, tokens))
        else "not shared",
    }


def _model(config: Config, policy: PolicyConfig, mesh: Any) -> dict[str, str]:
    lora, count = config.lora, sum(leaf.size for leaf in jax.tree.leaves(abstract_params(policy)))
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1 or axis in ("fsdp", "tp")}
    shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    devices, here = math.prod(sizes.values()), jax.device_count()
    more = f"; only {here} here" if devices > here else ""
    where = "of the hub" if is_hub_id(config.model.path) else "here"
    adapters = {}
    if lora.rank:
        trained = sum(leaf.size for leaf in jax.tree.leaves(TrainedParams(policy, lora).declared.abstract()))
        start = f", from {lora.adapter}" if lora.adapter else ""
        form = f"rank {lora.rank}, alpha {lora.resolved_alpha:g}, on {', '.join(lora.targets)}"
        adapters = {"lora": f"{trained:,} parameters are trained: {form}{start}"}
    return {
        "model": (
            f"{config.model.path} ({where}): {policy.num_layers} layers of width {policy.hidden_size:,}, "
            f"{policy.num_heads} heads, vocabulary {policy.vocab_size:,}"
        ),
        "parameters": f"{count:,}",
        **adapters,
        "mesh": f"{shape} = {devices} device{'s' * (devices > 1)}{more}",
    }
