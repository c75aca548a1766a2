"""A run of two processes resumes from an object store without its directory; only process 0 uses the store."""

import shutil

import pytest
from process_runs import FLOAT32, TINY, Run
from toy_runs import comparable, tiny

from rljax.run.store import Store

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def test_two_processes_go_on_from_the_store(toy_base, tmp_path):
    url = f"file://{tmp_path}/store"

    def end(name, steps, *options):
        words = tiny(toy_base, tmp_path / name, steps, *TINY, *FLOAT32, *options)
        with Run(words, 2, tmp_path / "printed") as run:
            assert run.wait() == [0, 0], run.printed()
            return run.printed()

    end("alone", 4)
    end("run", 2, "--checkpoint.upload", url)
    assert Store(url).steps() == [2]
    shutil.rmtree(tmp_path / "run")
    said = end("run", 4, "--checkpoint.upload", url)
    assert f"going on from checkpoint 2 of {url}" in str(said)
    assert comparable(tmp_path / "run") == comparable(tmp_path / "alone")
    assert Store(url).steps() == [2, 4]
