"""The check of this machine runs on the CPU at tiny shapes, with its measurements and the faults that it must find."""

import json
import os

import jax
import numpy as np
import pytest
from packed_rows import reference as float64_reference
from packed_rows import row
from toy_runs import outcome, refused

from rljax.commands import check, check_device
from rljax.commands.check import CheckArguments
from rljax.policy.attention import attend
from rljax.policy.attention_errors import reference
from rljax.policy.config import PolicyConfig
from rljax.policy.score import segment_ends

pytestmark = pytest.mark.slow

POLICY = PolicyConfig(10, 8, 16, 2, 4, 2, 8, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Returns (exit status, output, JSON) of one check, without the parts in float16."""
    output = tmp_path_factory.mktemp("check") / "found.json"
    names = [name for name in check.make_parts(CheckArguments(tiny=True)) if "float16" not in name.split()]
    status, out, err = outcome(check.main, ["--tiny", "--json", output, "--only", *names])
    assert "6/6" in err
    return status, out, json.loads(output.read_text())


def test_everything_is_as_it_should_be_on_a_cpu(checked):
    status, out, document = checked
    assert status == 0
    *lines, counted, last = out.splitlines()
    assert last.startswith("written to /")
    assert document["failed"] == []
    assert document["command"].startswith("rljax check --tiny --json")
    parts = document["parts"]
    assert [line.split("  ")[0] for line in lines] == list(parts)
    statuses = [part["status"] for part in parts.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("ok", "failed", "skipped"))
    assert counted.startswith(f"{counts} in ")
    assert parts["device"]["platform"] == "cpu"
    assert parts["device"]["packages"]["jax"] == jax.__version__
    assert parts["attention auto 1152 bfloat16"]["skipped"] == "auto is xla here"
    # Kernels are within their bounds, and a step is compiled once.
    attention, head = parts["attention xla 1152 bfloat16"], parts["head bfloat16"]
    assert set(attention["relative_error"]) == {"output", "dq", "dk", "dv"}
    assert all(2.0**-11 < error < 0.75 * 2.0**-8 for error in attention["relative_error"].values())
    assert attention["forward_and_backward_ms"] > 0
    assert attention["fixed_sums"]
    assert attention["leaked_values"] == {"output": 0, "dq": 0, "dk": 0, "dv": 0}
    assert max(head["largest_logprob_error"], head["largest_entropy_error"]) < 3e-6
    assert 2.0**-11 < head["relative_error_of_d_table"] < 0.75 * 2.0**-8
    step = parts["step tiny bfloat16"]
    assert len(step["step_s"]) == 2
    assert step["tokens_per_second_and_device"] == pytest.approx(sum(step["lengths"]) / step["median_step_s"])
    assert step["row"]["optimizer/skipped_updates"] == 0
    assert step["row"]["policy/entropy"] == pytest.approx(np.log(512), rel=0.01)
    assert "device" not in step["bytes"]  # a CPU does not count its memory
    assert step["bytes"]["compiler"] == pytest.approx(step["bytes"]["plan"], rel=0.5)


def test_parts_by_name_and_a_file_that_cannot_be_written(tmp_path):
    def named(*only):
        return list(check.make_parts(CheckArguments(models=("0.6B", "4B"), only=only)))

    assert named()[:2] == ["device", "collective"]
    assert len(named()) == 2 + 2 * (2 * 2 + 1 + 2)
    attention = ["device", "attention xla 2048 bfloat16", "attention xla 2048 float16"]
    assert named("step 4B", "attention xla 2048") == [*attention, "step 4B bfloat16", "step 4B float16"]
    (tmp_path / "file").touch()
    assert "/file: " in refused(check.main, ["--tiny", "--json", tmp_path / "file/found.json"])


def test_attention_across_segments_is_seen_by_a_sound_reference(monkeypatch):
    def causal_alone(q, k, v, segment_ids):
        return attend(q, k, v, np.tri(q.shape[1], dtype=bool)[None])

    assert check_device.check_attention("xla", 64, "bfloat16", POLICY, 1)["problems"] == []
    monkeypatch.setattr(check_device, "choose_attention", lambda *given: causal_alone)
    found = check_device.check_attention("xla", 64, "bfloat16", POLICY, 1)
    assert min(found["leaked_values"].values()) > 0
    words = [problem.split() for problem in found["problems"]]
    assert [each[0] for each in words[:4]] + [each[-1] for each in words[4:]] == ["relative"] * 4 + ["leaked"] * 4
    segments = np.stack([row(40, [7, 20, 3]), row(40, [40])])
    rng = np.random.default_rng(1)
    q, k, v, d_out = (rng.standard_normal((2, 40, n, 8), np.float32) for n in (4, 2, 2, 4))
    d_out *= (segments > 0)[:, :, None, None]
    got = reference(q, k, v, d_out, segment_ends(segments))
    for x, expected in zip(got, float64_reference(q, k, v, d_out, segments), strict=True):
        np.testing.assert_allclose(x, expected, atol=2e-6, rtol=0)


def breaks():
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")


def leaks():
    return {"says": "2 values of other segments changed", "problems": ["2 values of dq leaked"]}


def crashes():
    print("the last words", flush=True)
    os._exit(3)


def process():
    return {"process": os.getpid()}


def run(parts):
    return dict(check.run_parts(parts, CheckArguments(tiny=True)))


@pytest.mark.harness
def test_a_part_that_fails_is_recorded_and_the_others_run():
    parts = {"head": process, "attention xla": leaks, "collective": process, "step 0": breaks}
    found = run(parts | {"step 1": process, "head 2": crashes, "head 3": process})
    failed = {name: one["status"] for name, one in found.items() if one["status"] != "ok"}
    assert failed == dict.fromkeys(("attention xla", "step 0", "head 2"), "failed")
    assert "in breaks" in found["step 0"]["traceback"]
    words = "try smaller --models, and send the file"
    assert check.line(found["step 0"]) == f"failed: RuntimeError: RESOURCE_EXHAUSTED: out of memory -> {words}"
    words = "train with policy.attention xla, and send the file"
    assert check.line(found["attention xla"]) == f"failed: 2 values of dq leaked -> {words}"
    assert found["head 2"]["problems"] == ["the process died (exit status 3): the last words"]
    assert found["head 2"]["output"] == "the last words\n"
    assert found["head"]["process"] == found["collective"]["process"]
    assert len({found[name]["process"] for name in ("head", "step 1", "head 3")}) == 3


def test_a_process_over_the_time_leaves_none_for_the_others(tmp_path):
    """Without an accelerator the kernels are skipped."""
    output = tmp_path / "found.json"
    status, out, _ = outcome(check.main, ["--tiny", "--limit-s", "0.01", "--only", "head", "--json", output])
    parts = json.loads(output.read_text())["parts"]
    assert (status, list(parts)) == (1, ["device", "head bfloat16", "head float16"])
    assert parts["device"]["problems"][0].startswith("not done within 0 s")
    assert parts["head float16"]["skipped"] == "no time is left of --limit-s 0.01"
    assert "0 ok, 1 failed, 2 skipped" in out
    status, out, _ = outcome(check.main, ["--only", "attention", "step", "--json", output])
    parts = json.loads(output.read_text())["parts"]
    assert (status, {name for name, part in parts.items() if part["status"] == "ok"}) == (0, {"device"})
    assert "skipped: JAX finds no accelerator here -> --tiny tries the program on a CPU" in out


@pytest.mark.mesh
def test_the_sum_over_all_devices_by_hand():
    found = check_device.check_collective(1, 2)
    assert (found["problems"], found["devices"]) == ([], 8)
    assert found["gigabytes_per_second"] == pytest.approx(2 * 7 / 8 * 2**20 / found["ms"] / 1e6)
