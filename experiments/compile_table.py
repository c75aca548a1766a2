"""Compiles the table of docs/compile.md: each row is a ``--dry-run --compile`` of ``python -m rljax.train``.

    .venv-compile/bin/python experiments/compile_table.py benchmarks/compile.json [--only TEXT]

A row takes one to four minutes of one core. Rows that the file already holds are kept, unless ``--only`` names them;
delete the file to begin again. Prints the table at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rljax.run.dry_run import in_units

ROOT = Path(__file__).parents[1]
PAPER = "configs/paper"
SETUP = f"{PAPER}/qwen3_4b_length_triggered.yaml"
GIB = 2**30


class Row(NamedTuple):
    """One compile."""

    name: str
    machine: str
    config: str
    words: tuple[str, ...] = ()


def on(model: str, label: str, machine: str, devices: int) -> Row:
    """The paper's settings for a model on all devices of a machine: one row of tokens each."""
    mesh = ("--mesh.fsdp", str(devices), "--packing.rows_per_micro_batch", str(devices))
    return Row(f"{model}, {label}", machine, SETUP, ("--model.path", f"Qwen/Qwen3-{model}", *mesh))


PLACES = [("8 H100", "h100:1x8", 8), ("64 H100", "h100:8x8", 64), ("v5p-32", "tpu:v5p:2x2x4", 16)]
ROWS = [
    *(on(model, *place) for model in ("4B", "8B", "14B", "32B") for place in PLACES),
    Row("4B as written", "h100:1x4", SETUP),
    Row("8B as written", "h100:1x4", f"{PAPER}/qwen3_8b_length_triggered.yaml"),
    Row("4B float16 as written", "h100:1x4", f"{PAPER}/qwen3_4b_fp16.yaml"),
    Row("1.7B as written", "h100:1x4", f"{PAPER}/qwen3_1.7b_sanity_bf16.yaml"),
]


def compile_row(row: Row) -> dict[str, Any]:
    """The report of a row, or why there is none."""
    command = [sys.executable, "-m", "rljax.train", row.config, "--dry-run", "--compile", row.machine, *row.words]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "report.json"
        done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
        shown = " ".join(["python", *command[1:]])
        if done.returncode:
            return {"command": shown, "failed": done.stderr.strip().splitlines()[-1]}
        return {"command": shown, **json.loads(out.read_text())}


def table(found: dict[str, dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| | mesh | compile s | GiB a device: plan | compiler | fits | TFLOP a micro-batch: 16-bit | float32 | kernels "
        "| GiB over links | modelled ms | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(line(name, one) for name, one in found.items())])


def line(name: str, one: dict[str, Any]) -> str:
    """A row in Markdown."""
    if "failed" in one:
        return f"| {name} | does not compile: {one['failed'][:200]} " + "| " * 10 + "|"
    sizes, flops, modelled = one["bytes"], one["flops_per_micro_batch"], one["roofline"]
    wide = flops.get("float32", 0) + flops.get("bfloat16xfloat32", 0)
    kernels = sum(kernel["flops"] for kernel in one["kernels"] if kernel["per"] == "micro_batch")
    links = sum(each["bytes"] for each in one["collectives"] if each["per"] == "micro_batch")
    cells = [
        name,
        " x ".join(str(size) for size in one["mesh"].values()),
        f"{one['compile_s']:.0f}",
        f"{sizes['planned'] / GIB:.1f}",
        f"{sizes['needed'] / GIB:.1f}",
        "yes" if sizes["fits"] else f"no ({in_units(sizes['device'])})",
        f"{(sum(flops.values()) - wide) / 1e12:.1f}",
        f"{wide / 1e12:.1f}",
        f"{kernels / 1e12:.1f}",
        f"{links / GIB:.1f}",
        f"{1000 * modelled['micro_batch_s']['total']:.0f}",
        f"{modelled['model_flops_utilisation']:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=None, help="compile again the rows whose name holds this text, and no other")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for row in ROWS:
        if options.only in row.name if options.only is not None else row.name not in found:
            found[row.name] = compile_row(row)
            print(line(row.name, found[row.name]), file=sys.stderr, flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table({row.name: found[row.name] for row in ROWS if row.name in found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
