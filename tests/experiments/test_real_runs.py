"""The tables of runs of a real model are those of their rows."""

from pathlib import Path

import pytest
import real_runs
from study_rows import read_table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (3, ["1 to 3"]),
        (10, ["1 to 5", "6 to 10"]),
        (12, ["1 to 5", "8 to 12"]),
        (30, ["1 to 5", "26 to 30"]),
    ],
)
def test_windows_by_hand(count, names):
    assert [name for name, _ in real_runs.windows([{"step": i + 1} for i in range(count)])] == names


def test_the_page_has_the_table_of_the_rows():
    table = real_runs.table(read_table(ROOT / "benchmarks/real_qwen.parquet"))
    assert table in (ROOT / "docs/families.md").read_text(encoding="utf-8")
