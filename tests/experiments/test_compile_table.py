"""Tests of the tables of compiled steps: the page against the files."""

import json
from pathlib import Path

import compile_table
import pytest

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("file", ["compile", "compile_options", "compile_long"])
def test_the_plan_is_within_a_tenth_of_what_was_compiled(file):
    found = json.loads((ROOT / f"benchmarks/{file}.json").read_text())
    far = {name: one["bytes"]["planned"] / one["bytes"]["needed"] for name, one in found.items()}
    assert {name: ratio for name, ratio in far.items() if not 0.9 < ratio < 1.1} == {}
