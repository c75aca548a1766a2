"""The benchmark of the host runs, and its modelled step is the one it says."""

import json

import bench_host
import pytest


def test_each_part_has_its_share_of_the_modelled_step(tmp_path):
    bench_host.main(["--responses", "32", "--tokens", "64", "--rounds", "1", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    # 6 x 4,022,468,096 parameters (docs/tutorials/train.md) x 32 x (512 + 64) tokens over 8 x 0.4 x 989.4e12 a second.
    assert found["modelled_step_s"] == pytest.approx(0.1405059, rel=1e-6)
    assert len(found["parts"]) == 9
    times = found["parts"]["rows and masks"]
    assert times["share"] == pytest.approx(times["processor_s"] / found["modelled_step_s"])
    read = found["parts"]["a reply read and checked"]
    assert read["share"] == pytest.approx(32 * read["processor_s"] / found["modelled_step_s"])
