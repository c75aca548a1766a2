"""Compares the needs of a run with the memory of a device, the memory of the host and the free space on disk."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rljax.distributed.files import free_memory, memory_directory
from rljax.distributed.gpus import tasks_here
from rljax.plan.memory import TOP_BYTES
from rljax.policy.config import PolicyConfig
from rljax.rollout.build import version_bytes
from rljax.rollout.decode_sizes import batch_sizes, cache_room, cache_row_bytes, padded_rows
from rljax.rollout.injected import CACHES
from rljax.rollout.kinds import can
from rljax.run.config import Config
from rljax.run.packing import batch_shape
from rljax.sharding import num_parts

Sizes = dict[str, tuple[int, int]]  # by name: bytes in all, bytes on one device

# The bytes of a trainer's process on the host without its arrays: Python, JAX and the compiled programs. On a CPU the
# allocator also keeps freed memory. Measured numbers belong here, with the run that gave them.
PROCESS_BYTES = 2 * 2**30
_DEVICES_A_HOST = 8  # the devices of one host, for a mesh whose devices are not present
# The ends of the names of arrays in ``dry_run.state_bytes`` that exist only during an update.
_OF_AN_UPDATE = ("gradients", " copy", " gathered")


class Card(NamedTuple):
    """A kind of accelerator card, of which JAX sees each as one device."""

    name: str  # the maker's name of the card
    memory_bytes: int  # the size of the main memory


H100 = Card("NVIDIA H100 SXM 80 GB", 84_942_979_072)
TPUS = {
    "v4": Card("TPU v4", 32 * 2**30),
    "v5e": Card("TPU v5e", 16 * 2**30),
    "v5p": Card("TPU v5p", 95 * 2**30),
    "v6e": Card("TPU v6e", 32 * 2**30),
    "tpu7x": Card("TPU7x, half a chip", 96 * 2**30),
}


class Decoding(NamedTuple):
    """The batch that the embedded engine decodes at once."""

    slots: int  # the number of responses that are decoded at once
    places: int  # the number of tokens for which the cache of one response has room
    bytes: int  # the size of the cache on one device


class Demand(NamedTuple):
    """The bytes that a run needs in one memory or on one disk, and the bytes that are there."""

    label: str  # the name of the place in a table
    parts: dict[str, int]  # the bytes by purpose
    place: str  # a phrase for the place, such as "at runs/run"
    free: int | None  # the bytes that the place has for the run, or None if they are not known
    remedy: str  # the settings that would help

    @property
    def total(self) -> int:
        """The sum of all needs (bytes)."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the memory or disk has enough bytes; True if their number is not known."""
        return self.free is None or self.total <= self.free


class Devices(NamedTuple):
    """The devices of a run."""

    number: int  # the number of devices
    is_here: bool  # whether JAX has the devices, on this host and others of the run
    name: str  # the name of a device
    memory: int | None  # the memory of a device in bytes, or None for a CPU, whose memory is the host's

    @property
    def on_host(self) -> int:
        """The number of devices on one host."""
        return min(self.number, jax.local_device_count() * tasks_here() if self.is_here else _DEVICES_A_HOST)


def find_devices(mesh: Any, card: Card | None = None) -> Devices:
    """Returns the number, name and memory of the devices of a mesh. Each device is a ``card``.

    None for ``card`` means the devices that JAX has, or H100s if JAX has too few for the mesh.
    """
    count = math.prod(mesh.shape.values())
    if card is None and count > jax.device_count():
        card = H100
    if card is not None:
        return Devices(count, False, card.name, card.memory_bytes)
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return Devices(count, True, device.device_kind, None if limit is None else int(limit))


def resident_bytes(sizes: Sizes) -> int:
    """Returns the bytes on one device between updates. ``sizes`` come from ``dry_run.state_bytes``."""
    return sum(part for name, (_, part) in sizes.items() if not name.endswith(_OF_AN_UPDATE))


def plan_decoding(config: Config, policy: PolicyConfig, mesh: Any, devices: Devices, resident: int) -> Decoding:
    """Returns the size of the batch that the embedded engine decodes if ``resident`` bytes of each device are taken.

    ``rollout.decode_tokens: 0`` takes a share of the memory that is then free.
    """
    rollout, places, tokens = config.rollout, config.max_sequence_tokens, config.rollout.decode_tokens
    cache_dtype = CACHES.get(rollout.kv_cache_dtype) or rollout.dtype
    of_row, budget = cache_row_bytes(policy, mesh, places, rollout.dtype, cache_dtype), tokens // places
    if not tokens:
        free = None if devices.memory is None else max(0, devices.memory - resident)
        budget = int(cache_room(free, jax.local_device_count()) / of_row)
    rows, n = config.num_sequences, rollout.group_size
    if rollout.environment is not None:
        rows, n = padded_rows(rows), 1
    slots = batch_sizes(rows, n, budget, num_parts(mesh.shape, "rows")).slots
    return Decoding(slots, places, math.ceil(slots * of_row))


def route_bytes(config: Config, policy: PolicyConfig) -> int:
    """Returns the most bytes of a step's routes, the experts of each token, for every position of its rows."""
    return 0 if config.rollout.router_replay == "none" else policy.route_bytes * math.prod(batch_shape(config))


def top_bytes(config: Config) -> int:
    """Returns the most bytes of the sampler's likeliest tokens for the responses of one step."""
    return config.num_sequences * config.rollout.max_response_tokens * config.rollout.reported * TOP_BYTES


def device_demands(
    config: Config, devices: Devices, training: int, resident: int, decoding: Decoding | None
) -> list[Demand]:
    """Returns the demands of one device in an update, and while the embedded engine samples; [] for a CPU.

    ``training`` and ``resident`` are the bytes on one device in an update and between updates. ``decoding`` is the
    batch of the embedded engine, or None.
    """
    if devices.memory is None:
        return []
    place = f"on one {devices.name}"
    remedy = ", ".join(_device_settings(config))
    demands = [Demand("in training", {"arrays of an update": training}, place, devices.memory, remedy)]
    if decoding is not None:
        parts = {"arrays": resident, "cache": decoding.bytes}
        if tops := top_bytes(config):
            parts["likeliest tokens"] = tops  # Every device has the likeliest tokens of all responses.
        fewer = f"rollout.decode_tokens below {decoding.slots * decoding.places}, a larger mesh.fsdp"
        demands.append(Demand("in sampling", parts, place, devices.memory, fewer))
    return demands


def _device_settings(config: Config) -> Iterator[str]:
    """Yields settings that make an update need less of a device's memory, the cheapest first."""
    if config.mesh.keep_gathered:
        yield "mesh.keep_gathered: false"
    if config.precision.remat_policy in ("none", "dots"):
        yield "precision.remat: blocks"
    elif config.precision.remat_policy == "blocks":
        yield "precision.remat: offload"
    context = config.mesh.context
    one_row = config.packing.resolve_row_tokens(config.max_sequence_tokens, context) // context
    if config.packing.tokens_per_device >= 2 * one_row or not config.packing.tokens_per_device:
        yield f"packing.tokens_per_device: {one_row}"
    yield "a larger mesh.fsdp"
    if not config.lora.rank:
        yield "adapters (lora.rank)"


def host_demand(
    config: Config, policy: PolicyConfig, sizes: Sizes, devices: Devices, training: int, decoding: Decoding | None
) -> Demand:
    """Returns the demand of one host on its memory.

    ``sizes`` are the arrays of ``dry_run.state_bytes``. ``training`` is the number of bytes on one device in an update.
    ``decoding`` is the batch of the embedded engine, or None.
    """
    resident, state = resident_bytes(sizes), saved_bytes(sizes)[1] * devices.on_host
    served, on_cpu, remedy = can(config.rollout.engine, "serves"), devices.memory is None, "adapters (lora.rank)"
    weights, tops = version_bytes(policy, config.rollout.dtype), top_bytes(config)
    in_memory = served and transfer_directory(config) == Path("/dev/shm")
    if in_memory:
        remedy = "rollout.transfer_dir on a disk"
    if on_cpu:
        remedy = ", ".join(name for name in _device_settings(config) if "mesh" not in name and "offload" not in name)
    elif config.rollout.colocated:
        remedy = "rollout.colocated: false"
    # The batches of responses that a step holds, with refilling one further round, and those sampled ahead.
    batches = 1 + config.rollout.refill + config.rollout.max_staleness
    packed = math.prod(batch_shape(config)) * config.trained_tops * TOP_BYTES
    sampling = 0 if decoding is None else resident + decoding.bytes + tops
    parts = {
        "the process": PROCESS_BYTES,
        f"{config.publish.versions} versions in /dev/shm": config.publish.versions * weights * in_memory,
        "the last version for deltas": weights * (served and config.publish.store != "shared"),
        "likeliest tokens": batches * tops + packed,  # one more batch is packed into rows
        "routes": batches * route_bytes(config, policy),
        "arrays of an update": devices.on_host * max(training, sampling) * on_cpu,
        # The state is there twice for a moment.
        "arrays between updates": (devices.on_host * resident + state) * (config.rollout.colocated and not on_cpu),
        # On a CPU a save makes no copy of the state.
        "a checkpoint on its way": state * (not on_cpu),
    }
    parts = {name: size for name, size in parts.items() if size}
    return Demand("on the host", parts, "in the host's memory", free_memory() if devices.is_here else None, remedy)


def disk_demands(config: Config, policy: PolicyConfig, sizes: Sizes) -> list[Demand]:
    """Returns the run's demands on the disk of its directory and, with servers, on that of published weights."""
    wanted, state, run_dir = config.checkpoint, saved_bytes(sizes)[0], Path(config.run.dir)
    parts = {f"{wanted.keep} checkpoints": wanted.keep * state, "the next one": state}
    remedies = ["a smaller checkpoint.keep"] if wanted.keep > 1 else []
    if wanted.keep_best:
        parts["the best and the next best"] = 2 * state
        remedies.append("checkpoint.keep_best: false")
    remedy = ", ".join([*remedies, "run.dir on a larger disk"])
    demands = [Demand("on disk", parts, f"at {run_dir}", free_space(run_dir), remedy)]
    if can(config.rollout.engine, "serves"):
        place, count = transfer_directory(config), config.publish.versions
        size = count * version_bytes(policy, config.rollout.dtype)
        remedy = "rollout.transfer_dir on a larger disk"
        if place == Path("/dev/shm"):
            remedy += ", a larger /dev/shm (--ipc=host or --shm-size for a container)"
        demands.append(Demand("to servers", {f"{count} versions": size}, f"at {place}", free_space(place), remedy))
    return demands


def saved_bytes(sizes: Sizes) -> tuple[int, int]:
    """Returns (bytes in all, bytes on one device) of a checkpoint: the trained parameters and their moments."""
    pairs = [pair for name, pair in sizes.items() if name in ("masters", "adapters", "moments")]
    return sum(whole for whole, _ in pairs), sum(part for _, part in pairs)


def transfer_directory(config: Config) -> Path:
    """Returns the directory into which published versions of the weights are written."""
    return memory_directory() if config.rollout.transfer_dir is None else Path(config.rollout.transfer_dir)


def free_space(path: Path) -> int | None:
    """Returns the free bytes on the disk of a directory, which may not exist yet; None if they are not known."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    with contextlib.suppress(OSError):
        return shutil.disk_usage(existing).free
    return None
