"""A run whose directory, owner or rows are lost while it goes on, or whose disk is full."""

import contextlib
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_disk import fill, small_disk

from rljax.distributed.ownership import claim
from rljax.errors import NotWrittenError, OwnedError
from rljax.record.rows import read_rows
from rljax.record.writers import Recorder
from rljax.run.checkpoint import Checkpointer
from rljax.run.directory import check_owner, own_directory


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return path


def lost(owner):
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


# ---- a full disk ----


DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
NOISE = {"noise": jax.ShapeDtypeStruct((400_000,), jnp.float32, sharding=DEVICE)}


def noise(step):
    """Returns a state of 1.6 MB that does not compress."""
    return {"noise": jnp.asarray(np.random.default_rng(step).standard_normal(400_000), jnp.float32)}


@pytest.fixture
def small(tmp_path):
    with small_disk(tmp_path, 4):
        yield tmp_path


def test_a_checkpoint_without_room_keeps_the_one_before(small):
    with contextlib.closing(Checkpointer(small / "checkpoints", keep=1)) as checkpointer:
        checkpointer.save(1, noise(1), {"step": 1})
        filler = fill(small)
        with pytest.raises(RuntimeError, match=r"checkpoint 2 in .* not be written, those before it are kept: .*pace"):
            checkpointer.save(2, noise(2), {"step": 2})
        assert checkpointer.all_steps() == [1]
        assert checkpointer.restore_newest(NOISE)[1] == {"step": 1}
        filler.unlink()
        checkpointer.save(2, noise(2), {"step": 2})
        assert [path.name for path in (small / "checkpoints").iterdir()] == ["2"]
        restored, host = checkpointer.restore_newest(NOISE)
        assert (checkpointer.all_steps(), host) == ([2], {"step": 2})
        np.testing.assert_array_equal(restored["noise"], noise(2)["noise"])


def test_a_row_without_room_is_refused_whole(small, capsys):
    values, written = {f"group/{number}": 0.1 * number for number in range(40)}, 1
    with contextlib.closing(Recorder(small, 1000)) as recorder:
        recorder.write({"step": 1} | values)
        filler = fill(small)
        with contextlib.suppress(OSError):
            while written < 1000:
                recorder.write({"step": written + 1} | values)
                written += 1
        assert written < 1000
        assert [row["step"] for row in read_rows(small / "metrics.jsonl")] == list(range(1, written + 1))
        filler.unlink()
        recorder.write({"step": written + 1} | values)
        recorder.sync()
    assert [row["step"] for row in read_rows(small / "metrics.jsonl")] == list(range(1, written + 2))
    assert (small / "metrics.jsonl").read_bytes().count(b"\n") == written + 1
    assert capsys.readouterr().err.count("tb is not written any more: [Errno 28] No space left on device") <= 1
