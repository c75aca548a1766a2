"""The check of an accelerator, on the CPU at tiny shapes: what it measures, and that it sees what is wrong."""

import json

import jax
import numpy as np
import pytest
from packed_rows import reference as float64_reference
from packed_rows import row
from toy_runs import outcome

from rljax.commands import check
from rljax.commands import check_kernels as kernels
from rljax.commands import check_step as training
from rljax.policy.attention import attend, packed_attention
from rljax.policy.config import PolicyConfig
from rljax.run.config import Config
from rljax.sharding import make_mesh

pytestmark = pytest.mark.slow

POLICY = PolicyConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """(exit status, what was printed, the JSON) of one check."""
    output = tmp_path_factory.mktemp("check") / "found.json"
    words = ["--tiny", "--no-separate", "--dtypes", "bfloat16", "--steps", "2", "--json", output]
    status, out, _ = outcome(check.main, words)
    return status, out, json.loads(output.read_text())


def test_everything_is_as_it_should_be_on_a_cpu(checked):
    status, out, document = checked
    assert status == 0
    assert out.splitlines()[-1].startswith("written to /")
    assert document["failed"] == []
    assert document["command"].startswith("rljax check --tiny --no-separate")
    parts = document["parts"]
    assert [line.split("  ")[0] for line in out.splitlines()[:-1]] == list(parts)
    assert parts["device"]["platform"] == "cpu"
    assert parts["device"]["packages"]["jax"] == jax.__version__
    assert parts["attention auto 1152 bfloat16"]["skipped"] == "auto is xla here"
    assert set(parts) == {
        "device",
        *(f"{what} {name} 1152 bfloat16" for what in ("attention", "leak") for name in ("auto", "xla")),
        "head bfloat16",
        "step tiny bfloat16",
    }


def test_the_kernels_are_within_their_bounds(checked):
    parts = checked[2]["parts"]
    attention, leak, head = (parts[f"{name} bfloat16"] for name in ("attention xla 1152", "leak xla 1152", "head"))
    assert set(attention["relative_error"]) == {"output", "dq", "dk", "dv"}
    assert all(2.0**-11 < error < 0.75 * 2.0**-8 for error in attention["relative_error"].values())
    assert min(attention["forward_and_backward_ms"], attention["forward_ms"]) > 0
    pairs = sum(length * (length + 1) // 2 for length in attention["segments"])
    flops = 2 * 2 * pairs * 4 * 16
    assert attention["forward_tflops_per_s"] == pytest.approx(flops / attention["forward_ms"] / 1e9)
    assert leak["fixed_sums"]
    assert leak["leaked_values"] == {"output": 0, "dq": 0, "dk": 0, "dv": 0}
    assert min(leak["values_that_changed_in_the_changed_segment"].values()) > 0
    assert head["chunks"]["largest_logprob_error"] < 3e-6
    assert head["chunks"]["largest_entropy_error"] < 3e-6
    assert head["chunks"]["temporary_bytes"] < head["naive"]["temporary_bytes"]


def test_a_step_is_compiled_once_without_utilisation_on_a_cpu(checked):
    step = checked[2]["parts"]["step tiny bfloat16"]
    assert step["compilations"] == 1
    assert len(step["step_s"]) == 2
    assert step["model_flops_utilisation"] is None
    assert step["why_no_utilisation"] == "the peak rate of cpu is not known"
    assert step["tokens_per_second_and_device"] == pytest.approx(step["tokens"] / np.median(step["step_s"]))
    assert step["row"]["optimizer/skipped_updates"] == 0
    assert step["row"]["policy/entropy"] == pytest.approx(np.log(512), rel=0.01)
    sizes = step["bytes"]
    assert sizes["peak_in_use"] is None
    assert sizes["compiled"]["total"] == pytest.approx(sizes["planned"], rel=0.5)


def test_the_reference_is_that_of_float64():
    segments = np.stack([row(40, [7, 20, 3]), row(40, [40])])
    rng = np.random.default_rng(1)
    q, k, v, d_out = (rng.standard_normal((2, 40, n, 8), np.float32) for n in (4, 2, 2, 4))
    d_out *= (segments > 0)[:, :, None, None]
    got = kernels.reference(q, k, v, d_out, segments)
    for x, expected in zip(got, float64_reference(q, k, v, d_out, segments), strict=True):
        np.testing.assert_allclose(x, expected, atol=2e-6, rtol=0)


def test_attention_across_segments_is_seen():
    def causal_alone(q, k, v, segment_ids):
        return attend(q, k, v, np.tri(q.shape[1], dtype=bool)[None])

    leak = kernels.check_leak(causal_alone, 64, "bfloat16", POLICY)
    assert min(leak["leaked_values"].values()) > 0
    assert [problem.split()[-1] for problem in leak["problems"]] == ["leaked"] * 4
    found = kernels.check_attention(causal_alone, 64, "bfloat16", POLICY, 1)
    assert len(found["problems"]) == 4
    assert kernels.check_leak(packed_attention, 64, "bfloat16", POLICY)["problems"] == []


def test_relative_error_by_hand():
    assert float(kernels.relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0]))) == pytest.approx(0.1)


def test_speeds_by_hand():
    """Two sequences of 3 and 1 tokens; heads of 4 x 8 and 2 x 8, an MLP of 16, and four norms."""
    block = 8 * 32 + 2 * 8 * 16 + 32 * 8 + 3 * 8 * 16 + 2 * 8 + 2 * 8
    flops = 6 * (10 * 8 + 2 * block + 8) * 4 + 12 * 2 * 4 * 8 * 7
    found = training.speeds(POLICY, [3, 1], [0.1, 0.4, 0.2], "float16", devices=2, kind="NVIDIA H100 80GB HBM3")
    assert found["median_step_s"] == 0.2
    assert found["tokens_per_second_and_device"] == 10
    assert found["model_flops"] == flops
    assert found["model_flops_utilisation"] == pytest.approx(flops / (0.2 * 2 * 989.4e12))


def test_no_more_is_recomputed_than_the_memory_asks_for():
    mesh = make_mesh(Config().mesh)

    def chosen(limit):
        return training.choose_remat(training.TINY, "bfloat16", check.TINY, mesh, limit).precision.remat

    most = training.plan(training.step_config(training.TINY, "bfloat16", "none"), check.TINY, mesh)
    assert chosen(None) == chosen(most / training.FULL + 1) == "none"
    assert chosen(most / training.FULL - 1) == "dots"
    assert chosen(1) == "blocks"


def test_a_part_that_raises_is_recorded_and_the_others_run(monkeypatch, tmp_path):
    def breaks():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")

    parts = {
        "device": check.describe_device,
        "step 0.6B bfloat16": breaks,
        "leak xla": lambda: {
            "implementation": "xla",
            "fixed_sums": False,
            "leaked_values": {"dq": 2},
            "problems": ["2 values of dq leaked"],
        },
        "leak auto": lambda: {"skipped": "auto is xla here"},
    }
    monkeypatch.setattr(check, "make_parts", lambda arguments: parts)
    output = tmp_path / "found.json"
    status, out, _ = outcome(check.main, ["--tiny", "--no-separate", "--json", output])
    document = json.loads(output.read_text())
    assert status == 1
    assert document["failed"] == ["step 0.6B bfloat16", "leak xla"]
    found = document["parts"]["step 0.6B bfloat16"]
    assert found["error"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory\nand more"
    assert "in breaks" in found["traceback"]
    lines = [line.split("  ")[-1].strip() for line in out.splitlines()]
    assert lines[1:4] == [
        "FAILED: RuntimeError: RESOURCE_EXHAUSTED: out of memory",
        "xla: 2 values of other segments changed, sums are not in a fixed order; WRONG: 2 values of dq leaked",
        "skipped: auto is xla here",
    ]


def test_a_process_that_does_not_end_loses_its_parts_alone(tmp_path):
    output = tmp_path / "found.json"
    words = ["--tiny", "--limit-s", "0.1", "--only", "head", "--json", output]
    status, _, _ = outcome(check.main, words)
    parts = json.loads(output.read_text())["parts"]
    assert status == 1
    assert list(parts) == ["device", "head bfloat16", "head float16"]
    assert all(part["error"].startswith("not done within 0 s") for part in parts.values())


@pytest.mark.slow
def test_processes_of_their_own_find_the_same(tmp_path):
    output = tmp_path / "found.json"
    words = ["--tiny", "--dtypes", "float16", "--only", "head", "--json", output]
    status, out, err = outcome(check.main, words)
    assert status == 0, out
    parts = json.loads(output.read_text())["parts"]
    assert list(parts) == ["device", "head float16"]
    assert parts["head float16"]["chunks"]["largest_logprob_error"] < 3e-6
    assert "2/2" in err


def test_without_an_accelerator_only_tiny_shapes_are_checked(capsys):
    status, _, err = outcome(check.main, ["--no-separate"])
    assert status == 2
    assert "error: JAX finds no accelerator here; --tiny tries the program on a CPU" in err


def test_names_of_parts_and_files():
    assert check.wanted("step 0.6B bfloat16", ["head", "step 0.6B"])
    assert not check.wanted("leak xla 2048 bfloat16", ["attention"])
    assert check.slug("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"
