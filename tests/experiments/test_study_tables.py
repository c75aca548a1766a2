"""The tables of pages have what the programs of experiments/ print from the files in benchmarks/."""

import json
from pathlib import Path

import compile_table
import pytest
import study_area
from study import read_study
from study_rows import read_table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/studies.md").read_text(encoding="utf-8")
SECTIONS = {
    **{"collapse": "The main study", "remedies": "Other remedies", "late": "A remedy from step 100"},
    **{"isolation": "The mismatch alone", "dose": "How large must a mismatch be?", "real": "A real model"},
    **{"stale": "Rollouts four versions old"},
}


def tables_of(text):
    """Returns the tables of a text, each as a list of rows; a row has its cells by the heads of the columns."""
    tables, above = [], ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|---"):
            heads = [cell.strip() for cell in above.strip("|").split("|")]
            tables.append([])
        elif line.startswith("|") and above.startswith("|"):
            tables[-1].append(dict(zip(heads, cells, strict=True)))
        above = line
    return tables


def printed(name):
    study, rows = ROOT / f"configs/study/{name}.yaml", ROOT / f"benchmarks/study_{name}.parquet"
    return tables_of(study_area.markdown(study_area.tables(read_study(study), read_table(rows))))


def chosen(shown, printed_rows):
    """Returns the printed rows with the columns that the page shows."""
    return [{head: row[head] for head in each} for each, row in zip(shown, printed_rows, strict=True)]


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_shows_what_the_program_prints(name):
    """The page leaves out some columns. In two studies the comparisons are beside the arms."""
    arms, comparisons = printed(name)
    shown = tables_of(PAGE.partition(f"\n## {SECTIONS[name]}\n")[2].partition("\n## ")[0])
    if name in ("remedies", "stale"):
        (shown_arms,) = shown
        empty = dict.fromkeys(("compared with", *comparisons[0]), "")
        beside = {row["arm"]: empty for row in arms}
        for row in comparisons:
            arm, other = row["compared"].split(" - ")
            beside[arm] = row | {"compared with": other}
        arms = [beside[row["arm"]] | row for row in arms]
        assert name == "stale" or {row["corrected p"] for row in comparisons} == {"1"}
    else:
        shown_arms, shown_comparisons = shown
        assert len(shown_comparisons) == len(comparisons)
        assert shown_comparisons == chosen(shown_comparisons, comparisons)
    found = {row["arm"]: row for row in arms}
    assert [row["arm"] for row in shown_arms] == list(found)
    assert shown_arms == chosen(shown_arms, [found[row["arm"]] for row in shown_arms])


def test_the_errors_of_the_logits_in_the_page_of_diagnose():
    engines = json.loads((ROOT / "benchmarks/engine_mismatch.json").read_text())["engines"]
    error = {one["engine"]: f"{one['k3_kl'] / one['logprob_abs_diff_mean']:.2g}" for one in engines}
    named = ["bfloat16", "int8 weights", "fp8 weights", "fp8_e4m3 cache", "fp8_e5m2 cache"]
    assert [error[name] for name in named] == ["0.012", "0.018", "0.046", "0.065", "0.16"]
    page = " ".join((ROOT / "docs/diagnose.md").read_text(encoding="utf-8").split())
    assert "int8 weights 0.018, fp8 weights 0.046, fp8 caches 0.065 (e4m3) and 0.16 (e5m2)" in page


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
def test_the_page_of_compiled_steps_shows_what_the_file_holds(table, file):
    """The page has some of the rows and columns."""
    rows, lines = compile_table.TABLES[table]
    found = json.loads((ROOT / f"benchmarks/{file}.json").read_text())
    assert {row.name for row in rows} == set(found)
    printed, page = rows_of(lines(rows, found)), rows_of((ROOT / "docs/compile.md").read_text().splitlines())
    shown = {cell: value for cell, value in page.items() if cell in printed and cell[0] in found and cell[1]}
    assert len(shown) > 50
    assert shown == {cell: printed[cell] for cell in shown}


def test_a_step_counts_its_kernels_in_each_micro_batch():
    found = json.loads((ROOT / "benchmarks/compile_options.json").read_text())["4B, v5p-32"]
    found |= {"kernels": [{"per": "micro_batch", "flops": 10}, {"per": "forward", "flops": 1000}]}
    found |= {
        "flops_per_micro_batch": {"bfloat16": 40},
        "flops_per_step": {"float32": 1},
        "batch": {"micro_batches": 2},
    }
    assert compile_table.step_totals(found)["flops"] == 2 * (40 + 10) + 1


def test_the_plan_is_within_a_tenth_of_what_was_compiled():
    for file in ("compile", "compile_options", "compile_long"):
        found = json.loads((ROOT / f"benchmarks/{file}.json").read_text())
        far = {name: one["bytes"]["planned"] / one["bytes"]["needed"] for name, one in found.items()}
        assert {name: ratio for name, ratio in far.items() if not 0.9 < ratio < 1.1} == {}, file
