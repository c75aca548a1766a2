"""Checks rljax on the accelerators of this machine, and writes one JSON file to send.

    rljax check                              # Qwen3-0.6B's shapes
    rljax check --models 0.6B 1.7B 4B
    rljax check --only device step --json result.json
    rljax check --tiny                       # tries the kernels and the step too on a CPU

All devices add up an array. Attention and the head are compared with float32. A packed sequence must not influence
another one. A training step is compiled and timed, and its memory is compared with the plan. Weights and tokens are
random; nothing is downloaded. Each part is ok, failed or skipped, with the remedy. A part that fails is recorded with
its error, and the others still run; the exit status is then 1. The parts run in another process, so a crash loses only
the part that runs then.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
from tqdm import tqdm

from rljax.commands import check_device as device
from rljax.commands.check_device import CheckFacts
from rljax.distributed.answering import answer_requests
from rljax.distributed.child import Child, Decoder, LostError
from rljax.distributed.files import write_whole
from rljax.distributed.frames import Frames
from rljax.errors import caller_errors
from rljax.policy.config import AttentionName, PolicyConfig
from rljax.policy.head import MAX_CHUNK
from rljax.policy.hub import KNOWN_SHAPES
from rljax.record.rows import finite_json, text_table
from rljax.run.directory import send_output_to
from rljax.run.options import parse_arguments
from rljax.trainer.state import ComputeDtype

Parts = Mapping[str, Callable[[], CheckFacts]]
TINY = PolicyConfig(512, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, tie_word_embeddings=True)
_DTYPES: tuple[ComputeDtype, ...] = ("bfloat16", "float16")
_ATTENTIONS: tuple[AttentionName, ...] = ("auto", "xla")
_TRACE = 4000  # characters of a failed part's traceback, or of a lost process's last words
_LIMIT_S = 240.0  # the longest time of one part
_FACTS = Decoder(CheckFacts)
_REMEDIES = {
    "device": "reinstall jax for this machine (jax[cuda12] or jax[tpu]), and look at its driver",
    "collective": "NCCL_DEBUG=INFO names the link that fails; start containers with --ipc=host",
    "attention": "train with policy.attention xla, and send the file",
    "head": "send the file",
    "step": "try smaller --models, and send the file",
}


@dataclass(frozen=True)
class CheckArguments:
    """The arguments of the check."""

    models: tuple[Literal["0.6B", "1.7B", "4B", "8B", "14B", "32B"], ...] = ("0.6B",)
    """Sizes of Qwen3 whose training step is timed. A size whose planned memory does not fit the device is skipped."""
    json: Path | None = None
    """The JSON file to write. None: accelerator_NAME.json in the current directory, where NAME is the kind of device;
    no file with --tiny. The last line says where the file is."""
    only: tuple[str, ...] = ()
    """Names of parts, or beginnings of them, such as attention or "step 0.6B". Empty: all."""
    tiny: bool = False
    """Use small shapes that take seconds on a CPU; their speeds mean nothing."""
    limit_s: float = 600.0
    """The longest time of all parts together (seconds). Parts for which no time is left are skipped."""


def make_parts(arguments: CheckArguments) -> Parts:
    """Returns the parts that ``--only`` names (none: all), in the order of the report. "device" is always first."""
    tiny, part = arguments.tiny, functools.partial
    policies = {"tiny": TINY} if tiny else {size: KNOWN_SHAPES[f"Qwen/Qwen3-{size}"] for size in arguments.models}
    smallest = next(iter(policies.values()), TINY)
    size, steps, repeats = (device.TINY, 2, 2) if tiny else (device.StepSize(), 5, 7)
    parts: dict[str, Callable[[], CheckFacts]] = {
        "device": device.check_devices,
        "collective": part(device.check_collective, 1 if tiny else 256, repeats),
    }
    for dtype in _DTYPES:
        for tokens, name in itertools.product((1152,) if tiny else (2048, 9216), _ATTENTIONS):
            given = (name, tokens, dtype, smallest, repeats)
            parts[f"attention {name} {tokens} {dtype}"] = part(device.check_attention, *given)
        rows, chunk = (64, 128) if tiny else (2048, MAX_CHUNK)
        parts[f"head {dtype}"] = part(device.check_head, rows, dtype, smallest, repeats, chunk)
    for (model, policy), dtype in itertools.product(policies.items(), _DTYPES):
        parts[f"step {model} {dtype}"] = part(device.check_step, model, policy, dtype, steps, size)
    only = ("device", *arguments.only) if arguments.only else ("",)
    return {name: one for name, one in parts.items() if name.startswith(only)}


def run_parts(parts: Parts, arguments: CheckArguments) -> Iterator[tuple[str, CheckFacts]]:
    """Runs the parts one after another in another process, and yields the name and the findings of each.

    After a part that raises an error, crashes or is too slow, a new process runs the next one. A new one also runs each
    step, whose memory is measured. On a CPU without --tiny, attention, head and step take hours, and are skipped.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "output")
        child = Child("process of checks", f"{__name__}:answer_checks", (dict(parts), str(log)))
        end, on_cpu = time.monotonic() + arguments.limit_s, False
        try:
            for name in (bar := tqdm(parts, unit="part", file=sys.stderr)):
                bar.set_postfix_str(name)
                kind, left = name.partition(" ")[0], end - time.monotonic()
                if on_cpu and kind in ("attention", "head", "step"):
                    found = {"skipped": "JAX finds no accelerator here", "remedy": "--tiny tries the program on a CPU"}
                elif left <= 0:
                    reason = f"no time is left of --limit-s {arguments.limit_s:g}"
                    found = {"skipped": reason, "remedy": f"--only '{name}'"}
                else:
                    if kind == "step":
                        child.replace()
                    found = _ask(child, name, min(left, _LIMIT_S), log)
                if name == "device":
                    on_cpu = found.get("platform") == "cpu" and not arguments.tiny
                failed = found.get("problems")
                remedy = found.get("remedy") or (_REMEDIES[kind] if failed else None)
                status = "failed" if failed else "skipped" if "skipped" in found else "ok"
                yield name, {"status": status, **found, "remedy": remedy}
        finally:
            child.stop()


def _ask(child: Child, name: str, limit_s: float, log: Path) -> CheckFacts:
    """Returns the findings of a part; if its process ends or is too slow, the end of its output instead."""
    try:
        found = child.ask((name,), limit_s, _FACTS)
    except TimeoutError:
        reason = f"not done within {limit_s:.0f} s"
    except (LostError, RuntimeError) as error:
        reason = f"the process {error}"
    else:
        if "traceback" in found:
            child.replace()
        return found
    words = log.read_text(errors="replace")[-_TRACE:] if log.exists() else ""
    return {"problems": [f"{reason}: {words}".splitlines()[0][:200]], "output": words}


def answer_checks(frames: Frames, parts: Parts, log: str) -> None:
    """Runs the parts that the parent names, in a child process, whose output goes to the file ``log``.

    Compiled programs are kept beside the file unless JAX has another directory for them. Otherwise a measured step
    would be compiled twice: for its memory, and by its first call.
    """
    if not jax.config.values.get("jax_compilation_cache_dir"):
        jax.config.update("jax_compilation_cache_dir", str(Path(log).parent))
    send_output_to(Path(log))

    def answer(name: str) -> CheckFacts:
        start = time.perf_counter()
        try:
            found = parts[name]()
        except Exception as error:  # of any kind: the other parts go on
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            found = {"problems": [reason], "traceback": traceback.format_exc()[-_TRACE:]}
        return found | {"seconds": round(time.perf_counter() - start, 2)}

    answer_requests(frames, answer)


def line(found: CheckFacts) -> str:
    """Returns one line about a part: its status, its findings or its problems, and the remedy."""
    what = "; ".join(found.get("problems", [])) or found.get("skipped") or found.get("says", "")
    remedy = f" -> {found['remedy']}" if found["remedy"] else ""
    return f"{found['status']}: {what}{remedy}"


def main(argv: Sequence[str]) -> int:
    """Runs the checks, prints a table, writes the JSON file after each part, and returns the exit status."""
    arguments = parse_arguments(CheckArguments, argv, prog="rljax check", description=__doc__ or "")
    began, path, found = time.monotonic(), arguments.json, dict[str, CheckFacts]()
    if path is not None:
        with caller_errors():  # a file that cannot be written is found before the parts run
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
    for name, one in run_parts(make_parts(arguments), arguments):
        found[name] = one
        if path is None and not arguments.tiny:
            kind = re.sub(r"[^a-z0-9]+", "_", one.get("kind", "unknown").lower()).strip("_")
            path = Path(f"accelerator_{kind}.json")
        if path is not None:
            failed = [name for name, one in found.items() if one["status"] == "failed"]
            document = {"command": shlex.join(["rljax", "check", *argv]), "parts": found, "failed": failed}
            with caller_errors():
                write_whole(path, finite_json(document))
    print(text_table([[name, line(one)] for name, one in found.items()]))
    counts = Counter(one["status"] for one in found.values())
    said = ", ".join(f"{counts[status]} {status}" for status in ("ok", "failed", "skipped"))
    print(f"{said} in {time.monotonic() - began:.0f} s")
    if path is not None:
        print(f"written to {path}; send it to the developers of rljax")
    return 1 if counts["failed"] else 0
