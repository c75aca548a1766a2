"""Compares jax, transformers, vLLM and SGLang on the same tokens and weights, in three dtypes each.

    python experiments/engines_table.py runs/engines-table --json benchmarks/engines_table.json

The program samples responses to toy prompts and scores them with ``rljax compare``: by scorers in the process, then by
servers that it starts one after another (launch/install_vllm.sh, launch/install_sglang.sh). Columns that are in the
directory already are not scored again. Prints a Markdown table of the mean absolute difference (nats per token). The
diagonal has each column's noise floor, which is the difference from its own second run.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rljax.policy.families import read_config
from rljax.rollout.servers.sglang import server as sglang
from rljax.rollout.servers.vllm import server as vllm

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "configs/toy-base"
DTYPES = ("float32", "bfloat16", "float16")
IN_PROCESS = [f"{engine}:{dtype}" for engine in ("jax", "hf") for dtype in DTYPES]
SERVED = [(engine, dtype) for engine in ("vllm", "sglang") for dtype in DTYPES]
METRIC = "logprob_abs_diff_mean"


def compare(out: Path, *words: str) -> None:
    """Runs ``rljax compare`` with the directory ``out``. Raises RuntimeError if it fails other than by a verdict."""
    command = [sys.executable, "-m", "rljax.cli", "compare", *words, "--batch-size", "64", "--out", str(out)]
    status = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    if status not in (0, 1):
        raise RuntimeError(f"{shlex.join(command)} ended with {status}")


def drop_last_id(tokens: Path, last_id: int) -> None:
    """Removes sequences with the last id of the vocabulary, because SGLang 0.5.23 reads it as 0."""
    table = pq.read_table(tokens, page_checksum_verification=True)
    kept = [last_id not in ids for ids in table["token_ids"].to_pylist()]
    print(f"{kept.count(False)} of {len(kept)} sequences hold token {last_id} and are left out", file=sys.stderr)
    pq.write_table(table.filter(pa.array(kept)), tokens, write_page_checksum=True)


def columns_of(out: Path) -> set[str]:
    """Returns the columns that were scored already."""
    report = out / "report.json"
    return set(json.loads(report.read_text())["columns"]) if report.exists() else set()


def score_by_server(out: Path, engine: str, dtype: str) -> None:
    """Starts a server, scores the tokens of ``out`` with it, and ends it."""
    settings: dict[str, Any] = {"model": str(MODEL), "dtype": dtype, "max_model_len": 512}
    settings["log_path"] = out / f"{engine}-{dtype}.log"
    server = (
        vllm.start(vllm.ServerConfig(python=str(vllm.vllm_python()), **settings))
        if engine == "vllm"
        else sglang.start(sglang.ServerConfig(python=str(sglang.sglang_python()), **settings))
    )
    try:
        compare(out, str(out / "tokens.parquet"), "--model", str(MODEL), "--scorer", f"{engine}:{server.url}")
    finally:
        server.stop()


def table(report: dict[str, Any]) -> list[str]:
    """Formats the table as Markdown lines."""
    order = [f"{engine}:{dtype}" for engine in ("jax", "jax-decode", "hf", "vllm", "sglang") for dtype in DTYPES]
    names = sorted(report["columns"], key=order.index)
    between = {frozenset((pair["trainer"], pair["rollout"])): pair["metrics"][METRIC] for pair in report["pairs"]}
    floors = report["noise_floor"]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for i, row in enumerate(names):
        cells = [""] * i + [f"({floors[row][METRIC]:.2g})" if row in floors else "-"]
        cells += [f"{between[frozenset((row, column))]:.3g}" for column in names[i + 1 :]]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return lines


def main(argv: Sequence[str]) -> int:
    """Scores the missing columns and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the tokens and the comparison")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    parser.add_argument("--prompts", type=int, default=200, help="toy prompts (200)")
    arguments = parser.parse_args(argv)
    out = arguments.out
    if not columns_of(out):
        sampled = ["--toy-prompts", str(arguments.prompts), "--responses", "8", "--max-response-tokens", "36"]
        scorers = [word for spec in IN_PROCESS for word in ("--scorer", spec)]
        compare(out, *sampled, "--model", str(MODEL), "--sample", "jax-decode:float32", *scorers)
        drop_last_id(out / "tokens.parquet", read_config(MODEL).vocab_size - 1)
    for engine, dtype in SERVED:
        if f"{engine}:{dtype}" not in columns_of(out):
            print(f"scoring by {engine} in {dtype}", file=sys.stderr, flush=True)
            score_by_server(out, engine, dtype)
    report = json.loads((out / "report.json").read_text())
    print("\n".join(table(report)))
    if arguments.json:
        kept = {key: report[key] for key in ("columns", "pairs", "noise_floor")}
        command = f"python experiments/engines_table.py {shlex.join(argv)}"
        result = {"command": command, "machine": platform.machine(), **kept}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
