"""Compiles a peer's training step for a machine that is not here; its programs share this module."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

from rljax.plan.compile import COMPILER_OPTIONS, memory_by_kind
from rljax.plan.machines import Machine, parse_machine

ROW_TOKENS = 9216  # the tokens of the one row on each device
Lower = Callable[[str, Machine, list[str]], jax.stages.Lowered]


def compile_peer(lower: Lower) -> int:
    """Compiles the step that the command line names: MODEL MACHINE OUT [KEY=VALUE ...].

    The words KEY=VALUE go to the peer, except that words that begin with ``xla_`` go to the compiler. ``OUT.hlo``
    receives the program, and ``OUT.memory.json`` the bytes of a device and the seconds.

    Args:
      lower: The function that lowers the step, from the model, the machine and the peer's words.

    Returns:
      The exit status 0.
    """
    model, machine_name, out, *words = sys.argv[1:]
    machine = parse_machine(machine_name)
    options = dict(word.split("=", 1) for word in words if word.startswith("xla_"))
    lowered = lower(model, machine, [word for word in words if not word.startswith("xla_")])
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options={**COMPILER_OPTIONS.get(machine.platform, {}), **options})
    memory = {"compile_s": round(time.perf_counter() - start, 1), **memory_by_kind(compiled.memory_analysis())}
    Path(f"{out}.hlo").write_text(compiled.as_text() or "")
    Path(f"{out}.memory.json").write_text(json.dumps(memory))
    return 0
