"""Compares rljax's training step with MaxText's and tunix's on paper: compiled for the same cards, counted alike.

    .venv-compile/bin/python experiments/compile_peers.py table benchmarks/compile_peers.json \\
        --maxtext MAXTEXT_PYTHON --tunix TUNIX_PYTHON
    .venv-compile/bin/python experiments/compile_peers.py count PROGRAM.hlo h100:1x8

``table`` compiles the rows that the file lacks, and prints the tables of docs/compile.md. With ``--only TEXT`` it
compiles only rows with TEXT in their names. MaxText's rows need ``--maxtext``, the Python of an environment in which
experiments/compile_maxtext.py runs. tunix's rows need ``--tunix``, the Python for experiments/compile_tunix.py. A row
takes 2 to 20 minutes. ``count`` prints the numbers of a program's text.

Each device has one row of 9,216 tokens. A number is for one update with one micro-batch, on one device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from compile_table import GIB, cells, failed_line
from peer_program import ROW_TOKENS

from rljax.plan.compile import needed_bytes
from rljax.plan.count import Work, by_dtype, count_program
from rljax.plan.hlo import parse_module
from rljax.plan.kernels import kernel_uses
from rljax.plan.machines import parse_machine
from rljax.plan.overlap import Timeline, read_overlap
from rljax.plan.roofline import times

ROOT = Path(__file__).parents[1]
CONFIG = "configs/paper/qwen3_4b_length_triggered.yaml"
Report = dict[str, Any]


class Row(NamedTuple):
    """One compiled step."""

    who: str  # one of WHO
    model: str  # 4B or 8B
    place: str  # the name of the machine in the table
    machine: str
    devices: int

    @property
    def name(self) -> str:
        """The row's key in the file."""
        return f"{self.model}, {self.place}, {self.who}"

    @property
    def gathers_first(self) -> bool:
        """Whether a peer's step has the option that rljax gives the compiler of TPUs."""
        return self.who.endswith(FIRST)

    @property
    def package(self) -> str:
        """The package whose step is compiled: rljax, maxtext or tunix."""
        return self.who.split(",")[0].lower()


PLACES = [
    ("8 H100", "h100:1x8", 8),
    ("16 H100", "h100:2x8", 16),
    ("v5p-32", "tpu:v5p:2x2x4", 16),
    ("v6e-16", "tpu:v6e:4x4", 16),
]
NARROW = "rljax, 16-bit sums"  # with precision.reduce_dtype: compute
MAXTEXT = "MaxText"
TUNIX = "tunix"
FIRST = ", gathers first"
WHO = ("rljax", NARROW, MAXTEXT, MAXTEXT + FIRST, TUNIX, TUNIX + FIRST)
EVERY = [Row(who, model, *place) for model in ("4B", "8B") for place in PLACES for who in WHO]
ROWS = [row for row in EVERY if not row.gathers_first or row.machine.startswith("tpu")]


def count_text(text: str, machine_name: str) -> Report:
    """Counts one update with one micro-batch from a compiled program's text.

    rljax's micro-batch is the body of an open loop. The steps of the others have no loop.
    """
    machine, module = parse_machine(machine_name), parse_module(text)
    found = re.search(r"num_partitions=(\d+)", text)
    devices = int(found.group(1)) if found else 1
    nodes = [device * machine.nodes // devices for device in range(devices)]
    program = count_program(module, devices)
    overlap = read_overlap(module, machine.card, nodes, [ROW_TOKENS])
    work, line = Work(), Timeline()
    for part in ("micro_batch", "step"):
        work.add(getattr(program, part))
        line.add(getattr(overlap, part))
    kernels = kernel_uses(work, [ROW_TOKENS])
    modelled = times(work, kernels, machine.card, nodes)
    return {
        "open_loops": program.open_loops,
        "flops": by_dtype(work.flops),
        "kernel_flops": sum(use.flops or 0 for use in kernels),
        "unknown_kernels": {use.target: use.count for use in kernels if use.flops is None},
        "memory_bytes": work.memory_bytes,
        "link_bytes": {
            f"{one.kind} {one.dtype}": sum(
                each.bytes for each in work.collectives if (each.kind, each.dtype) == (one.kind, one.dtype)
            )
            for one in work.merged_collectives()
            if one.bytes >= 2**20
        },
        "modelled": modelled.rounded(),
        "overlapped_s": round(line.seconds, 6),
        "exposed_s": round(line.exposed_s, 6),
        "exposed_share": round(line.exposed_share, 4),
        "exchanges": [
            {key: round(value, 7) if isinstance(value, float) else value for key, value in vars(one).items()}
            for one in sorted(line.exchanges, key=lambda one: -one.count * one.exposed_s)
            if one.count * one.link_s > 1e-3 * line.seconds
        ],
    }


def row_command(row: Row, pythons: dict[str, str], out: Path) -> list[str]:
    """Returns the command that writes OUT.hlo, and OUT.json or OUT.memory.json."""
    options = ["xla_tpu_enable_windowed_einsum_for_all_gather=false"] if row.gathers_first else []
    if row.package == "tunix":
        return [pythons["tunix"], "experiments/compile_tunix.py", row.model.lower(), row.machine, str(out), *options]
    if row.package == "maxtext":
        attention = ("attention=cudnn_flash_jax", "hardware=gpu") if "h100" in row.machine else ("attention=flash",)
        program = "experiments/compile_maxtext.py"
        return [pythons["maxtext"], program, f"qwen3-{row.model.lower()}", row.machine, str(out), *attention, *options]
    words = ["--dry-run", "--compile", row.machine, "--model.path", f"Qwen/Qwen3-{row.model}"]
    words += ["--mesh.fsdp", str(row.devices), "--packing.rows_per_micro_batch", str(row.devices)]
    words += ["--precision.remat", "blocks", "--mesh.keep_gathered", "false"]
    words += ["--precision.reduce_dtype", "compute" if row.who == NARROW else "float32"]
    return [pythons["rljax"], "-m", "rljax.train", CONFIG, *words, "--json", f"{out}.json", "--hlo", f"{out}.hlo"]


def compile_row(row: Row, pythons: dict[str, str], texts: Path) -> Report:
    """Compiles a row unless ``texts`` has its program, and counts it; returns the reason if that fails."""
    out = texts / row.name.replace(", ", "_").replace(" ", "_")
    command = row_command(row, pythons, out)
    shown = {"command": " ".join(["python", *command[1:]]).replace(f"{texts}/", "")}
    if not Path(f"{out}.hlo").exists():
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return {**shown, "failed": done.stderr.strip().splitlines()[-1][:300]}
    if row.package != "rljax":
        memory = json.loads(Path(f"{out}.memory.json").read_text())
        needed = needed_bytes(parse_machine(row.machine), memory)
        seconds = memory["compile_s"]
    else:
        found = json.loads(Path(f"{out}.json").read_text())
        needed, seconds = found["bytes"]["needed"], found["compile_s"]
    card = parse_machine(row.machine).card
    sizes = {"needed_bytes": needed, "fits": needed <= card.memory_bytes, "compile_s": seconds}
    return {**shown, "machine": row.machine, **sizes, **count_text(Path(f"{out}.hlo").read_text(), row.machine)}


def table_lines(reports: dict[str, Report]) -> list[str]:
    """Formats the table in Markdown."""
    lines = [
        "| | GiB a device | TFLOP: 16-bit | float32 | kernels | GB of memory traffic | GB over links "
        "| modelled ms: in turn | overlapped | exposed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        one = reports.get(row.name)
        if one is None:
            continue
        if "failed" in one:
            lines.append(failed_line(row.name, one, columns=10))
            continue
        wide = one["flops"].get("float32", 0) + one["flops"].get("bfloat16xfloat32", 0)
        line = cells(
            row.name,
            f"{one['needed_bytes'] / GIB:.1f}" + ("" if one["fits"] else " (does not fit)"),
            f"{(sum(one['flops'].values()) - wide) / 1e12:.1f}",
            f"{wide / 1e12:.1f}",
            f"{one['kernel_flops'] / 1e12:.1f}",
            f"{one['memory_bytes'] / 1e9:.0f}",
            f"{sum(one['link_bytes'].values()) / 1e9:.1f}",
            f"{1000 * one['modelled']['total']:.0f}",
            f"{1000 * one['overlapped_s']:.0f}",
            f"{one['exposed_share']:.1%}",
        )
        lines.append(line)
    return lines


QUANTITIES: dict[str, Callable[[Report], float]] = {
    "memory": lambda one: one["needed_bytes"],
    "operations, without kernels": lambda one: sum(one["flops"].values()),
    "bytes over links": lambda one: sum(one["link_bytes"].values()),
    "memory traffic": lambda one: one["memory_bytes"],
    "modelled time in turn": lambda one: one["modelled"]["total"],
    "modelled time, overlapped": lambda one: one["overlapped_s"],
}
PAIRS = (("rljax", MAXTEXT), (NARROW, MAXTEXT), (NARROW, MAXTEXT + FIRST), ("rljax", TUNIX), (NARROW, TUNIX + FIRST))


def share_lines(reports: dict[str, Report], one: str, other: str) -> list[str]:
    """Formats the shares by which ``one`` takes more or less than ``other`` in Markdown.

    A share is of the larger number.
    """
    both = [
        (f"{row.model}, {row.place}", reports[row.name], reports[row._replace(who=other).name])
        for row in ROWS
        if row.who == one and all("flops" in reports.get(row._replace(who=who).name, {}) for who in (one, other))
    ]

    def share(of: Callable[[Report], float], left: Report, right: Report) -> str:
        less, more = sorted((of(left), of(right)))
        return f"{100 * (1 - less / more):.2g}% {'less' if of(left) == less else 'more'}"

    lines = [cells(f"{one} compared with {other}", *(name for name, *_ in both)), "|---" * (len(both) + 1) + "|"]
    lines += [cells(name, *(share(of, left, right) for _, left, right in both)) for name, of in QUANTITIES.items()]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    count = commands.add_parser("count", help="count the program in a text")
    count.add_argument("program", type=Path, help="text of a compiled program (HLO)")
    count.add_argument("machine", help="machine that it was compiled for, such as h100:1x8")
    table = commands.add_parser("table", help="compile what is missing and print the table")
    table.add_argument("out", type=Path, help="JSON file for the rows")
    for package in ("maxtext", "tunix"):
        table.add_argument(f"--{package}", default=None, help=f"Python of an environment with {package}")
    table.add_argument("--texts", type=Path, default=None, help="folder that keeps the compiled programs")
    table.add_argument("--only", default=None, help="text in the names of the rows to compile again")
    options = parser.parse_args()
    if options.command == "count":
        print(json.dumps(count_text(options.program.read_text(), options.machine), indent=1))
        return 0
    pythons = {"rljax": sys.executable, "maxtext": options.maxtext, "tunix": options.tunix}
    reports = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        for row in ROWS:
            wanted = row.name not in reports if options.only is None else options.only in row.name
            if wanted and pythons[row.package]:
                reports[row.name] = compile_row(row, pythons, options.texts or Path(place))
                options.out.write_text(json.dumps(reports, indent=1) + "\n")
    print("\n".join(table_lines(reports)))
    for pair in PAIRS:
        print("", *share_lines(reports, *pair), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
