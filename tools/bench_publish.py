"""Measures the cost of a publish by size and by changed share, from the trainer's arrays to a server's mirror.

Each round does everything once in turn: the tensors in the layout of the files, the version as a delta, the same
version dense, and a plain copy of the same number of bytes in memory. The rounds of one size share the state of the
machine, so their ratios are meaningful. The time on a link is not measured: it is the bytes over the link's rate, and
is shown beside the measurements. The seconds of the processor (all threads) are shown, too, because other programs
change them less.

    python tools/bench_publish.py                                # a table
    python tools/bench_publish.py --output benchmarks/publish.json
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from rljax.distributed.files import memory_directory
from rljax.errors import ConfigError, run_cli
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import hf_tensors
from rljax.policy.model import Params, abstract_params
from rljax.weights.format import Base, TensorRecord, Version, write_version
from rljax.weights.mirror import Mirror
from rljax.weights.pull import pull
from rljax.weights.source import Source
from rljax.weights.sums import array_checksum, bits_of, changed_checksum
from rljax.weights.writer import PartWriter, WrittenFiles, whole_parts

GIGABIT = 125e6  # bytes in a second


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 0.6, 1.7], help="of bfloat16 weights")
    parser.add_argument("--changed", type=float, nargs="+", default=[0.001, 0.01, 0.1, 1.0], help="shares of elements")
    parser.add_argument("--rounds", type=int, default=3, help="of each case (default: 3)")
    parser.add_argument(
        "--directory", type=Path, default=memory_directory(), help="to work in (default: this machine's memory)"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    needed, room = 6e9 * max(options.gigabytes), shutil.disk_usage(options.directory).free
    if needed > room:
        raise ConfigError(f"{options.directory} has {room / 1e9:.1f} GB of room; {needed / 1e9:.1f} GB are needed")
    cases, load = [], os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as directory,
        tqdm(total=len(options.gigabytes) * len(options.changed) * options.rounds, disable=None) as progress,
    ):
        for size in options.gigabytes:
            for share in options.changed:
                rounds = []
                for _ in range(options.rounds):
                    rounds.append(one_round(Path(directory), size, share))
                    progress.update()
                cases.append(summary(size, share, rounds))
    print(table(cases))
    if options.output:
        machine = {"hardware": f"{processor()}, {os.cpu_count()} cores", "python": platform.python_version()}
        machine["load before and after"] = f"{load:.1f}, {os.getloadavg()[0]:.1f}"
        command = f"python tools/bench_publish.py {' '.join(argv)}".strip()
        options.output.write_text(json.dumps({"command": command, **machine, "cases": cases}, indent=2) + "\n")
    return 0


def policy_of(size: float) -> PolicyConfig:
    """Returns a policy with about ``size`` GB of bfloat16 weights, in tensors of 2 to 6 MB and a table of 64 MB."""
    shape = PolicyConfig(32_768, 1024, 3072, 1, 16, 8, 128, tie_word_embeddings=True)
    one, two = (count_parameters(replace(shape, num_layers=layers)) for layers in (1, 2))
    return replace(shape, num_layers=max(1, 1 + round((size * 1e9 / 2 - one) / (two - one))))


def count_parameters(policy: PolicyConfig) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(policy)))


def weights(policy: PolicyConfig, rng: np.random.Generator) -> Params:
    """Returns the trainer's weights: float32 on the devices, distributed like trained ones, exact in bfloat16."""
    noise = (0.02 * rng.standard_normal(2**25, np.float32)).astype(ml_dtypes.bfloat16).astype(np.float32)
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.resize(noise, math.prod(leaf.shape)).reshape(leaf.shape)), abstract_params(policy)
    )


def changed(params: Params, share: float, rng: np.random.Generator) -> Params:
    """Returns the next version, in which ``share`` of the elements have another lowest bit in bfloat16.

    One step at a low rate changes weights in this way.
    """
    flips = np.where(rng.random(2**25) < share, np.uint32(1 << 16), np.uint32(0))

    def flipped(leaf: jax.Array) -> jax.Array:
        bits = np.asarray(leaf).view(np.uint32) ^ np.resize(flips, leaf.size).reshape(leaf.shape)
        return jnp.asarray(bits.view(np.float32))

    return jax.tree.map(flipped, params)


@contextmanager
def timed(seconds: dict[str, float], name: str, directory: Path, size: float) -> Iterator[None]:
    """Measures the time of the block, and the processor's, after ``size`` GB of the directory were in use.

    A virtual machine gives free memory back to its host. To get it again takes far longer than to copy a file.
    """
    with open(directory / "warm", "wb") as file:
        for _ in range(math.ceil(size * 1e9 / 2**26)):
            file.write(bytes(2**26))
    (directory / "warm").unlink()
    began, cpu = time.perf_counter(), time.process_time()
    yield
    seconds[name] = time.perf_counter() - began
    seconds[name.removesuffix("_s") + "_cpu_s"] = time.process_time() - cpu


def one_round(directory: Path, size: float, share: float) -> dict[str, float]:
    """Returns the seconds of each part, and the bytes."""
    rng = np.random.default_rng(0)
    root, mirror = directory / "weights", Mirror(directory / "mirror")
    policy = policy_of(size)
    params_old = weights(policy, rng)
    params_new = changed(params_old, share, rng)
    old, new = (dict(hf_tensors(params, policy, jnp.bfloat16)) for params in (params_old, params_new))
    sums_old = {name: array_checksum(array) for name, array in old.items()}
    sums_new = {name: after(sums_old[name], old[name], new[name]) for name in old}
    writer, seconds = PartWriter(whole_parts), dict[str, float]()
    measured = functools.partial(timed, seconds, directory=directory, size=size)

    def version(
        name: str, sums: dict[str, Any], base: Base | None, dense: WrittenFiles, delta: WrittenFiles
    ) -> Version:
        records = {key: TensorRecord(array.shape, sums[key]) for key, array in old.items()}
        return Version(name, name, "bfloat16", records, dense.files | delta.files, dense.pieces, delta.pieces, base)

    none, source = WrittenFiles((), {}), Source(str(root))
    for name in ("v1-1", "v2-1", "v2-2"):
        (root / name).mkdir(parents=True)
    writer.collect(old.items(), root / "v1-1")
    first = version("v1-1", sums_old, None, writer.write("dense", root / "v1-1"), none)
    write_version(root / "v1-1", first)
    pull(source, "v1-1", mirror)

    with measured("tensors_s"):
        for _ in hf_tensors(params_new, policy, jnp.bfloat16):
            pass
    with measured("compare_and_encode_s"):
        taken = writer.collect(new.items(), root / "v2-2")
    has_delta = taken.delta_bytes is not None and taken.delta_bytes < taken.dense_bytes
    if has_delta:
        with measured("write_delta_s"):
            delta = writer.write("delta", root / "v2-2")
        write_version(root / "v2-2", version("v2-2", sums_new, Base(first.name, first.digest), none, delta))
    with measured("write_dense_s"):
        dense = writer.write("dense", root / "v2-1")
    write_version(root / "v2-1", version("v2-1", sums_new, None, dense, none))
    dense_bytes = sum(file.bytes for file in dense.files.values())
    with measured("plain_copy_s"):
        for file in dense.files:
            shutil.copyfile(root / "v2-1" / file, root / f"copy-{file}")
    found = {"dense_bytes": float(dense_bytes), "elements": float(taken.elements)}
    if has_delta:
        with measured("pull_delta_s"):
            pulled = pull(source, "v2-2", mirror)
        assert pulled.deltas == 1
        found |= {"delta_bytes": float(pulled.bytes), "pull_delta_checks_s": pulled.check_s}
    mirror.clear()
    with measured("pull_dense_s"):
        pulled = pull(source, "v2-1", mirror)
    assert pulled.dense
    found["pull_dense_checks_s"] = pulled.check_s
    shutil.rmtree(root)
    shutil.rmtree(mirror.root)
    return found | seconds


def after(before: Any, old: np.ndarray, new: np.ndarray) -> Any:
    """Returns the checksum of the new tensor, computed from the checksum of the old one."""
    flat_old, flat_new = bits_of(old).reshape(-1), bits_of(new).reshape(-1)
    places = np.flatnonzero(flat_old != flat_new)
    return changed_checksum(before, flat_old[places], flat_new[places], places)


def summary(size: float, share: float, rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the medians of the rounds, and the ratios that matter."""
    case = {"gigabytes": size, "changed": share}
    case |= {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    case["tensors_over_plain_copy"] = case["tensors_s"] / case["plain_copy_s"]
    case["write_dense_over_plain_copy"] = case["write_dense_s"] / case["plain_copy_s"]
    # Checks are shown separately: of all bits in a dense pull, of the mirror and the new bits in a delta.
    case["pull_dense_unchecked_s"] = case["pull_dense_s"] - case["pull_dense_checks_s"]
    case["pull_dense_unchecked_over_plain_copy"] = case["pull_dense_unchecked_s"] / case["plain_copy_s"]
    case["pull_dense_over_plain_copy"] = case["pull_dense_s"] / case["plain_copy_s"]
    case["pull_dense_cpu_over_plain_copy"] = case["pull_dense_cpu_s"] / case["plain_copy_cpu_s"]
    case["dense_on_1_gbit_s"] = case["dense_bytes"] / GIGABIT
    dense = case["write_dense_s"] + case["dense_on_1_gbit_s"] + case["pull_dense_s"]
    if "delta_bytes" in case:
        case["delta_bytes_over_dense"] = case["delta_bytes"] / case["dense_bytes"]
        case["delta_on_1_gbit_s"] = case["delta_bytes"] / GIGABIT
        encoding = case["compare_and_encode_s"] + case["write_delta_s"]
        delta = encoding + case["delta_on_1_gbit_s"] + case["pull_delta_s"]
        case["delta_over_dense_at_1_gbit"] = delta / dense
        unchecked = delta - case["pull_delta_checks_s"]
        case["delta_over_dense_at_1_gbit_without_checks"] = unchecked / (dense - case["pull_dense_checks_s"])
    return case


def table(cases: Sequence[dict[str, float]]) -> str:
    delta, dense = "delta/dense bytes  encode   write    pull  checks", "dense: write    pull  checks    rest"
    lines = [f"   GB  changed tensors  {delta} | {dense} |   copy | delta/dense at 1 Gbit/s | pull/copy: time    CPU"]
    for case in cases:
        shown = [f"{case['gigabytes']:5.2f} {case['changed']:8.3f} {case['tensors_s']:7.2f}"]
        if "delta_bytes" in case:
            shown.append(f"{case['delta_bytes_over_dense']:17.4f}")
            names = ("compare_and_encode_s", "write_delta_s", "pull_delta_s", "pull_delta_checks_s")
            shown.append(" ".join(f"{case[name]:7.2f}" for name in names))
        else:
            shown.append(f"{'dense':>17s} {case['compare_and_encode_s']:7.2f} {'':23s}")
        names = ("write_dense_s", "pull_dense_s", "pull_dense_checks_s", "pull_dense_unchecked_s")
        shown.append("|" + "".join(f"{case[name]:8.2f}" for name in names).rjust(36))
        shown.append(f"| {case['plain_copy_s']:6.2f} | {case.get('delta_over_dense_at_1_gbit', 1.0):8.3f}")
        over = case["pull_dense_over_plain_copy"], case["pull_dense_cpu_over_plain_copy"]
        shown.append("".join(f"{ratio:7.2f}" for ratio in over).rjust(41))
        lines.append(" ".join(shown))
    return "\n".join(lines)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(run_cli(main))
