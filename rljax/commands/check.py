"""Checks rljax on this machine, from the driver to a training step, and writes one JSON file to send.

    rljax check                              # Qwen3-0.6B's shapes
    rljax check --models 0.6B 1.7B 4B
    rljax check --only driver packages --json result.json
    rljax check --tiny                       # tries the kernels and the step too on a CPU

First come the driver, the packages, the compiler and /dev/shm. Then all devices add up an array. Attention and the head
are compared with float32. Nothing of a packed sequence may reach another sequence. A training step is compiled and
timed, and its memory is compared with the plan. Weights and tokens are random; nothing is downloaded. Each part is ok,
failed or skipped, with the remedy. A part that fails is recorded with its error, and the others still run; the exit
status is then 1. Parts of one kind have a process of their own, so a crash loses only what its process had not
finished.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import platform
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import jax
from tqdm import tqdm

from rljax.commands import check_kernels as kernels
from rljax.commands import check_machine as machine
from rljax.commands import check_step as training
from rljax.commands.check_kernels import CheckFacts
from rljax.distributed.files import write_whole
from rljax.distributed.processes import unused_gpus
from rljax.errors import ConfigError, install_words
from rljax.plan.dry_run import in_units
from rljax.policy.attention import choose_attention, find_implementation
from rljax.policy.config import AttentionName, PolicyConfig
from rljax.policy.head import MAX_CHUNK
from rljax.policy.hub import KNOWN_SHAPES
from rljax.run.options import parse_arguments

ROOT = Path(__file__).parents[2]
Parts = dict[str, Callable[[], CheckFacts]]
TINY = PolicyConfig(512, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, tie_word_embeddings=True)
DEVICE = "device"
_MEMORY_SHARE = "XLA_CLIENT_MEM_FRACTION"
_OLD_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses to have both
_TRACE = 4000  # characters of a failed part's traceback, or of a lost process's last words
# The processes of parts by the first word of their names, and the longest time of each (seconds).
_GROUPS = dict.fromkeys(("driver", "packages", "compiler", "shm"), "machine") | {"leak": "attention"}
_LIMITS = {"attention": 240.0, "step": 240.0}
_LIMIT_S = 120.0
STEPS = 5  # the steps that are timed
_ON_ACCELERATOR = ("attention", "leak", "head", "step")
_REMEDIES = {
    DEVICE: "reinstall jax for this machine (jax[cuda12] or jax[tpu]), and look at its driver",
    "driver": "update the driver of this machine",
    "packages": install_words("train") + "; the extra gpu for NVIDIA GPUs",
    "compiler": "install gcc and python3-dev (Debian, Ubuntu) or gcc and python3-devel (Red Hat)",
    "shm": "start the container with --ipc=host or --shm-size, or set rollout.transfer_dir",
    "collective": "NCCL_DEBUG=INFO names the link that fails; start containers with --ipc=host",
    "attention": "train with policy.attention xla, and send the file",
    "leak": "train with policy.attention xla, and send the file",
    "head": "send the file",
    "step": "try smaller --models, and send the file",
}


@dataclass(frozen=True)
class CheckArguments:
    """The arguments of the check."""

    models: tuple[Literal["0.6B", "1.7B", "4B", "8B", "14B", "32B"], ...] = ("0.6B",)
    """Sizes of Qwen3 whose training step is timed. A size that does not fit by the plan is skipped."""
    dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    """Dtypes of everything that is checked."""
    json: Path | None = None
    """The JSON file to write. None: accelerator_NAME.json in this directory, where NAME is the kind of device; no file
    with --tiny. The last line says where the file is."""
    only: tuple[str, ...] = ()
    """Names of parts, or beginnings of them, such as attention or "step 0.6B". Empty: all."""
    tiny: bool = False
    """Shapes that take seconds on a CPU; their speeds mean nothing."""
    limit_s: float = 600.0
    """The longest time of all parts together (seconds). Parts for which none is left are skipped."""


def make_parts(arguments: CheckArguments) -> Parts:
    """Returns the functions to run, by the names of their parts, in the order of the report; the device comes first."""
    tiny = arguments.tiny
    policies = {"tiny": TINY} if tiny else {size: KNOWN_SHAPES[f"Qwen/Qwen3-{size}"] for size in arguments.models}
    smallest = next(iter(policies.values()), TINY)
    size = training.TINY if tiny else training.StepSize()
    repeats = 2 if tiny else 7
    part = functools.partial
    largest = max(policies.items(), key=lambda one: one[1].hidden_size, default=("tiny", TINY))
    parts: Parts = {
        DEVICE: describe_device,
        "driver": machine.check_driver,
        "packages": machine.check_packages,
        "compiler": machine.check_compiler,
        "shm": part(machine.check_shm, *largest),
        "collective": part(machine.check_collective, 1 if tiny else 256, repeats),
    }
    for dtype in arguments.dtypes:
        names: tuple[AttentionName, ...] = ("auto", "xla")
        for tokens, name in itertools.product((1152,) if tiny else (2048, 9216), names):
            given, words = (name, tokens, dtype, smallest), f"{name} {tokens} {dtype}"
            parts[f"attention {words}"] = part(on_attention, kernels.check_attention, *given, repeats)
            parts[f"leak {words}"] = part(on_attention, kernels.check_leak, *given)
        rows, chunk = (64, 128) if tiny else (2048, MAX_CHUNK)
        parts[f"head {dtype}"] = part(kernels.check_head, rows, dtype, smallest, repeats, chunk)
    steps = 2 if tiny else STEPS
    for (model, policy), dtype in itertools.product(policies.items(), arguments.dtypes):
        parts[f"step {model} {dtype}"] = part(training.check_step, model, policy, dtype, steps, size, None)
    return parts


def on_attention(
    check: Callable[..., CheckFacts], name: AttentionName, tokens: int, dtype: str, policy: PolicyConfig, *rest: Any
) -> CheckFacts:
    """Runs a check of one attention implementation. If auto means xla it is skipped, because xla has its own part."""
    here = (jax.devices()[0], dtype, policy.head_dim)
    picked = find_implementation(name, *here)
    if name != picked == "xla":
        return {"skipped": "auto is xla here"}
    attention = choose_attention(name, *here)
    found = check(attention, tokens, dtype, policy, *rest)
    return found | {"implementation": picked, "says": f"{picked}: {found['says']}"}


def group(name: str) -> str:
    """Returns the name of the process of a part. Kernels of one kind share a process, and each step has its own."""
    first = name.partition(" ")[0]
    return name if first == "step" else _GROUPS.get(first, first)


def describe_device() -> CheckFacts:
    """Returns the devices, their drivers and the versions of JAX."""
    device = jax.devices()[0]
    try:
        unused = unused_gpus(jax.local_device_count() if device.platform == "gpu" else 0)
    except ConfigError as error:
        unused = str(error)
    memory = training.device_memory()
    said = in_units(memory) if memory else "memory not said"
    return {
        "says": f"{jax.device_count()} x {device.device_kind}, {said}, jax {jax.__version__}",
        "kind": device.device_kind,
        "platform": device.platform,
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "memory_bytes": memory,
        "compute_capability": getattr(device, "compute_capability", None),
        "runtime": device.client.platform_version,
        "driver": machine.nvidia_smi("name,driver_version,memory.total"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": machine.said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "problems": [unused] if unused else [],
    }


def run_parts(
    parts: Parts, arguments: CheckArguments, keep: Callable[[dict[str, CheckFacts]], object]
) -> dict[str, CheckFacts]:
    """Runs the parts, each group in a process of its own, and returns their findings by name.

    ``keep`` is called with all findings so far after each part, so that a program that is killed leaves them. On a CPU
    without --tiny the kernels and the step are skipped, because they would take hours there.
    """
    found: dict[str, CheckFacts] = {}
    end = time.monotonic() + arguments.limit_s
    with tqdm(total=len(parts), unit="part", file=sys.stderr) as bar:
        for one in dict.fromkeys(map(group, parts)):
            bar.set_postfix_str(one)
            members = {name: part for name, part in parts.items() if group(name) == one}
            left, why = end - time.monotonic(), {}
            on_cpu = found.get(DEVICE, {}).get("platform") == "cpu" and not arguments.tiny
            if on_cpu and one.partition(" ")[0] in _ON_ACCELERATOR:
                why = {"skipped": "JAX finds no accelerator here", "remedy": "--tiny tries the program on a CPU"}
            elif left <= 0:
                why = {"skipped": f"no time is left of --limit-s {arguments.limit_s:g}", "remedy": f"--only '{one}'"}
            limit_s = min(left, _LIMITS.get(one.partition(" ")[0], _LIMIT_S))
            for name, result in ((name, why) for name in members) if why else run_apart(members, limit_s):
                found[name] = judged(name, result)
                keep(found)
                bar.update(1)
    return {name: found[name] for name in parts}


def judged(name: str, found: CheckFacts) -> CheckFacts:
    """Returns a part's findings with its status (ok, failed or skipped), and with its remedy unless it is ok."""
    failed = found.get("error") or found.get("problems")
    status = "failed" if failed else "skipped" if "skipped" in found else "ok"
    remedy = found.get("remedy") or (_REMEDIES[name.partition(" ")[0]] if failed else None)
    return {"status": status, **found, "remedy": remedy}


def run_apart(parts: Parts, limit_s: float) -> Iterator[tuple[str, CheckFacts]]:
    """Runs parts in one process and yields the findings of each.

    If the process dies or takes longer than ``limit_s`` seconds, each part without findings gets the end of its output.
    """
    if _OLD_MEMORY_SHARE not in os.environ:
        os.environ.setdefault(_MEMORY_SHARE, "0.92")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    context = multiprocessing.get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    left, end = dict(parts), time.monotonic() + limit_s
    reason = f"not done within {limit_s:.0f} s"
    with tempfile.TemporaryDirectory() as cache, tempfile.NamedTemporaryFile() as log:
        child = context.Process(target=send_findings, args=(parts, sender, log.name, cache))
        child.start()
        sender.close()
        try:
            while left and results.poll(max(0.0, end - time.monotonic())):
                name, found = results.recv()
                del left[name]
                yield name, found
        except EOFError:
            child.join()
            reason = f"the process ended with status {child.exitcode}"
        finally:
            child.kill()
            child.join()
        words = log.read().decode(errors="replace")[-_TRACE:]
    yield from ((name, {"error": f"{reason}: {words}"}) for name in left)


def send_findings(parts: Parts, sender: Connection, log: str, cache: str) -> None:
    """Runs parts in this process and sends the findings of each. The process's output goes to the file ``log``.

    Compiled programs are kept in the directory ``cache`` unless JAX has another one. Otherwise a measured step would be
    compiled twice: for its memory, and by its first call.
    """
    if not jax.config.values.get("jax_compilation_cache_dir"):
        jax.config.update("jax_compilation_cache_dir", cache)
    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    for name, part in parts.items():
        start = time.perf_counter()
        try:
            found = part()
        except Exception as error:  # of any kind: the other parts go on
            reason = f"{type(error).__name__}: {error}"
            found = {"error": reason[:_TRACE], "traceback": traceback.format_exc()[-_TRACE:]}
        sender.send((name, found | {"seconds": round(time.perf_counter() - start, 2)}))


def line(found: CheckFacts) -> str:
    """Returns one line about a part: its status, its findings or its problems, and the remedy."""
    problems = [found["error"].strip().splitlines()[0][:200]] if "error" in found else found.get("problems", [])
    what = "; ".join(problems) or found.get("skipped") or found.get("says", "")
    remedy = f" -> {found['remedy']}" if found["remedy"] else ""
    return f"{found['status']}: {what}{remedy}"


def main(argv: Sequence[str]) -> int:
    """Runs the checks, prints a table, writes the JSON file, and returns the exit status."""
    arguments = parse_arguments(CheckArguments, argv, prog="rljax check", description=__doc__ or "")
    parts = make_parts(arguments)
    began = time.monotonic()

    def keep(found: dict[str, CheckFacts]) -> Path | None:
        path = arguments.json
        if path is None and not arguments.tiny:
            path = Path(f"accelerator_{slug(found[DEVICE].get('kind', 'unknown'))}.json")
        if path is not None:
            failed = [name for name, one in found.items() if one["status"] == "failed"]
            document = {"command": shlex.join(["rljax", "check", *argv]), "parts": found, "failed": failed}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(document, indent=1) + "\n")
        return path

    found = run_parts({name: part for name, part in parts.items() if wanted(name, arguments.only)}, arguments, keep)
    counts = Counter(one["status"] for one in found.values())
    failed = [name for name, one in found.items() if one["status"] == "failed"]
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {line(one)}" for name, one in found.items()))
    said_of_all = ", ".join(f"{counts[status]} {status}" for status in ("ok", "failed", "skipped"))
    print(f"{said_of_all} in {time.monotonic() - began:.0f} s")
    if path := keep(found):
        print(f"written to {path}; send it to the developers of rljax")
    return 1 if failed else 0


def wanted(name: str, only: Sequence[str]) -> bool:
    """Returns whether --only names a part; the device is always wanted."""
    return not only or name == DEVICE or any(name.startswith(beginning) for beginning in only)


def slug(kind: str) -> str:
    """Returns a kind of device as part of a file's name: nvidia_h200 for NVIDIA H200."""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")
