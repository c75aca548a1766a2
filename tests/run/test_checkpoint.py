"""Checkpoints: damage of every kind is found, named and kept aside; the best step stays; saves come one at a time."""

import contextlib
import errno
import re
import shutil
import warnings
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rljax.run import checkpoint
from rljax.run.checkpoint import ACCURACY, BEST, Checkpointer, DamagedCheckpointError
from rljax.run.fingerprint import array_checksums

pytestmark = pytest.mark.slow

DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
STEPS = (2, 4)
THREE = (2, 4, 6)
FOREIGN = ("0", "x", "9", "05", "-1", "²", "٣", "3.tmp", "tmp_4", "copy_of_3", "1" + "0" * 12)
HARMLESS = {"commit_success.txt", "_CHECKPOINT_METADATA", "_sharding"}  # nothing of the state is read from these


def state(step):
    """Returns a state whose noise does not compress, so the format stores it unchanged and sees no flipped bit."""
    noise = jnp.asarray(np.random.default_rng(step).standard_normal((64, 300)), jnp.float32)
    return {"noise": noise, "half": noise[:5].astype(jnp.bfloat16), "count": jnp.int32(step), "flag": jnp.array(True)}


WANTED = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=DEVICE), state(0))


def opened(run, folder="checkpoints", **options):
    return contextlib.closing(Checkpointer(run / folder, **options))


def save(run, steps=STEPS):
    with opened(run, keep=9) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), {"step": step, "mean": 0.1})
    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return save(tmp_path_factory.mktemp("three"), THREE)


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def newest(run):
    with opened(run) as checkpointer:
        values, host = checkpointer.restore_newest(WANTED)
        return host["step"], values, checkpointer.all_steps()


def flip(path, seed):
    """Changes 400 bytes of the file to other values, or all bytes of a shorter file."""
    content = bytearray(path.read_bytes())
    draw = np.random.default_rng(seed)
    for place in draw.permutation(len(content))[:400]:
        content[place] ^= int(draw.integers(1, 256))
    path.write_bytes(content)


DAMAGES = {
    "flipped": lambda path: flip(path, 0),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "damage", ["flipped", "removed", *(pytest.param(name, marks=pytest.mark.harness) for name in ("cut", "emptied"))]
)
def test_no_damage_to_any_file_goes_unnoticed(damage, saved, tmp_path, capfd):
    """The restored values are those of step 4, or those of step 2 with a line that says so. They are never others."""
    noticed, files = set(), contents(saved / "checkpoints/4")
    for number, name in enumerate(files):
        run = shutil.copytree(saved, tmp_path / f"{number}")
        DAMAGES[damage](run / "checkpoints" / "4" / name)
        before = contents(run / "checkpoints/4")
        step, values, steps = newest(run)
        jax.tree.map(np.testing.assert_array_equal, values, state(step))
        err = capfd.readouterr().err
        if step == 4:
            assert (err, steps) == ("", [2, 4])
            continue
        noticed.add(name)
        assert steps == [2]
        lines = err.splitlines()
        (line,) = [line for line in lines if line.startswith("warning: ")]
        if len(lines) > 1:  # happened once on a busy machine; perhaps other threads of the process gave up reads
            warnings.warn(f"besides the warning stderr holds: {err}", stacklevel=1)
        assert line.startswith(f"warning: checkpoint 4 in {run}/checkpoints is damaged: ")
        assert line.endswith(f"; moved to {run}/damaged/4")
        assert contents(run / "damaged/4") == before
    assert {max(files, key=lambda name: len(files[name])), "host/metadata"} <= noticed
    assert not any(Path(name).name in HARMLESS for name in noticed)


MANY = (4, 5, 6, 8, 9, 10, 13, 15, 16, 17, 18, 20, 22, 39)  # foreign names, other steps, one with all damaged
SEEDS = [pytest.param(seed, marks=() if seed in MANY else pytest.mark.harness) for seed in range(40)]


def damage_at_random(checkpoints, draw):
    """Damages a file of a checkpoint, or copies the checkpoint to another step or to a foreign name."""
    how, folder = draw.choice([*DAMAGES, "another step", "foreign"]), checkpoints / str(draw.choice(THREE))
    if how in DAMAGES:
        DAMAGES[how](draw.choice(sorted(path for path in folder.rglob("*") if path.is_file())))
        return
    copy = checkpoints / str(draw.choice(FOREIGN if how == "foreign" else [n for n in THREE if folder.name != str(n)]))
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_newest_whole_one_is_restored_and_no_file_lost(seed, three, tmp_path, capfd):
    """One to four damages meet three checkpoints. A damaged one may be restored only as it was saved."""
    run, draw = shutil.copytree(three, tmp_path / "run"), np.random.default_rng(seed)
    for _ in range(draw.integers(1, 5)):
        damage_at_random(run / "checkpoints", draw)
    before, sound = contents(run / "checkpoints"), contents(three / "checkpoints")
    whole = [n for n in THREE if all(before.get(name) == sound[name] for name in sound if name.startswith(f"{n}/"))]
    try:
        step, values, _ = newest(run)
    except RuntimeError:
        assert not whole
        assert contents(run) == {f"checkpoints/{name}": content for name, content in before.items()}
        return
    assert step in THREE
    assert step >= max(whole, default=0)
    jax.tree.map(np.testing.assert_array_equal, values, state(step))
    moved = contents(run / "damaged") if (run / "damaged").exists() else {}
    assert contents(run / "checkpoints") | moved == before
    said = capfd.readouterr().err
    assert all(f"; moved to {run}/damaged/{folder}\n" in said for folder in {name.split("/")[0] for name in moved})
    save(run, steps=(step + 1,))
    assert newest(run)[0] == step + 1


def test_damage_is_named(saved, tmp_path, capfd):
    """Values that do not compress have no checksum in their own file."""
    files = contents(saved / "checkpoints/4")
    noise = max(files, key=lambda name: len(files[name]))
    middle = len(files[noise]) // 2
    for number, (name, change, said) in enumerate(
        (
            (
                noise,
                lambda old: old[:middle] + bytes([old[middle] ^ 1]) + old[middle + 1 :],
                "other values than were saved in noise",
            ),
            ("host/metadata", lambda old: old.replace(b'"mean": 0.1', b'"mean": 0.2'), "another host state than was "),
            ("host/metadata", lambda old: b"{}", "another host state than was saved; moved"),
        )
    ):
        run = shutil.copytree(saved, tmp_path / f"{number}")
        path = run / "checkpoints/4" / name
        path.write_bytes(change(path.read_bytes()))
        with opened(run, read_only=True) as checkpointer:  # an evaluation reads one checkpoint alone
            with pytest.raises(DamagedCheckpointError, match=r"checkpoint 4 in .* is damaged: "):
                checkpointer.restore(4, WANTED)
            assert checkpointer.all_steps() == [2, 4]
        assert newest(run)[0] == 2
        assert f"checkpoint 4 in {run}/checkpoints is damaged: {said}" in capfd.readouterr().err


def test_what_was_set_aside_is_not_overwritten(run):
    for _ in range(2):
        (run / "checkpoints/4/host/metadata").write_text("")
        assert newest(run)[0] == 2
        save(run, steps=(4,))
    assert sorted(path.name for path in (run / "damaged").iterdir()) == ["4", "4.1"]
    assert newest(run)[0] == 4
    for step in STEPS:
        (run / f"checkpoints/{step}/host/metadata").unlink()
    said = r"no checkpoint is whole: checkpoint 4 in .* is damaged: its host cannot be read: .*; checkpoint 2 in"
    with pytest.raises(RuntimeError, match=said):
        newest(run)


def test_another_form_and_what_the_caller_refuses_are_no_damage(run):
    def refuse(host):
        raise ValueError(f"not step {host['step']}")

    other = WANTED | {"count": jax.ShapeDtypeStruct((3,), jnp.int32, sharding=DEVICE)}
    with opened(run) as checkpointer:
        with pytest.raises(RuntimeError, match=r"does not fit this run: count is int32\[\] there, int32\[3\] here"):
            checkpointer.restore_newest(other)
        with pytest.raises(ValueError, match="not step 4"):
            checkpointer.restore_newest(WANTED, refuse)
        assert checkpointer.all_steps() == [2, 4]


GLOO = ValueError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")
FULL = ValueError("Error reading noise/0: [OS error 24: EMFILE Too many open files]")


@pytest.mark.parametrize("error", [GLOO, OSError(errno.ESTALE, "Stale file handle", "host/metadata"), FULL])
def test_what_passes_while_it_is_read_damages_no_checkpoint(run, monkeypatch, capsys, error):
    """A process is lost, or the file system of the checkpoint is not there for a moment."""
    with opened(run) as checkpointer:
        checkpointer.save_best(2, 0.1, state(2), {})
        monkeypatch.setattr(ocp.CheckpointManager, "restore", mock.Mock(side_effect=error))
        with pytest.raises(type(error), match=re.escape(str(error))):
            checkpointer.restore_newest(WANTED)
        assert not checkpointer.save_best(4, 0.9, state(4), {})
    assert f"warning: checkpoint 2 in {run / BEST} cannot be read now and stays: " in capsys.readouterr().err
    assert (run / BEST / "2").exists()
    assert not (run / "damaged").exists()


def test_a_damaged_best_is_set_aside_for_the_next(tmp_path):
    with opened(tmp_path) as checkpointer:
        checkpointer.save_best(1, 0.9, state(1), {})
        (tmp_path / BEST / "1/host/metadata").write_text("{")
        assert checkpointer.save_best(2, 0.1, state(2), {})
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["best-1"]
    assert [path.name for path in (tmp_path / BEST).iterdir()] == ["2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_every_byte_of_an_array_counts(dtype):
    array = jnp.asarray(np.arange(6).reshape(2, 3) % 2, dtype)
    whole = array_checksums({"x": array})["x"]
    assert whole.startswith(f"{dtype}[2, 3] ")
    assert array_checksums({"x": array.reshape(3, 2)})["x"][-16:] == whole[-16:]
    raw = np.asarray(array).view(np.uint8)
    for place in np.ndindex(raw.shape):
        changed = raw.copy()
        changed[place] ^= 1
        assert array_checksums({"x": jnp.asarray(changed.view(array.dtype))})["x"] != whole


# ---- saves ----


@pytest.fixture
def checkpointer(tmp_path):
    with opened(tmp_path, keep=1) as made:
        yield made


def best_of(run):
    with opened(run, BEST, read_only=True) as kept:
        (step,) = kept.all_steps()
        restored, host = kept.restore(step, WANTED)
    jax.tree.map(np.testing.assert_array_equal, restored, state(step))
    return step, host[ACCURACY]


def test_the_best_step_is_kept_and_ties_keep_the_first(checkpointer, tmp_path):
    """Another evaluation has a best step of its own."""
    saved = []
    for step, accuracy in enumerate([0.2, 0.5, 0.4, 0.5], 1):
        checkpointer.save(step, state(step), {})
        saved.append(checkpointer.save_best(step, accuracy, state(step), {"step": step}))
    assert saved == [True, True, False, False]
    assert best_of(tmp_path) == (2, 0.5)
    assert checkpointer.all_steps() == [4]
    assert checkpointer.save_best(5, 0.1, state(5), {}, "hard")
    assert not checkpointer.save_best(6, 0.05, state(6), {}, "hard")


@pytest.mark.parametrize(("again", "expected"), [(0.5, (4, 0.5)), (0.6, (2, 0.6))])
def test_a_run_taken_up_from_before_its_best_step(checkpointer, tmp_path, again, expected):
    """The best step comes again, with the same accuracy as an exact repetition gives."""
    checkpointer.save_best(4, 0.5, state(4), {})
    checkpointer.close()
    with opened(tmp_path, keep=1) as resumed:
        for step, accuracy in ((2, again), (3, 0.1), (4, 0.5)):
            resumed.save_best(step, accuracy, state(step), {})
    assert best_of(tmp_path) == expected


def test_an_incomplete_save_is_cleared_before_the_next(checkpointer, tmp_path):
    checkpointer.save(1, state(1), {})
    checkpointer.close()
    cut_short = tmp_path / "checkpoints" / f"2{ocp.utils.TMP_DIR_SUFFIX}-1700000000"
    (cut_short / "state").mkdir(parents=True)
    assert not (tmp_path / BEST).exists()  # no best step was asked for
    Checkpointer(tmp_path / "checkpoints", read_only=True).close()
    assert cut_short.exists()
    with opened(tmp_path) as resumed:
        assert resumed.all_steps() == [1]
        assert not cut_short.exists()


def test_one_copy_of_the_state_is_on_its_way_at_a_time(checkpointer, monkeypatch):
    """On a GPU each save under way holds the whole state in pinned memory of the host."""
    manager, under_way, saves = ocp.CheckpointManager, set(), []
    save, wait = manager.save, manager.wait_until_finished

    def saving(self, *words, **more):
        assert not under_way - {self.directory.name}
        saves.append(self.directory.name)
        saved = save(self, *words, **more)  # first waits for the save before
        under_way.add(self.directory.name)
        return saved

    def waiting(self):
        wait(self)
        under_way.discard(self.directory.name)

    monkeypatch.setattr(checkpoint, "is_on_cpu", lambda state: False)
    monkeypatch.setattr(manager, "save", saving)
    monkeypatch.setattr(manager, "wait_until_finished", waiting)
    for step in (1, 2):
        checkpointer.save(step, state(step), {})
        checkpointer.save_best(step, step / 10, state(step), {})
    checkpointer.close()
    assert saves == ["checkpoints", BEST, "checkpoints", BEST]


def live_bytes():
    """Returns the bytes of all buffers, each counted once."""
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}.values())


def test_later_steps_do_not_reach_into_a_save(checkpointer):
    """On a CPU, orbax reads the arrays' own memory while it writes, so the save is waited for."""
    large, next_step = jnp.full((8, 4, 2**18), 3.0), jax.jit(lambda x: x * 2.0 + 1.0, donate_argnums=0)
    before = live_bytes()
    checkpointer.save(1, {"x": large}, {})
    assert live_bytes() < before + large.nbytes / 2
    assert checkpointer.last_save_s() is not None  # the files of the save are complete
    for _ in range(3):
        large = next_step(large)
    restored, _ = checkpointer.restore(1, {"x": jax.eval_shape(lambda: large)})
    assert (np.asarray(restored["x"]) == 3.0).all()
