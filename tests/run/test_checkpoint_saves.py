"""Saves: the best step beside the newest ones, one at a time, and before the next steps donate the saved arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rljax.run import checkpoint
from rljax.run.checkpoint import ACCURACY, BEST, Checkpointer


def state(step):
    return {"x": jnp.full((3,), float(step))}


def best_of(run):
    kept = Checkpointer(run / BEST, read_only=True)
    (step,) = kept.all_steps()
    restored, host = kept.restore(step, jax.eval_shape(lambda: state(0)))
    kept.close()
    np.testing.assert_array_equal(restored["x"], np.full(3, float(step), np.float32))
    return step, host[ACCURACY]


def test_the_best_step_is_kept_and_ties_keep_the_first(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=1)
    saved = []
    for step, accuracy in enumerate([0.2, 0.5, 0.4, 0.5], 1):
        checkpointer.save(step, state(step), {})
        saved.append(checkpointer.save_best(step, accuracy, state(step), {"step": step}))
    checkpointer.close()
    assert saved == [True, True, False, False]
    assert best_of(tmp_path) == (2, 0.5)
    assert Checkpointer(tmp_path / "checkpoints", read_only=True).all_steps() == [4]


@pytest.mark.parametrize(("again", "expected"), [(0.5, (4, 0.5)), (0.6, (2, 0.6))])
def test_a_run_taken_up_from_before_its_best_step(tmp_path, again, expected):
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=1)
    checkpointer.save_best(4, 0.5, state(4), {})
    checkpointer.close()
    resumed = Checkpointer(tmp_path / "checkpoints", keep=1)
    resumed.save_best(2, again, state(2), {})
    resumed.save_best(3, 0.1, state(3), {})
    # The best step comes again, with the same accuracy as an exact repetition gives.
    resumed.save_best(4, 0.5, state(4), {})
    resumed.close()
    assert best_of(tmp_path) == expected


def test_another_evaluation_has_a_best_step_of_its_own(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=1)
    checkpointer.save_best(1, 0.9, state(1), {}, "easy")
    assert checkpointer.save_best(2, 0.1, state(2), {}, "hard")
    assert not checkpointer.save_best(3, 0.05, state(3), {}, "hard")
    checkpointer.close()
    assert best_of(tmp_path) == (2, 0.1)


def test_an_incomplete_save_is_cleared_before_the_next(tmp_path):
    directory = tmp_path / "checkpoints"
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state(1), {})
    checkpointer.close()
    cut_short = directory / f"2{ocp.utils.TMP_DIR_SUFFIX}-1700000000"
    (cut_short / "state").mkdir(parents=True)
    assert not (tmp_path / BEST).exists()  # no best step was asked for
    Checkpointer(directory, read_only=True).close()
    assert cut_short.exists()
    checkpointer = Checkpointer(directory)
    assert checkpointer.all_steps() == [1]
    assert not cut_short.exists()
    checkpointer.close()


def test_one_copy_of_the_state_is_on_its_way_at_a_time(tmp_path, monkeypatch):
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
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpointer.save(step, state(step), {})
        checkpointer.save_best(step, step / 10, state(step), {})
    checkpointer.close()
    assert saves == ["checkpoints", BEST, "checkpoints", BEST]


SHAPE = (4, 2**18)


def live_bytes():
    """Returns the bytes of all buffers, each counted once."""
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}.values())


@functools.partial(jax.jit, donate_argnums=0)
def next_step(state):
    return jax.tree.map(lambda x: x * 2.0 + 1.0, state)


def test_later_steps_do_not_reach_into_a_save(tmp_path):
    """On a CPU, orbax reads the arrays' own memory while it writes, so the save is waited for."""
    large = {f"{i}": jnp.full(SHAPE, float(i)) for i in range(8)}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(large))
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    before = live_bytes()
    checkpointer.save(1, large, {})
    assert live_bytes() < before + size / 2
    assert checkpointer.last_save_s() is not None  # the files of the save are complete
    for _ in range(3):
        large = next_step(large)
    jax.block_until_ready(large)
    checkpointer.close()
    restored, _ = Checkpointer(tmp_path / "checkpoints", read_only=True).restore(1, jax.eval_shape(lambda: large))
    for i in range(8):
        np.testing.assert_array_equal(restored[f"{i}"], np.full(SHAPE, float(i), np.float32))
