"""A run of two processes goes on from a copy of its directory; process 0 alone calls the command that copies."""

import shutil

import pytest
from process_runs import FLOAT32, TINY, complete_together
from toy_runs import comparable, tiny

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def test_two_processes_go_on_from_a_copy(toy_base, tmp_path):
    copy, calls = tmp_path / "copy", tmp_path / "calls"
    command = f"""sh -c 'echo "$0" >> {calls}; rm -rf {copy}; cp -r "${{0%/checkpoints/*}}" {copy}'"""

    def end(name, steps, *options):
        complete_together(tiny(toy_base, tmp_path / name, steps, *TINY, *FLOAT32, *options), 2, tmp_path / "printed")

    end("alone", 4)
    end("run", 2, "--checkpoint.after-save", command)
    assert calls.read_text().split() == [str(tmp_path / "run/checkpoints/2")]
    shutil.rmtree(tmp_path / "run")
    (copy / "owner.json").unlink()
    copy.rename(tmp_path / "run")
    end("run", 4)
    assert comparable(tmp_path / "run") == comparable(tmp_path / "alone")
