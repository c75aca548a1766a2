"""Makes the tables of docs/compile.md: each row is a report of experiments/compile_step.py.

    .venv-compile/bin/python experiments/compile_table.py benchmarks/compile.json [--only TEXT]

    .venv-compile/bin/python experiments/compile_table.py benchmarks/compile_options.json --table options
    .venv-compile/bin/python experiments/compile_table.py benchmarks/compile_mixtures.json --table mixtures
    .venv-compile/bin/python experiments/compile_table.py benchmarks/compile_long.json --table long

The first table has models on machines, and the paper's arms. An arm is shown as it is written, and with the settings
that need the least memory. The second has one model's step with options and on other TPUs, as ratios to a base row. The
third has a mixture of experts, and the last one long rows. A row takes one to four minutes of one core. Rows that are
in the file already are kept unless ``--only`` names them; delete the file to begin again. Prints the table at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rljax.plan.dry_run import in_units
from rljax.sharding import OPTIONAL_AXES

ROOT = Path(__file__).parents[1]
PAPER = "configs/paper"
SETUP = f"{PAPER}/qwen3_4b_length_triggered.yaml"
# The settings that need the least memory of a device.
LEAN = ("--precision.remat", "blocks", "--mesh.keep_gathered", "false")
GIB = 2**30
Reports = dict[str, dict[str, Any]]


class Row(NamedTuple):
    """A row of a table, which is one compile; its ratios are to the row named ``base``."""

    name: str
    machine: str
    config: str
    words: tuple[str, ...] = ()
    base: str | None = None

    def with_words(self, *words: str) -> Row:
        """Returns this row with more words on its command line."""
        return self._replace(words=(*self.words, *words))


def paper_row(model: str, label: str, machine: str, devices: int, replicas: int = 1) -> Row:
    """Returns a row with the paper's settings for a model on all devices of a machine, one row of tokens each."""
    mesh: tuple[str, ...] = ("--mesh.fsdp", str(devices // replicas), "--packing.rows_per_micro_batch", str(devices))
    if replicas > 1:
        label, mesh = f"{label}, mesh.replica {replicas}", (*mesh, "--mesh.replica", str(replicas))
    return Row(f"{model}, {label}", machine, SETUP, ("--model.path", f"Qwen/Qwen3-{model}", *mesh, *LEAN))


PLACES = [("8 H100", "h100:1x8", 8), ("64 H100", "h100:8x8", 64), ("v5p-32", "tpu:v5p:2x2x4", 16)]
ARMS = [
    ("4B", SETUP),
    ("8B", f"{PAPER}/qwen3_8b_length_triggered.yaml"),
    ("4B float16", f"{PAPER}/qwen3_4b_fp16.yaml"),
    ("1.5B", f"{PAPER}/deepseek_1.5b_sanity_bf16.yaml"),
]
MODELS = [
    *(paper_row(model, *place) for model in ("4B", "8B", "14B", "32B") for place in PLACES),
    paper_row("8B", *PLACES[1], replicas=8),
    paper_row("32B", *PLACES[1], replicas=4),
    paper_row("14B", "8 H100, lora.rank 32", "h100:1x8", 8).with_words("--lora.rank", "32"),
    *(Row(f"{label}, lean", "h100:1x4", config, LEAN) for label, config in ARMS),
    *(Row(f"{label} as written", "h100:1x4", config) for label, config in ARMS if label != "4B float16"),
    Row("30B-A3B, dots", "h100:2x8", f"{PAPER}/qwen3_30b_a3b_token_tis.yaml", ("--precision.remat", "dots")),
]


def mixture(label: str, machine: str, devices: int, expert: int) -> Row:
    """Returns a row of Qwen3-30B-A3B on all devices of a machine, with its experts split ``expert`` ways."""
    mesh = ("--mesh.fsdp", str(devices // expert), "--mesh.expert", str(expert))
    rows = ("--packing.rows_per_micro_batch", str(devices), "--rollout.router_replay", "none")
    return Row(f"30B-A3B, {label}", machine, f"{PAPER}/qwen3_30b_a3b_token_tis.yaml", (*mesh, *rows, *LEAN))


MIXTURES = [
    mixture("16 H100", "h100:2x8", 16, 8),
    mixture("16 H100, mesh.expert 1", "h100:2x8", 16, 1),
    mixture("64 H100", "h100:8x8", 64, 8),
    mixture("64 H100, mesh.expert 4", "h100:8x8", 64, 4),
    mixture("v5p-64", "tpu:v5p:2x4x4", 32, 8),
]


def long_row(label: str, machine: str, tokens: int, context: int, *words: str) -> Row:
    """Returns a row of Qwen3-4B with sequences of ``tokens`` tokens, each of which ``context`` devices share."""
    mesh = ("--mesh.fsdp", "1", "--mesh.context", str(context), "--packing.tokens_per_device", str(tokens // context))
    length = ("--rollout.max_response_tokens", str(tokens - 1024))
    return Row(f"4B, {label}", machine, SETUP, ("--model.path", LONG_MODEL, *mesh, *length, *LEAN, *words))


LONG_MODEL = "Qwen/Qwen3-4B-Thinking-2507"
LONG = [long_row("64k, 8 H100", "h100:1x8", 65_536, 8), long_row("128k, 8 v5p", "tpu:v5p:2x2x2", 131_072, 8)]
OPTIONS_OF_A_STEP = [
    ("mesh.keep_gathered", ("--mesh.keep_gathered", "true")),
    ("precision.reduce_dtype: compute", ("--precision.reduce_dtype", "compute")),
    *((f"precision.remat: {remat}", ("--precision.remat", remat)) for remat in ("offload", "dots", "none")),
]
OTHER_TPUS = [
    ("v4, 16 chips", "tpu:v4:2x2x4", 16),
    ("v6e, 16 chips", "tpu:v6e:4x4", 16),
    ("TPU7x, 8 chips", "tpu:tpu7x:2x2x2", 16),
]


def replaced(words: tuple[str, ...], option: str, value: str) -> tuple[str, ...]:
    """Returns words of a command line in which an option has this value."""
    if option not in words:
        return (*words, option, value)
    place = words.index(option) + 1
    return (*words[:place], value, *words[place + 1 :])


def with_options(place: tuple[str, str, int]) -> list[Row]:
    """Returns rows of the 4B model on a machine, with one option changed at a time."""
    base = paper_row("4B", *place)
    changed = [(f"{base.name}, {label}", replaced(base.words, *words)) for label, words in OPTIONS_OF_A_STEP]
    return [base, *(base._replace(name=name, words=words, base=base.name) for name, words in changed)]


OPTIONS = [
    *with_options(PLACES[0]),
    *with_options(PLACES[2]),
    *(paper_row("4B", *place)._replace(base="4B, v5p-32") for place in OTHER_TPUS),
]


def compile_row(row: Row) -> dict[str, Any]:
    """Compiles a row and returns its report, or the reason of the failure."""
    command = [sys.executable, "experiments/compile_step.py", row.config, row.machine, *row.words]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "report.json"
        done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
        shown = " ".join(["python", *command[1:]])
        if done.returncode:
            return {"command": shown, "failed": done.stderr.strip().splitlines()[-1]}
        return {"command": shown, **json.loads(out.read_text())}


def models_lines(rows: list[Row], reports: Reports) -> list[str]:
    """Formats the first table in Markdown."""
    return [
        "| | mesh | compile s | GiB a device: plan | compiler | fits | TFLOP a micro-batch: 16-bit | float32 | kernels "
        "| GiB over links | modelled ms | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(models_line(row.name, reports[row.name]) for row in rows if row.name in reports),
    ]


def models_line(name: str, one: dict[str, Any]) -> str:
    """Formats a row of the first table."""
    if "failed" in one:
        return failed_line(name, one, columns=12)
    sizes, flops, modelled = one["bytes"], one["flops_per_micro_batch"], one["roofline"]
    wide = flops.get("float32", 0) + flops.get("bfloat16xfloat32", 0)
    links = sum(each["bytes"] for each in one["collectives"] if each["per"] == "micro_batch")
    return cells(
        name,
        " x ".join(str(size) for axis, size in one["mesh"].items() if axis not in OPTIONAL_AXES or size > 1),
        f"{one['compile_s']:.0f}",
        f"{sizes['planned'] / GIB:.1f}",
        f"{sizes['needed'] / GIB:.1f}",
        "yes" if sizes["fits"] else f"no ({in_units(sizes['device'])})",
        f"{(sum(flops.values()) - wide) / 1e12:.1f}",
        f"{wide / 1e12:.1f}",
        f"{kernel_flops(one) / 1e12:.1f}",
        f"{links / GIB:.1f}",
        f"{1000 * modelled['micro_batch_s']['total']:.0f}",
        f"{modelled['model_flops_utilisation']:.1%}",
    )


def options_lines(rows: list[Row], reports: Reports) -> list[str]:
    """Formats the second table: a base row in units, and the rows after it as ratios to it."""
    units = {"needed": GIB, "flops": 1e15, "traffic": 2**40, "links": 2**40, "modelled": 1.0}
    lines = [
        "| | fits | GiB a device | PFLOP a step | TiB of memory traffic | TiB over links | modelled s a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = reports.get(row.name)
        if one is None:
            continue
        if "failed" in one:
            lines.append(failed_line(row.name, one, columns=7))
            continue
        fits, totals = "yes" if one["bytes"]["fits"] else "no", step_totals(one)
        base = reports.get(row.base or "", {})
        if "bytes" in base:
            ratios = (f"x {value / step_totals(base)[name]:.3g}" for name, value in totals.items())
            lines.append(cells(row.name, fits, *ratios))
        else:
            lines.append(cells(row.name, fits, *(f"{value / units[name]:.4g}" for name, value in totals.items())))
    return lines


def step_totals(one: dict[str, Any]) -> dict[str, float]:
    """Returns the needs (bytes) and the work of a device in a full step.

    A full step has all micro-batches with loss, and the rest.
    """
    count = one["batch"]["micro_batches"]
    flops = count * (sum(one["flops_per_micro_batch"].values()) + kernel_flops(one))
    links = {"micro_batch": count, "forward": 0, "step": 1}
    return {
        "needed": one["bytes"]["needed"],
        "flops": flops + sum(one["flops_per_step"].values()),
        "traffic": count * one["memory_bytes_per_micro_batch"] + one["memory_bytes_per_step"],
        "links": sum(links[each["per"]] * each["bytes"] for each in one["collectives"]),
        "modelled": one["roofline"]["seconds_of_a_full_step"],
    }


def kernel_flops(one: dict[str, Any]) -> float:
    """Counts the operations inside kernels of a micro-batch, by formula."""
    return float(sum(kernel["flops"] for kernel in one["kernels"] if kernel["per"] == "micro_batch"))


def failed_line(name: str, one: dict[str, Any], columns: int) -> str:
    """Formats a row without a report."""
    return f"| {name} | does not compile: {one['failed'][:200]} " + "| " * (columns - 2) + "|"


def cells(*texts: str) -> str:
    """Formats a line of a Markdown table."""
    return f"| {' | '.join(texts)} |"


TABLES: dict[str, tuple[list[Row], Callable[[list[Row], Reports], list[str]]]] = {
    "models": (MODELS, models_lines),
    "options": (OPTIONS, options_lines),
    "mixtures": (MIXTURES, models_lines),
    "long": (LONG, models_lines),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file for the reports")
    parser.add_argument("--table", choices=list(TABLES), default="models", help="table to make")
    parser.add_argument("--only", default=None, help="text in the names of the rows to compile again")
    options = parser.parse_args()
    rows, lines = TABLES[options.table]
    reports = json.loads(options.out.read_text()) if options.out.exists() else {}
    for row in rows:
        if options.only in row.name if options.only is not None else row.name not in reports:
            reports[row.name] = compile_row(row)
            print("\n".join(lines([row], reports)[2:]), file=sys.stderr, flush=True)
            options.out.write_text(json.dumps(reports, indent=1) + "\n")
    print("\n".join(lines(rows, reports)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
