"""Runs whose rows are shared by devices refuse wrong settings, and have as many rows as the devices need."""

import jax
import pytest
from process_runs import FLOAT32
from toy_runs import TOY_BASE, complete, tiny

from rljax.data.prompts import DataConfig
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.run.packing import batch_shape
from rljax.sharding import MeshConfig
from rljax.trainer.packing import PackingConfig

pytestmark = pytest.mark.mesh


def test_what_does_not_fit_is_one_line(tmp_path):
    for context, options, said in (
        ("3", (), "packing.row_tokens = 64 must be a multiple of mesh.context = 3"),
        ("2", ("--rollout.engine", "exact"), "rollout.engine = exact samples from whole rows"),
        ("0", (), "replica, expert and context at least 1"),
        ("16", (), "needs more than the 8 devices here"),
    ):
        words = (*FLOAT32, "--mesh.fsdp", "1", "--mesh.context", context, *options)
        status, output = complete(tiny(TOY_BASE, tmp_path / "run", 2, *words))
        assert status == 2
        assert said in output
        assert not (tmp_path / "run").exists()


def test_rows_are_as_long_and_as_many_as_the_devices_need():
    def shape(context, longest, **packing):
        mesh, packing = MeshConfig(2, context=context), PackingConfig(**packing)
        data, rollout = DataConfig(max_prompt_tokens=8), RolloutConfig(max_response_tokens=longest - 8)
        return batch_shape(Config(mesh=mesh, data=data, rollout=rollout, packing=packing))[1:]

    assert jax.device_count() == 8
    assert shape(1, 5000, rows_per_micro_batch=4) == (4, 5120)
    assert shape(8, 5000, rows_per_micro_batch=4) == (4, 5120)
    assert shape(3, 100, rows_per_micro_batch=4) == (4, 192)
    # 4,096 tokens on a device are 2 rows of 8,192 on 4 devices, for both parts of fsdp.
    assert shape(4, 8192, tokens_per_device=4096) == (4, 8192)
    assert shape(4, 8192, tokens_per_device=1) == (2, 8192)
