"""A run whose directory, owner or rows are moved, removed or replaced while it goes on."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from rljax.distributed.ownership import claim
from rljax.errors import NotWrittenError, OwnedError
from rljax.record.rows import read_rows
from rljax.record.writers import Recorder
from rljax.run.directory import check_owner, own_directory


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return path


def lost(owner):
    """Returns the line that ends a run."""
    with pytest.raises(OwnedError) as caught:
        check_owner(owner)
    return str(caught.value)


def test_a_removed_directory(run_dir):
    with own_directory(run_dir) as owner:
        check_owner(owner)
        assert owner.folder() == run_dir
        shutil.rmtree(run_dir)
        gone = f"{run_dir} was removed while the run went on, with its rows and checkpoints"
        assert lost(owner) == gone
        run_dir.mkdir()
        assert lost(owner) == gone
        with claim(run_dir / "owner.json"):  # of a run that began there
            assert lost(owner) == gone
    assert run_dir.exists()


def test_a_moved_directory(run_dir, tmp_path):
    (run_dir / "checkpoints/4").mkdir(parents=True)
    with own_directory(run_dir) as owner:
        moved = run_dir.rename(tmp_path / "moved")
        said = f"{run_dir} was moved to {moved} while the run went on; run.dir = {moved} goes on from there"
        assert lost(owner) == said
        shutil.copytree(moved, run_dir)  # the record of the owner is copied, too
        assert lost(owner) == said
        shutil.rmtree(run_dir)
        run_dir.write_text("a file")
        assert lost(owner) == said
        shutil.rmtree(moved / "checkpoints")
        assert lost(owner) == f"{run_dir} was moved to {moved} while the run went on, without a checkpoint"


def test_a_removed_record_of_the_owner(run_dir):
    opened = len(os.listdir("/proc/self/fd"))
    with own_directory(run_dir) as owner:
        (run_dir / "owner.json").unlink()
        removed = f"{run_dir}/owner.json was removed while the run went on, so another run may take the directory"
        assert lost(owner) == removed
        with claim(run_dir / "owner.json"):
            assert "was taken over by process" in lost(owner)
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.fixture
def recorder(tmp_path):
    """A recorder that wrote two rows."""
    with contextlib.closing(Recorder(tmp_path, 9, tensorboard=False, progress=False)) as made:
        made.write({"step": 1, "x": 0.5})
        made.write({"step": 2})
        yield made


def test_removed_rows_are_written_again(tmp_path, recorder):
    path = tmp_path / "metrics.jsonl"
    said = f"{path} was removed while the run went on; its rows up to step 2 are written again"
    for find in (recorder.sync, lambda: recorder.write({"step": 3})):
        path.unlink()
        with pytest.raises(NotWrittenError, match=said):
            find()
        assert read_rows(path) == [{"step": 1, "x": 0.5}, {"step": 2}]
    recorder.write({"step": 3})
    recorder.sync()
    assert read_rows(path)[2:] == [{"step": 3}]


CHANGES = {
    "was replaced by another file": lambda path: Path(shutil.copy(path, path.with_name("copy"))).replace(path),
    "has 0 bytes, 34 were written": lambda path: os.truncate(path, 0),
    "has 35 bytes, 34 were written": lambda path: path.open("ab").write(b"\n"),
}


@pytest.mark.parametrize("said", CHANGES)
def test_changed_rows_end_the_run_and_are_left_as_they_are(tmp_path, recorder, said):
    path = tmp_path / "metrics.jsonl"
    CHANGES[said](path)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(NotWrittenError, match=f"{path} {said} while the run went on: rows up to step 2 may be los"):
            recorder.write({"step": 3})
    assert path.read_bytes() == before


def test_the_first_step_is_said_to_compile(tmp_path, capsys):
    """A run that goes on from step 3 compiles again; the line comes before the row, and once."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    recorder = Recorder(tmp_path, 9, first_step=3, tensorboard=False, progress=False, compiles=True)
    assert capsys.readouterr().err == "compiling step 3; the steps after it are faster\n"
    with contextlib.closing(recorder):
        recorder.write({"step": 3})
        assert capsys.readouterr().err.startswith("compiled; step 3 took 0.")
        recorder.write({"step": 4})
        assert capsys.readouterr().err == ""
    Recorder(tmp_path, 4, first_step=5, tensorboard=False, progress=False, compiles=True).close()
    assert capsys.readouterr().err == ""
