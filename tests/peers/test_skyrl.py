"""The patch of docs/torch_peers.md sets the rate of every update in a copy of SkyRL."""

import pytest
from patched import check_rates_of_updates, patched_copy

pytest.importorskip("torch")
pytest.importorskip("skyrl")


def test_the_patch_sets_the_rate_of_every_update(tmp_path):
    """SkyRL's trainer measures the length, and its worker trains."""
    patched_copy("skyrl", tmp_path)
    # SkyRL's wrapper of models imports this module, but does not call it here.
    kernels = tmp_path / "flash_attn" / "bert_padding.py"
    kernels.parent.mkdir()
    kernels.write_text("pad_input = unpad_input = None\n")
    options = ("scheduler", "scheduler_kwargs")
    check_rates_of_updates("skyrl_updates.py", tmp_path, 20.0, "trainer.policy.optimizer_config", options)
