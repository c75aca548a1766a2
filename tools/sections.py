"""Runs the sections of a measurement one by one, each in a process of its own with a deadline.

The JSON file is written again after each section, so a program that is killed leaves what it measured. A section that
this machine cannot run says why; that is not an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from rljax.distributed.files import write_whole
from rljax.errors import ConfigError

ROOT = Path(__file__).parents[1]

Found = dict[str, Any]


class Section(NamedTuple):
    """One part of a measurement."""

    run: Callable[[Any, Path | None], Found]  # takes the sizes of the program, and the directory of real weights
    deadline_s: float
    environment: tuple[tuple[str, str], ...] = ()  # further variables of the process


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds of a call, with the work that it left on the devices, and its result."""
    import jax

    began = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - began, result


def yield_to(found: Found, name: str, run: Callable[..., Any], *words: Any) -> None:
    """Stores the result of ``run``, or its error, under ``name``, and prints all findings so far for the parent."""
    try:
        found[name] = run(*words)
    except Exception:  # of any kind: the other measurements go on
        found[name] = {"error": traceback.format_exc()[-3000:]}
    print(json.dumps(found), flush=True)


def section_options(doc: str | None, sections: Mapping[str, Section], json_file: str) -> argparse.ArgumentParser:
    """Returns the options that all such programs have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(json_file), help="file for the result")
    parser.add_argument("--limit-s", type=float, default=540.0, help="longest time of all sections (seconds)")
    parser.add_argument("--only", nargs="+", default=[], choices=list(sections), help="sections to run", metavar="NAME")
    parser.add_argument("--model", type=Path, help="Hugging Face directory with real weights instead of random ones")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the program on a CPU")
    parser.add_argument("--section", choices=list(sections), help=argparse.SUPPRESS)
    return parser


def run_sections(
    program: str, sections: Mapping[str, Section], size: Any, options: argparse.Namespace, argv: Sequence[str]
) -> int:
    """Runs the sections, or the one of ``--section`` in this process, and returns the exit status.

    ``program`` is the file of the program, and ``argv`` are its arguments.
    """
    if options.model and not (options.model / "config.json").is_file():
        raise ConfigError(f"--model: {options.model} has no config.json")
    if options.section:
        print(json.dumps(sections[options.section].run(size, options.model)), flush=True)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the program ends its section before it ends
    command = ["python", f"tools/{Path(program).name}", *argv]
    document: Found = {"command": shlex.join(command), "commit": commit_of_checkout()}
    document["sections"], end = {}, time.monotonic() + options.limit_s
    wanted = options.only or list(sections)
    with tempfile.TemporaryDirectory() as cache, tqdm(wanted, unit="section", file=sys.stderr) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            limit_s = min(sections[name].deadline_s, end - time.monotonic())
            words = [sys.executable, program, *argv, "--section", name]
            late = {"status": "skipped", "seconds": 0.0, "numbers": {"skipped": "no time is left"}}
            found = run_section(words, limit_s, sections[name].environment, cache) if limit_s > 5 else late
            document["sections"][name] = found
            if not options.tiny and found["numbers"].get("device", {}).get("platform") == "cpu":
                document["stopped"] = "JAX finds no accelerator here: install JAX for it, or give --tiny"
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_whole(options.json, json.dumps(document, indent=1) + "\n")
            if "stopped" in document:
                break
    width = max(map(len, wanted))
    for name, found in document["sections"].items():
        print(f"{name:<{width}}  {found['status']}, {found['seconds']:.0f} s {found['numbers'].get('skipped', '')}")
    if "stopped" in document:
        print(document["stopped"])
    print(f"written to {options.json}")
    failed = any(found["status"].endswith("failed") for found in document["sections"].values())
    return int(failed or "stopped" in document)


def commit_of_checkout() -> str:
    """Returns the commit in RLJAX_COMMIT, or else git's; it is empty where there is neither."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):  # git is not installed
        return os.environ.get("RLJAX_COMMIT") or subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def run_section(words: Sequence[str], limit_s: float, more: Sequence[tuple[str, str]], cache: str) -> Found:
    """Runs a section in a process of its own, and returns what it found or why it found nothing.

    Processes that the section leaves behind are killed, because they may hold the memory of the device.
    """
    began = time.perf_counter()
    defaults = {"JAX_COMPILATION_CACHE_DIR": cache, "XLA_CLIENT_MEM_FRACTION": "0.9", "TF_CPP_MIN_LOG_LEVEL": "1"}
    if os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):  # JAX refuses to have both
        del defaults["XLA_CLIENT_MEM_FRACTION"]
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", ""))))
    environment = defaults | dict(os.environ) | dict(more) | {"PYTHONPATH": path}
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        section = subprocess.Popen(words, env=environment, stdout=out, stderr=err, process_group=0)
        try:
            status = "failed" if section.wait(limit_s) else "ok"
        except subprocess.TimeoutExpired:
            status = f"not done within {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(section.pid, signal.SIGKILL)
            section.wait()
        for file in (out, err):
            file.seek(0)
        printed, said = out.read(), err.read()
    numbers: Found = {}
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(read := json.loads(line), dict):
                numbers = read
                break
    if "skipped" in numbers:
        status = "skipped"
    elif status == "ok" and has_failed(numbers):
        status = "partly failed"
    seconds = round(time.perf_counter() - began, 1)
    return {"status": status, "seconds": seconds, "numbers": numbers, "stderr": said[-1500:]}


def has_failed(numbers: Any) -> bool:
    """Says whether the numbers of a section, or a part of them, have an error or problems."""
    if not isinstance(numbers, dict):
        return False
    return bool(numbers.get("error") or numbers.get("problems")) or any(map(has_failed, numbers.values()))
