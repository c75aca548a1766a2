"""On a full disk nothing good is removed and nothing hangs. With room again it goes on."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_disk import fill, small_disk

from rljax.distributed.files import write_whole
from rljax.record.rows import read_rows
from rljax.record.writers import Recorder
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml

DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
WANTED = {"noise": jax.ShapeDtypeStruct((400_000,), jnp.float32, sharding=DEVICE)}


def state(step):
    """Returns a state of 1.6 MB that does not compress."""
    return {"noise": jnp.asarray(np.random.default_rng(step).standard_normal(400_000), jnp.float32)}


@pytest.fixture
def small(tmp_path):
    """Yields a folder on a file system of 4 MB."""
    with small_disk(tmp_path, 4):
        yield tmp_path


def test_a_checkpoint_without_room_keeps_the_one_before(small):
    with contextlib.closing(Checkpointer(small / "checkpoints", keep=1)) as checkpointer:
        checkpointer.save(1, state(1), {"step": 1})
        filler = fill(small)
        with pytest.raises(RuntimeError, match=r"checkpoint 2 in .* not be written, those before it are kept: .*pace"):
            checkpointer.save(2, state(2), {"step": 2})
        assert checkpointer.all_steps() == [1]
        assert checkpointer.restore_newest(WANTED)[1] == {"step": 1}
        filler.unlink()
        checkpointer.save(2, state(2), {"step": 2})
        assert [path.name for path in (small / "checkpoints").iterdir()] == ["2"]
        restored, host = checkpointer.restore_newest(WANTED)
        assert (checkpointer.all_steps(), host) == ([2], {"step": 2})
        np.testing.assert_array_equal(restored["noise"], state(2)["noise"])


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


def test_settings_without_room_stay_as_they_were(small):
    """A resume compares the settings, and half a file would have other ones."""
    write_whole(small / "config.yaml", config_to_yaml(Config()))
    before = (small / "config.yaml").read_bytes()
    fill(small)
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(small / "config.yaml", config_to_yaml(Config()))
    assert (small / "config.yaml").read_bytes() == before
