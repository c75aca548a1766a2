"""Saves: the best step beside the newest ones, one at a time, and before the next steps donate the saved arrays."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rljax.run import checkpoint
from rljax.run.checkpoint import ACCURACY, BEST, Checkpointer


def state(step):
    return {"x": jnp.full((3,), float(step))}


@pytest.fixture
def checkpointer(tmp_path):
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints", keep=1)) as opened:
        yield opened


def best_of(run):
    with contextlib.closing(Checkpointer(run / BEST, read_only=True)) as kept:
        (step,) = kept.all_steps()
        restored, host = kept.restore(step, jax.eval_shape(lambda: state(0)))
    np.testing.assert_array_equal(restored["x"], np.full(3, float(step), np.float32))
    return step, host[ACCURACY]


def test_the_best_step_is_kept_and_ties_keep_the_first(checkpointer, tmp_path):
    saved = []
    for step, accuracy in enumerate([0.2, 0.5, 0.4, 0.5], 1):
        checkpointer.save(step, state(step), {})
        saved.append(checkpointer.save_best(step, accuracy, state(step), {"step": step}))
    checkpointer.close()
    assert saved == [True, True, False, False]
    assert best_of(tmp_path) == (2, 0.5)
    assert Checkpointer(tmp_path / "checkpoints", read_only=True).all_steps() == [4]


@pytest.mark.parametrize(("again", "expected"), [(0.5, (4, 0.5)), (0.6, (2, 0.6))])
def test_a_run_taken_up_from_before_its_best_step(checkpointer, tmp_path, again, expected):
    """The best step comes again, with the same accuracy as an exact repetition gives."""
    checkpointer.save_best(4, 0.5, state(4), {})
    checkpointer.close()
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints", keep=1)) as resumed:
        for step, accuracy in ((2, again), (3, 0.1), (4, 0.5)):
            resumed.save_best(step, accuracy, state(step), {})
    assert best_of(tmp_path) == expected


def test_another_evaluation_has_a_best_step_of_its_own(checkpointer):
    checkpointer.save_best(1, 0.9, state(1), {}, "easy")
    assert checkpointer.save_best(2, 0.1, state(2), {}, "hard")
    assert not checkpointer.save_best(3, 0.05, state(3), {}, "hard")


def test_an_incomplete_save_is_cleared_before_the_next(checkpointer, tmp_path):
    directory = tmp_path / "checkpoints"
    checkpointer.save(1, state(1), {})
    checkpointer.close()
    cut_short = directory / f"2{ocp.utils.TMP_DIR_SUFFIX}-1700000000"
    (cut_short / "state").mkdir(parents=True)
    assert not (tmp_path / BEST).exists()  # no best step was asked for
    Checkpointer(directory, read_only=True).close()
    assert cut_short.exists()
    with contextlib.closing(Checkpointer(directory)) as resumed:
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
