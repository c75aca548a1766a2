"""Checks rljax on the accelerator of this machine, in about ten minutes, and writes one JSON file to send.

    rljax check                              # Qwen3-0.6B's shapes
    rljax check --models 0.6B 1.7B 4B
    rljax check --tiny --output tiny.json    # tries the program itself, on a CPU too

Attention and the head are compared with float32. Nothing of a packed sequence may reach another sequence. A training
step is compiled and timed, and its memory is compared with the plan. Weights and tokens are random; nothing is
downloaded. A part that fails is recorded with its error, and the others still run; the exit status is then 1.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from tqdm import tqdm

from rljax.commands import check_kernels as kernels
from rljax.commands import check_step as training
from rljax.distributed.files import write_whole
from rljax.errors import ConfigError
from rljax.plan.dry_run import in_units
from rljax.policy.attention import choose_attention, find_implementation
from rljax.policy.config import AttentionName, PolicyConfig
from rljax.policy.hub import KNOWN_SHAPES
from rljax.run.options import parse_arguments

ROOT = Path(__file__).parents[2]
Found = dict[str, Any]
Parts = dict[str, Callable[[], Found]]
TINY = PolicyConfig(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
)
DEVICE = "device"
_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_TRACE = 4000  # characters of a failed part's traceback, or of a lost process's last words


@dataclass(frozen=True)
class Arguments:
    """The arguments of the check."""

    models: tuple[Literal["0.6B", "1.7B", "4B", "8B", "14B", "32B"], ...] = ("0.6B",)
    """Sizes of Qwen3 whose training step is timed. A size that does not fit by the plan is skipped."""
    dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    """Dtypes of everything that is checked."""
    steps: int = 5
    """Steps that are timed, after two that are not."""
    remat: Literal["auto", "none", "dots", "blocks", "offload"] = "auto"
    """The value of precision.remat. auto: the first of none, dots and blocks whose plan fits the memory."""
    output: Path | None = None
    """JSON file for the result. None: accelerator_NAME.json in this directory, where NAME is the kind of device; no
    file with --tiny."""
    only: tuple[str, ...] = ()
    """Names of parts, or beginnings of them, such as attention or "step 0.6B". Empty: all."""
    tiny: bool = False
    """Shapes that take seconds on a CPU; their speeds mean nothing."""
    separate: bool = True
    """Run attention, the head and each training step in processes of their own. A crash then loses only what its
    process had not finished, and each step's peak of memory is its own."""
    limit_s: float = 900.0
    """The longest time of such a process (seconds)."""


# --- the parts --------------------------------------------------------------------------------------------------------


def make_parts(arguments: Arguments) -> Parts:
    """Returns the functions to run, by the names of their parts, in the order of the report; the device comes first."""
    tiny = arguments.tiny
    policies = {"tiny": TINY} if tiny else {size: KNOWN_SHAPES[f"Qwen/Qwen3-{size}"] for size in arguments.models}
    smallest = next(iter(policies.values()), TINY)
    size = training.TINY if tiny else training.StepSize()
    repeats = 2 if tiny else 7
    implementations: tuple[AttentionName, ...] = ("auto", "xla")
    parts: Parts = {DEVICE: describe_device}
    for dtype in arguments.dtypes:
        for tokens in (1152,) if tiny else (2048, 9216):
            for name in implementations:
                given = (name, tokens, dtype, smallest)
                words = f"{name} {tokens} {dtype}"
                parts[f"attention {words}"] = functools.partial(on_attention, kernels.check_attention, *given, repeats)
                parts[f"leak {words}"] = functools.partial(on_attention, kernels.check_leak, *given)
        chunk = (128,) if tiny else ()
        parts[f"head {dtype}"] = functools.partial(
            kernels.check_head, 64 if tiny else 2048, dtype, smallest, repeats, *chunk
        )
    remat = None if arguments.remat == "auto" else arguments.remat
    for model, policy in policies.items():
        for dtype in arguments.dtypes:
            words = f"step {model} {dtype}"
            parts[words] = functools.partial(training.check_step, model, policy, dtype, arguments.steps, size, remat)
    return parts


def on_attention(
    check: Callable[..., Found], name: AttentionName, tokens: int, dtype: str, policy: PolicyConfig, *rest: Any
) -> Found:
    """Runs a check of one implementation. It is skipped where auto means xla, because xla has a part of its own."""
    here = (jax.devices()[0], dtype, policy.head_dim)
    picked = find_implementation(name, *here)
    if name != picked == "xla":
        return {"skipped": "auto is xla here"}
    attention = choose_attention(name, *here)
    return {"implementation": picked} | check(attention, tokens, dtype, policy, *rest)


def group(name: str) -> str:
    """Returns the name of the process of a part. Kernels of one kind share a process, and each step has its own."""
    first = name.partition(" ")[0]
    return {"leak": "attention", "step": name}.get(first, first)


def describe_device() -> Found:
    """Returns the devices, their drivers and the versions of JAX."""
    device = jax.devices()[0]
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "memory_bytes": training.device_memory(),
        "compute_capability": getattr(device, "compute_capability", None),
        "runtime": device.client.platform_version,
        "driver": nvidia_driver() if device.platform == "gpu" else None,
        "packages": {name: version(name) for name in ("rljax", "jax", "jaxlib", "libtpu", "nvidia-cudnn-cu12")},
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }


def nvidia_driver() -> str | None:
    """Returns the name, driver and memory of each GPU, as nvidia-smi prints them."""
    return said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def said(*words: str) -> str | None:
    """Returns the standard output of a program, or None where it is not installed or fails."""
    if shutil.which(words[0]) is None:
        return None
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def version(name: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- running them -----------------------------------------------------------------------------------------------------


def run_part(part: Callable[[], Found]) -> Found:
    """Runs a part; returns its findings or its error, and the time that it took."""
    start = time.perf_counter()
    try:
        found = part()
    except Exception as error:  # of any kind: the other parts go on
        reason = f"{type(error).__name__}: {error}"
        found = {"error": reason[:_TRACE], "traceback": traceback.format_exc()[-_TRACE:]}
    return found | {"seconds": round(time.perf_counter() - start, 2)}


def run_here(parts: Parts, arguments: Arguments, found: dict[str, Found], write: Callable[[], None]) -> None:
    """Runs the parts in this process, and calls ``write`` after each."""
    for name, part in tqdm(parts.items(), unit="part", file=sys.stderr):
        found[name] = run_part(part)
        if name == DEVICE:
            check_platform(found[name], arguments)
        write()


def check_platform(device: Found, arguments: Arguments) -> None:
    """Raises ConfigError on a CPU without --tiny, because the check would take hours there."""
    if device.get("platform") == "cpu" and not arguments.tiny:
        raise ConfigError("JAX finds no accelerator here; --tiny tries the program on a CPU")


def run_apart(parts: Parts, arguments: Arguments, argv: Sequence[str], found: dict[str, Found]) -> None:
    """Runs each group of parts in a process of its own, and gathers their results."""
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(parts), unit="part", file=sys.stderr) as bar:

        def take_over(done: dict[str, Found]) -> None:
            found.update((name, one) for name, one in done.items() if name not in found)
            bar.update(len(found) - bar.n)

        for place, one in enumerate(dict.fromkeys(map(group, parts))):
            members = [name for name in parts if group(name) == one]
            bar.set_postfix_str(one)
            output = Path(folder) / f"{place}.json"
            words = [*argv, "--no-separate", "--output", str(output), "--only", *members]
            lost = run_process(words, output, arguments.limit_s, take_over)
            take_over({name: {"error": lost} for name in members})
            if one == DEVICE:
                check_platform(found[DEVICE], arguments)


def run_process(
    words: Sequence[str], output: Path, limit_s: float, progress: Callable[[dict[str, Found]], None]
) -> str:
    """Runs this program with other words and watches the file that it writes; returns a reason for parts it lost."""
    environment = {_MEMORY_SHARE: "0.92", "TF_CPP_MIN_LOG_LEVEL": "1"} | os.environ
    log, end = output.with_suffix(".log"), time.monotonic() + limit_s
    with log.open("wb") as sink:
        child = subprocess.Popen(
            [sys.executable, "-m", "rljax.cli", "check", *words],
            env=environment,
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
        )
        try:
            while child.poll() is None and time.monotonic() < end:
                time.sleep(0.3)
                progress(read_parts(output))
        finally:
            late = child.poll() is None
            child.kill()
            child.wait()
    progress(read_parts(output))
    reason = f"not done within {limit_s:.0f} s" if late else f"the process ended with status {child.returncode}"
    return f"{reason}: {log.read_text(errors='replace')[-_TRACE:]}"


def read_parts(output: Path) -> dict[str, Found]:
    """Returns the parts in a file, or none where the file does not exist yet."""
    return json.loads(output.read_text())["parts"] if output.exists() else {}


def write_json(path: Path, document: Found) -> None:
    """Writes a document as JSON in one rename, because another process may read the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1) + "\n")


# --- the report -------------------------------------------------------------------------------------------------------


def failed(found: Found) -> bool:
    """Returns whether a part ended with an error or found a problem."""
    return bool(found.get("error") or found.get("problems"))


def line(name: str, found: Found) -> str:
    """Returns one line about a part."""
    if "error" in found:
        return f"FAILED: {found['error'].strip().splitlines()[0][:200]}"
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    bad = "".join(f"; WRONG: {problem}" for problem in found.get("problems", []))
    return _LINES[name.partition(" ")[0]](found) + bad


def _device_line(found: Found) -> str:
    memory = in_units(found["memory_bytes"]) if found["memory_bytes"] else "memory not said"
    return f"{found['count']} x {found['kind']}, {memory}, jax {found['packages']['jax']}"


def _attention_line(found: Found) -> str:
    return (
        f"{found['implementation']}: error {max(found['relative_error'].values()):.1e}, "
        f"forward {found['forward_ms']:.2f} ms ({found['forward_tflops_per_s']:.1f} TFLOP/s), with backward "
        f"{found['forward_and_backward_ms']:.2f} ms ({found['forward_and_backward_tflops_per_s']:.1f} TFLOP/s)"
    )


def _leak_line(found: Found) -> str:
    fixed = "" if found["fixed_sums"] else ", sums are not in a fixed order"
    return f"{found['implementation']}: {sum(found['leaked_values'].values())} values of other segments changed{fixed}"


def _head_line(found: Found) -> str:
    parts = []
    for name in ("chunks", "naive"):
        one = found[name]
        size = "" if one["temporary_bytes"] is None else f", {in_units(one['temporary_bytes'])}"
        parts.append(f"{name} error {one['largest_logprob_error']:.1e}, {one['forward_and_backward_ms']:.1f} ms{size}")
    return "; ".join(parts)


def _step_line(found: Found) -> str:
    sizes, utilisation = found["bytes"], found["model_flops_utilisation"]
    compiled = (sizes["compiled"] or {}).get("total")
    memory = {"plan": sizes["planned"], "compiler": compiled, "device": sizes["peak_in_use"]}
    return (
        f"{found['median_step_s']:.3f} s, {found['tokens_per_second_and_device']:,.0f} tokens/s a device, "
        f"MFU {'not known' if utilisation is None else f'{utilisation:.1%}'}, remat {found['remat']}; "
        + ", ".join(f"{name} {'not known' if size is None else in_units(size)}" for name, size in memory.items())
    )


_LINES: dict[str, Callable[[Found], str]] = {
    DEVICE: _device_line,
    "attention": _attention_line,
    "leak": _leak_line,
    "head": _head_line,
    "step": _step_line,
}


def main(argv: Sequence[str]) -> int:
    """Checks, prints a table, writes the file; returns the exit status."""
    arguments = parse_arguments(Arguments, argv, prog="rljax check", description=__doc__ or "")
    parts = make_parts(arguments)
    parts = {name: part for name, part in parts.items() if name == DEVICE or wanted(name, arguments.only)}
    found: dict[str, Found] = {}
    document = {"command": shlex.join(["rljax", "check", *argv]), "parts": found}

    def write() -> None:
        if arguments.output:
            write_json(arguments.output, document)

    if arguments.separate:
        run_apart(parts, arguments, argv, found)
    else:
        run_here(parts, arguments, found, write)
    document["failed"] = [name for name, one in found.items() if failed(one)]
    output = arguments.output
    if output is None and not arguments.tiny:
        output = Path(f"accelerator_{slug(found[DEVICE].get('kind', 'unknown'))}.json")
    if output is not None:
        write_json(output, document)
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {line(name, one)}" for name, one in found.items()))
    if output is not None:
        print(f"written to {output}; send it to the developers of rljax")
    return 1 if document["failed"] else 0


def wanted(name: str, only: Sequence[str]) -> bool:
    """Returns whether --only names a part."""
    return not only or any(name.startswith(beginning) for beginning in only)


def slug(kind: str) -> str:
    """Returns a kind of device as part of a file's name: nvidia_h200 for NVIDIA H200."""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")
