"""The host's benchmark runs, and its modelled step is the step of the compiled report."""

import json
from pathlib import Path

import bench_host
import pytest


def test_each_part_has_its_share_of_the_modelled_step(tmp_path):
    small = ["--responses", "64", "--tokens", "64", "--rounds", "1"]
    bench_host.main([*small, "--json", str(tmp_path / "found.json")])
    without, read_by_loss, kept = json.loads((tmp_path / "found.json").read_text())["cases"]
    roofline = json.loads((Path(bench_host.ROOT) / "benchmarks/compile.json").read_text())["4B, 8 H100"]["roofline"]
    # At most 64 x (512 + 64) tokens fill less than one micro-batch of 8 x 9,216.
    once = roofline["micro_batch_s"]["total"] + roofline["step_s"]["total"]
    assert [case["modelled_step_s"] for case in (without, read_by_loss, kept)] == pytest.approx([once] * 3)
    assert without["parts"].keys() == read_by_loss["parts"].keys() == kept["parts"].keys()
    # One micro-batch has 8 rows of 9,216 tokens. A token has seven numbers of 4 bytes and two masks, and 20 of 8 bytes
    # if they are read.
    assert without["sent_bytes"] == 30 * 8 * 9216
    assert read_by_loss["sent_bytes"] / kept["sent_bytes"] == pytest.approx(190 / 30)
    times = without["parts"]["rows and masks"]
    assert times["share"] == pytest.approx(times["processor_s"] / once)
    read = without["parts"]["replies read and checked"]
    assert (read["kind"], read["calls"]) == (bench_host.BESIDE, pytest.approx(without["tokens"] / 64))
    waited = sum(one["processor_s"] for one in without["parts"].values() if one["kind"] == bench_host.WAITED)
    assert waited / once < without["shares"]["the step waits for"] < without["shares"]["this process works in all"]
