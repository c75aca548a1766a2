"""The check of this machine runs on the CPU at tiny shapes, with its measurements and the faults that it must find."""

import dataclasses
import json
import os
import re
import sys
import types

import jax
import numpy as np
import pytest
from packaging.requirements import Requirement
from packed_rows import reference as float64_reference
from packed_rows import row
from programs import program
from toy_runs import ROOT, outcome

from rljax.commands import check, check_machine
from rljax.commands import check_kernels as kernels
from rljax.commands import check_step as training
from rljax.commands.check import CheckArguments
from rljax.policy.attention import attend, packed_attention
from rljax.policy.attention_errors import reference, relative_error
from rljax.policy.config import PolicyConfig
from rljax.policy.hub import KNOWN_SHAPES
from rljax.policy.score import segment_ends
from rljax.run.config import Config
from rljax.sharding import make_mesh

pytestmark = pytest.mark.slow

NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # settings of a GPU's memory

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
    """Returns (exit status, output, JSON) of one check, without the parts in float16."""
    output = tmp_path_factory.mktemp("check") / "found.json"
    names = [name for name in check.make_parts(CheckArguments(tiny=True)) if "float16" not in name.split()]
    status, out, err = outcome(check.main, ["--tiny", "--json", output, "--only", *names])
    assert "12/12" in err
    return status, out, json.loads(output.read_text())


def test_everything_is_as_it_should_be_on_a_cpu(checked):
    status, out, document = checked
    assert status == 0
    assert out.splitlines()[-1].startswith("written to /")
    assert document["failed"] == []
    assert document["command"].startswith("rljax check --tiny --json")
    parts = document["parts"]
    assert [line.split("  ")[0] for line in out.splitlines()[:-2]] == list(parts)
    statuses = [part["status"] for part in parts.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("ok", "failed", "skipped"))
    assert out.splitlines()[-2].startswith(f"{counts} in ")
    assert parts["device"]["platform"] == "cpu"
    assert parts["packages"]["packages"]["jax"] == jax.__version__
    assert parts["attention auto 1152 bfloat16"]["skipped"] == "auto is xla here"


def test_parts_by_name():
    def named(*only):
        return list(check.make_parts(CheckArguments(models=("0.6B", "4B"), only=only)))

    machine = ["device", "driver", "packages", "compiler", "shm", "collective"]
    assert named()[: len(machine)] == machine
    assert len(named()) == len(machine) + 2 * (2 * 2 * 2 + 1 + 2)
    assert named("step 4B", "leak xla 2048") == [
        *("device", "leak xla 2048 bfloat16", "leak xla 2048 float16"),
        *("step 4B bfloat16", "step 4B float16"),
    ]


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
    assert max(head["largest_logprob_error"], head["largest_entropy_error"]) < 3e-6
    assert 2.0**-11 < head["relative_error_of_d_table"] < 0.75 * 2.0**-8


def test_a_step_is_compiled_once_without_utilisation_on_a_cpu(checked):
    step = checked[2]["parts"]["step tiny bfloat16"]
    assert len(step["step_s"]) == 2
    assert step["model_flops_utilisation"] is None
    assert "MFU not known" in step["says"]
    assert step["row"]["optimizer/skipped_updates"] == 0
    assert step["row"]["policy/entropy"] == pytest.approx(np.log(512), rel=0.01)
    sizes = step["bytes"]
    assert sizes["device"] is None
    assert sizes["compiler"] == pytest.approx(sizes["plan"], rel=0.5)


def test_the_reference_is_that_of_float64():
    segments = np.stack([row(40, [7, 20, 3]), row(40, [40])])
    rng = np.random.default_rng(1)
    q, k, v, d_out = (rng.standard_normal((2, 40, n, 8), np.float32) for n in (4, 2, 2, 4))
    d_out *= (segments > 0)[:, :, None, None]
    got = reference(q, k, v, d_out, segment_ends(segments))
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
    assert float(relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0]))) == pytest.approx(0.1)


def test_speeds_by_hand():
    """Two sequences have 3 and 1 tokens. The policy has heads of 4 x 8 and 2 x 8, an MLP of 16, and four norms."""
    block = 8 * 32 + 2 * 8 * 16 + 32 * 8 + 3 * 8 * 16 + 2 * 8 + 2 * 8
    flops = 6 * (10 * 8 + 2 * block + 8) * 4 + 12 * 2 * 4 * 8 * 7
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    found = training.speeds(POLICY, [3, 1], [0.1, 0.4, 0.2], "float16", 2, device)
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


def breaks():
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")


def leaks():
    return {"says": "2 values of other segments changed", "problems": ["2 values of dq leaked"]}


def crashes():
    print("the last words", flush=True)
    os._exit(3)


def process():
    return {"process": os.getpid()} | {name: os.environ.get(name) for name in (NEW, OLD)}


def run(**parts):
    return dict(
        check.run_parts({name.replace("_", " "): one for name, one in parts.items()}, CheckArguments(tiny=True))
    )


@pytest.mark.harness
def test_a_part_that_fails_is_recorded_and_the_others_run():
    found = run(
        head=process, leak_xla=leaks, leak_auto=process, step_0=breaks, step_1=process, shm=crashes, driver=process
    )
    assert {name: one["status"] for name, one in found.items() if one["status"] != "ok"} == {
        **{"leak xla": "failed", "step 0": "failed", "shm": "failed"}
    }
    assert "in breaks" in found["step 0"]["traceback"]
    words = "try smaller --models, and send the file"
    assert check.line(found["step 0"]) == f"failed: RuntimeError: RESOURCE_EXHAUSTED: out of memory -> {words}"
    words = "train with policy.attention xla, and send the file"
    assert check.line(found["leak xla"]) == f"failed: 2 values of dq leaked -> {words}"
    assert found["shm"]["error"] == "the process died (exit status 3): the last words\n"
    assert found["head"]["process"] == found["leak auto"]["process"]
    assert len({found[name]["process"] for name in ("head", "step 1", "driver")}) == 3


def test_a_process_over_the_time_leaves_none_for_the_others(tmp_path):
    output = tmp_path / "found.json"
    words = ["--tiny", "--limit-s", "0.01", "--only", "head", "--json", output]
    status, out, _ = outcome(check.main, words)
    parts = json.loads(output.read_text())["parts"]
    assert status == 1
    assert list(parts) == ["device", "head bfloat16", "head float16"]
    assert parts["device"]["error"].startswith("not done within 0 s")
    assert parts["head float16"]["skipped"] == "no time is left of --limit-s 0.01"
    assert "0 ok, 1 failed, 2 skipped" in out


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ({}, {NEW: "0.92", OLD: None}),
        ({NEW: "0.5"}, {NEW: "0.5", OLD: None}),
        ({OLD: "0.5"}, {NEW: None, OLD: "0.5"}),
    ],
)
def test_a_process_has_one_share_of_the_memory(monkeypatch, given, shares):
    """JAX refuses a process that has both variables."""
    for name in (NEW, OLD):
        monkeypatch.setenv(name, "")  # restores both at the end
        monkeypatch.delenv(name)
    for name, share in given.items():
        monkeypatch.setenv(name, share)
    found = run(head=process)["head"]
    assert {name: found[name] for name in (NEW, OLD)} == shares


def test_kernels_are_skipped_without_an_accelerator(tmp_path):
    output = tmp_path / "found.json"
    status, out, _ = outcome(check.main, ["--only", "leak", "step", "--json", output])
    assert status == 0
    parts = json.loads(output.read_text())["parts"]
    assert {name for name, part in parts.items() if part["status"] == "ok"} == {"device"}
    assert "skipped: JAX finds no accelerator here -> --tiny tries the program on a CPU" in out


@pytest.fixture
def with_gpu(monkeypatch, tmp_path):
    """Plants an nvidia-smi that shows one GPU with driver 570."""
    program(tmp_path / "nvidia-smi", "echo 570.86.10")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_the_machine_is_checked_for_what_vllm_needs(with_gpu, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("RLJAX_VLLM_VENV", sys.prefix)
    (driver,) = check_machine.check_driver()["problems"]
    assert driver == "the NVIDIA driver is 570.86.10, and vLLM (CUDA 13) needs 580 or newer"
    (compiler,) = check_machine.check_compiler()["problems"]
    assert compiler == "the C compiler of CC=no-such-compiler is not here"
    packages = check_machine.check_packages()
    assert packages["problems"][0] == "jax has no plugin for CUDA"
    assert packages["problems"][-1] == "in vLLM's environment vllm is missing"
    assert packages["remedy"].startswith("pip install '.[gpu]'")
    assert re.search(r"^vllm_driver=(\d+)$", (ROOT / "launch/machine.sh").read_text(), re.MULTILINE)[1] == "580"


def test_without_a_gpu_only_the_lack_of_one_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("RLJAX_VLLM_VENV", str(tmp_path))
    assert check_machine.check_compiler()["skipped"].endswith("is not here; only vLLM on a GPU needs it")


def test_versions_of_packages_are_compared():
    needs = [Requirement(text) for text in ("jax>=0.10,<0.13", "optax>=0.2.8,<0.3", "flax>=0.12.8")]
    assert check_machine.unmet(needs, {"jax": "0.9.2", "optax": "0.2.8"}) == [
        "jax is 0.9.2, expected <0.13,>=0.10",
        "flax is missing, expected >=0.12.8",
    ]


def test_memory_too_small_for_two_versions_is_named():
    found = check_machine.check_shm("huge", dataclasses.replace(KNOWN_SHAPES["Qwen/Qwen3-32B"], num_layers=64_000))
    (problem,) = found["problems"]
    assert "two versions of huge in 16 bits take" in problem
    small = check_machine.check_shm("tiny", POLICY)
    weights = 10 * 8 + 2 * (8 * 32 + 2 * 8 * 16 + 32 * 8 + 3 * 8 * 16 + 2 * 8 + 2 * 8) + 8
    assert small["bytes"]["needed"] == 4 * weights
    assert small["problems"] == []


@pytest.mark.mesh
def test_the_sum_over_all_devices_by_hand():
    found = kernels.check_collective(1, 2)
    assert found["problems"] == []
    assert found["devices"] == 8
    assert found["gigabytes_per_second"] == pytest.approx(2 * 7 / 8 * 2**20 / found["ms"] / 1e6)
