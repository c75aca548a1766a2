"""Tests of the tables of compiled steps: ratios by hand, and the page against the files."""

import json
from pathlib import Path

import compile_table
import pytest

ROOT = Path(__file__).parents[2]


def report(needed, flops, micro_batches=2):
    """Returns a row whose steps have two micro-batches of 3 bytes over links, and 5 bytes once."""
    return {
        "bytes": {"needed": needed, "fits": True},
        "batch": {"micro_batches": micro_batches},
        "flops_per_micro_batch": {"bfloat16": flops},
        "flops_per_step": {"float32": 1},
        "kernels": [{"per": "micro_batch", "flops": 10}, {"per": "forward", "flops": 1000}],
        "memory_bytes_per_micro_batch": 100,
        "memory_bytes_per_step": 50,
        "collectives": [
            {"per": "micro_batch", "bytes": 3},
            {"per": "forward", "bytes": 1000},
            {"per": "step", "bytes": 5},
        ],
        "roofline": {"seconds_of_a_full_step": 8.0},
    }


def test_a_step_is_its_micro_batches_and_what_comes_once():
    found = compile_table.step_totals(report(7, 40))
    assert found == {"needed": 7, "flops": 2 * (40 + 10) + 1, "traffic": 250, "links": 11, "modelled": 8.0}


def test_rows_are_ratios_to_their_base():
    rows = [compile_table.Row("a", "m", "c"), compile_table.Row("b", "m", "c", base="a")]
    lines = compile_table.options_lines(rows, {"a": report(2**30, 40), "b": report(2**31, 141)})
    assert lines[2].startswith("| a | yes | 1 | ")
    assert lines[3] == "| b | yes | x 2 | x 3 | x 1 | x 1 | x 1 |"


FILES = ["compile", "compile_options", "compile_long"]


def rows_of(lines):
    """Returns the cells of each row of the tables by (name of the row, head of the column)."""
    heads, found = [], {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and not cells[0]:
            heads = cells
        found |= {(cells[0], head): cell for head, cell in zip(heads, cells, strict=False)} if heads else {}
    return found


@pytest.mark.parametrize(("table", "file"), [("models", "compile"), ("options", "compile_options")])
def test_the_page_shows_what_the_file_holds(table, file):
    """The page has some of the rows and columns."""
    rows, lines = compile_table.TABLES[table]
    found = json.loads((ROOT / f"benchmarks/{file}.json").read_text())
    assert {row.name for row in rows} == set(found)
    printed, page = rows_of(lines(rows, found)), rows_of((ROOT / "docs/compile.md").read_text().splitlines())
    shown = {cell: value for cell, value in page.items() if cell in printed and cell[0] in found and cell[1]}
    assert len(shown) > 50
    assert shown == {cell: printed[cell] for cell in shown}


@pytest.mark.parametrize("file", FILES)
def test_the_plan_is_within_a_tenth_of_what_was_compiled(file):
    found = json.loads((ROOT / f"benchmarks/{file}.json").read_text())
    far = {name: one["bytes"]["planned"] / one["bytes"]["needed"] for name, one in found.items()}
    assert {name: ratio for name, ratio in far.items() if not 0.9 < ratio < 1.1} == {}
