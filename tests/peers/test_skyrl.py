"""The patch of docs/torch_peers.md in a copy of SkyRL: the rate of every update of its trainer, dispatch and worker."""

from pathlib import Path

import pytest
from patched import patched_copy, program_output

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker

pytest.importorskip("torch")
pytest.importorskip("skyrl")

MODEL = Path(__file__).parents[2] / "configs" / "toy-base"


def test_the_patch_sets_the_rate_of_every_update(tmp_path):
    """SkyRL's trainer measures the length, its worker trains: two mini-batches, two epochs, one rate.

    A new worker goes on from SkyRL's checkpoint between the surge and the first decay.
    """
    patched_copy("skyrl", tmp_path)
    kernels = tmp_path / "flash_attn" / "bert_padding.py"  # imported by SkyRL's wrapper of models, not called here
    kernels.parent.mkdir()
    kernels.write_text("pad_input = unpad_input = None\n")
    lengths = [20.0] * 4 + [80.0] * 22
    rules = SurgeConfig(window=6, warmup=3, smooth=1, persistence=1)
    law = LengthTriggeredLR(1e-6, tracker=SurgeTracker(rules), multiplier=1.2)
    rates = [law.step(length) for length in lengths]
    assert (law.surge_step, law.decay_period) == (5, 6)
    given = "{multiplier: 1.2, surge: {window: 6, warmup: 3, smooth: 1, persistence: 1}}"
    words = {"lr": "1e-6", "scheduler": "length_triggered", "scheduler_kwargs": given}
    settings = {
        "overrides": [f"trainer.policy.optimizer_config.{name}={value}" for name, value in words.items()],
        "model": str(MODEL),
        "lengths": lengths,
        "resume_at": 5,
        "directory": str(tmp_path / "checkpoint"),
    }
    found = program_output("skyrl_updates.py", tmp_path, settings)
    assert found == {"used": [rate for rate in rates for _ in range(4)], "logged": rates, "surge_step": 5}
    assert rates[-1] == pytest.approx(1e-7)
