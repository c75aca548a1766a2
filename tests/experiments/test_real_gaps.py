"""The numbers of real models' gaps and runs: the interval, the buckets, and the tables of the pages."""

import json
from pathlib import Path

import numpy as np
import pytest
import real_gaps
import real_runs
from study_rows import read_table

from rljax.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_interval_of_a_median_by_hand():
    """Six pieces are all on one side of the median with probability 2 / 64, below 5%; five with 2 / 32, above."""
    assert real_gaps.median_interval([3.0, 1.0, 6.0, 2.0, 5.0, 4.0]) == (3.5, 1.0, 6.0)
    with pytest.raises(ConfigError, match="5 pieces allow no interval"):
        real_gaps.median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    # Of nine, at most one is on one side with probability 2 * 10 / 512 = 3.9%, at most two with 18%.
    assert real_gaps.median_interval([float(i) for i in range(9)]) == (4.0, 1.0, 7.0)


def test_gaps_by_hand():
    found = real_gaps.gaps([np.array([-1.0, -2.0]), np.array([-1.0])], [np.array([-1.5, -2.0]), np.array([-0.5])])
    assert (found["tokens"], found["largest"], found["mean_of_pieces"]) == (3, 0.5, [0.25, 0.5])
    assert found["mean"] == pytest.approx(1 / 3)
    assert found["k3"] == pytest.approx((np.exp(0.5) - 1.5 + np.exp(-0.5) - 0.5) / 3)


def test_buckets_by_hand():
    """Positions 1 and 64 are in the first bucket, 65 in the second; the probabilities are 1, 0.05 and 0.6."""
    trainer = np.append(np.zeros(63), np.log([0.05, 0.6]))
    rollout = trainer - np.where(np.arange(65) >= 63, [0.5] * 65, 0.0)
    found = {name: (mean, count) for name, mean, _, count in real_gaps.buckets([trainer], [rollout])}
    half = (pytest.approx(0.5), 1)
    positions = {"position from 1": (pytest.approx(0.5 / 64), 64), "position from 65": half}
    probabilities = {"probability from 0.0": half, "probability from 0.5": half, "probability from 0.9": (0.0, 63)}
    assert found.items() >= (positions | probabilities).items()


def test_the_page_has_the_table_of_the_numbers(capsys):
    numbers = json.loads((ROOT / "benchmarks/real_gaps_smollm2.json").read_text())["lengths"]
    real_gaps.show(256, numbers["256"])
    page = (ROOT / "docs/mismatch.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.split("\n\n")[1].strip("\n") in page
    qwen = json.loads((ROOT / "benchmarks/real_gaps_qwen.json").read_text())["lengths"]
    said = ((numbers["256"], " than with bfloat16"), (numbers["1024"], ""), (qwen["256"], " in the median piece"))
    for of_length, words in said:
        middle, low, high = of_length["bfloat16_over_float16"]["mean, vllm"]
        assert f"{middle:.1f} times smaller{words} (95%: {low:.1f} to {high:.1f})" in page
    gap = {dtype: f"{qwen['256']['pairs'][f'{dtype} | vllm:{dtype}']['mean']:.2g}" for dtype in ("bfloat16", "float16")}
    assert f"{gap['bfloat16']} in bfloat16 and {gap['float16']} in float16" in page
    words = " ".join(page.split())
    for engine in ("hf", "jax-decode"):
        middle, low, high = qwen["256"]["bfloat16_over_float16"][f"mean, {engine}"]
        assert f"{middle:.1f} times ({low:.1f} to {high:.1f})" in words
    for form in ("fp8_e4m3", "fp8_e5m2"):
        row = qwen["256"]["pairs"][f"bfloat16 | vllm-forced:bfloat16 ({form} cache)"]
        assert f"{row['mean']:.2g} (k3 {row['k3']:.2g})" in words


def test_windows_of_a_run_by_hand():
    windows = {count: real_runs.windows([{"step": i + 1} for i in range(count)]) for count in (3, 10, 12, 30)}
    assert {count: [name for name, _ in found] for count, found in windows.items()} == {
        **{3: ["1 to 3"], 10: ["1 to 5", "6 to 10"], 12: ["1 to 5", "8 to 12"], 30: ["1 to 5", "26 to 30"]}
    }


def test_the_page_has_the_table_of_the_rows():
    table = real_runs.table(read_table(ROOT / "benchmarks/real_qwen.parquet"))
    assert table in (ROOT / "docs/families.md").read_text(encoding="utf-8")
