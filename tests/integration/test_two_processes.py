"""Two real processes start together and end together. tests/processes has their runs."""

import pytest
from process_runs import FLOAT32, TINY, Run
from toy_runs import tiny

pytestmark = pytest.mark.slow


def test_a_wrong_setting_ends_both_with_status_2(toy_base, tmp_path):
    words = tiny(toy_base, tmp_path / "run", 2, *FLOAT32, *TINY, "--mesh.fsdp", "2")
    with Run(words, 2, tmp_path / "printed") as run:
        assert run.wait() == [2, 2], run.printed()
        assert "error: a mesh of replica=1, fsdp=2, tp=1 leaves processes without a part" in run.printed()[0]
