"""A run that measures the trainer against itself: its other numbers stay bit for bit, and nothing is compiled again."""

import logging

import jax
import pytest
from toy_runs import comparable, complete, tiny

pytestmark = pytest.mark.slow
KEYS = {"logprob_abs_diff_mean", "logprob_abs_diff_max", "k3_kl", "log_ppl_abs_diff", "token_count"}


def without_self(rows):
    return [{key: value for key, value in row.items() if not key.startswith("mismatch_self/")} for row in rows]


@pytest.mark.parametrize("engine", ["jax", "exact"])
def test_rows_stay_and_forwards_compile_once(toy_base, tmp_path, caplog, engine):
    words = ["--rollout.engine", engine, "--checkpoint.every", "100"]
    assert complete(tiny(toy_base, tmp_path / "off", 6, *words))[0] == 0
    jax.clear_caches()  # so that no forward is here already
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        assert complete(tiny(toy_base, tmp_path / "on", 6, *words, "--diagnosis.self-every", "2"))[0] == 0
    compiled = [record.getMessage() for record in caplog.records if "Compiling jit(forward)" in record.getMessage()]
    assert len(compiled) == 1
    off, on = comparable(tmp_path / "off"), comparable(tmp_path / "on")
    assert without_self(on) == off
    for row in on:
        names = {key.partition("/")[2] for key in row if key.startswith("mismatch_self/")}
        assert (names >= KEYS) == (row["step"] % 2 == 0)
    measured = on[1]
    assert measured["mismatch_self/token_count"] == measured["mismatch/token_count"]
    assert measured["mismatch_self/logprob_abs_diff_mean"] <= 3e-7  # docs/mismatch.md has up to 1e-7
