"""Prints the tables of docs/compare.md from files that ``rljax compare --serve`` wrote.

python experiments/bench_tables.py benchmarks/mismatch_bench > benchmarks/mismatch_bench/tables.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rljax.compare.bench import bench_rows
from rljax.compare.report import markdown_table


def collected(directory: Path) -> str:
    """Returns the tables of the JSON files in a directory as Markdown, one section for each file."""
    sections = []
    for path in sorted(directory.glob("*.json")):
        document = json.loads(path.read_bytes())
        model, here = document["model"], document["machine"]
        programs = (row["program"] for row in document["rows"] if row["engine"] == "vllm" and "program" in row)
        servers = sorted({" ".join(program.split()[:2]) for program in programs})
        packages = ", ".join([*(f"{name} {number}" for name, number in document["versions"].items()), *servers])
        said = f"{model['parameters']:,} parameters ({model['weights'][:19]}), {', '.join(here['devices'])}"
        lines = [f"### {model['name']}", f"{said}, {here['processor']}, {here['cores']} cores; {packages}."]
        lines += ["\n".join(["```", *document["commands"], "```"])]
        sections += ["\n\n".join([*lines, markdown_table(bench_rows(document))])]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    print(collected(Path(sys.argv[1])), end="")
