"""The patch of docs/torch_peers.md in a copy of SkyRL: the rate of every update of its trainer, dispatch and worker."""

import pytest
from patched import check_rates_of_updates, patched_copy

pytest.importorskip("torch")
pytest.importorskip("skyrl")


def test_the_patch_sets_the_rate_of_every_update(tmp_path):
    """SkyRL's trainer measures the length, its worker trains."""
    patched_copy("skyrl", tmp_path)
    kernels = tmp_path / "flash_attn" / "bert_padding.py"  # imported by SkyRL's wrapper of models, not called here
    kernels.parent.mkdir()
    kernels.write_text("pad_input = unpad_input = None\n")
    options = ("scheduler", "scheduler_kwargs")
    check_rates_of_updates("skyrl_updates.py", tmp_path, 20.0, "trainer.policy.optimizer_config", options)
