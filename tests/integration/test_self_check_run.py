"""A run measures the trainer against itself. Its other numbers stay bit for bit, and nothing is compiled again."""

import logging

import jax
import pytest
from toy_runs import comparable, complete, tiny

KEYS = {"logprob_abs_diff_mean", "k3_kl", "token_count"}
# These options need a separate forward and a batch with optional arrays.
SEPARATE = ["--loss.mini-batches", "2", "--loss.kl", "k3", "--loss.kl-coefficient", "0.01"]
RUNS = {"jax": ([], 1), "exact": (["--rollout.engine", "exact"], 1), "mini batches": (SEPARATE, 2)}
RUNS["mesh"] = (["--mesh.fsdp", "2", "--mesh.tp", "2"], 2)  # trainer/test_self_check.py has the forwards


def checked_runs(base, directory, caplog, words):
    """Returns the rows without and with the checks, and the number of compilations with the checks."""
    words = [*words, "--checkpoint.every", "100"]
    jax.clear_caches()  # no program may be there already
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        assert complete(tiny(base, directory / "on", 4, *words, "--diagnosis.self-every", "2"))[0] == 0
    assert complete(tiny(base, directory / "off", 4, *words))[0] == 0  # this run uses the programs of the first
    said = [record.getMessage() for record in caplog.records]
    count = {name: sum(f"Compiling jit({name})" in line for line in said) for name in ("measure_batch", "loss_values")}
    return comparable(directory / "off"), comparable(directory / "on"), count


def causes(row):
    """Returns the causes whose metrics a row has. The cause "" is the shape."""
    keys = {key.removeprefix("mismatch_self/") for key in row if key.startswith("mismatch_self/")}
    found = {key.rpartition("/")[0] for key in keys}
    assert all(f"{cause}/{name}".lstrip("/") in keys for cause in found for name in KEYS)
    return found


@pytest.mark.harness
@pytest.mark.parametrize("kind", [*[*RUNS][:3], pytest.param("mesh", marks=pytest.mark.mesh)])
def test_rows_stay_and_programs_compile_once(toy_base, tmp_path, caplog, kind):
    words, forwards = RUNS[kind]
    off, on, compiled = checked_runs(toy_base, tmp_path, caplog, words)
    assert compiled == {"measure_batch": forwards, "loss_values": 1}
    assert [{k: v for k, v in row.items() if not k.startswith("mismatch_self/")} for row in on] == off
    assert [causes(row) for row in on] == [set(), {"", "remat", *([kind] * (kind == "mesh"))}] * 2
    for prefix in ("mismatch_self/", "mismatch_self/remat/"):
        assert on[1][f"{prefix}token_count"] == on[1]["mismatch/token_count"]
        assert on[1][f"{prefix}logprob_abs_diff_mean"] <= 3e-7  # docs/mismatch.md has up to 1e-7
    if kind == "mesh":
        assert on[1]["mismatch_self/mesh/token_count"] == on[1]["mismatch/token_count"]
        # The sums over two parts of the heads and over two parts round differently.
        assert 0 < on[1]["mismatch_self/mesh/logprob_abs_diff_mean"] < 0.05
