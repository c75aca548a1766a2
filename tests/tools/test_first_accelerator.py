"""``tools/first_gpu.py`` and ``first_tpu.py`` run sections one by one, and their file has what is measured so far."""

import json
import os
import subprocess
import sys

import pytest
from toy_runs import ROOT


def measure(path, *words, program="first_gpu", limit_s=300):
    command = [sys.executable, f"tools/{program}.py", "--tiny", "--json", str(path), *words]
    given = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    environment = given | {"JAX_PLATFORMS": "cpu", "RLJAX_VLLM_VENV": str(path.parent)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    return done, json.loads(path.read_text())["sections"] if path.exists() else {}


def test_sections_say_what_this_machine_is(tmp_path):
    done, sections = measure(tmp_path / "found.json", "--only", "versions", "step beside tunix")
    assert done.returncode == 0, done.stderr
    assert list(sections) == ["versions", "step beside tunix"]
    assert sections["versions"]["numbers"]["device"] == {"kind": "cpu", "platform": "cpu", "count": 1}
    assert sections["step beside tunix"]["numbers"] == {"skipped": "tunix is not installed here"}


def test_what_a_host_without_a_tpu_lacks_is_a_line(tmp_path):
    only = ["versions", "matmul precision", "server bfloat16", "collective", "several hosts"]
    done, sections = measure(tmp_path / "found.json", "--only", *only, program="first_tpu")
    assert done.returncode == 0, done.stderr
    assert [found["status"] for found in sections.values()] == ["ok", "ok", "skipped", "skipped", "skipped"]
    reasons = [sections[name]["numbers"]["skipped"] for name in only[2:]]
    assert reasons[0].startswith(f"no vLLM environment at {tmp_path}")
    assert reasons[2] == "this slice has one host"
    assert sections["versions"]["numbers"]["hosts"] == []
    # A CPU multiplies in float32, whatever the precision. One pass of bfloat16 rounds both operands by up to 2**-9.
    for found in sections["matmul precision"]["numbers"].values():
        assert found["from_float64"] < 1e-6
        assert 1e-3 < found["from_one_pass"] < 2**-8


def test_without_time_each_section_is_skipped(tmp_path):
    done, sections = measure(tmp_path / "found.json", "--limit-s", "4")
    assert done.returncode == 0
    assert len(sections) > 8
    assert {found["status"] for found in sections.values()} == {"skipped"}


def test_a_directory_without_a_model_is_one_line(tmp_path):
    done, _ = measure(tmp_path / "found.json", "--model", str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"error: --model: {tmp_path} has no config.json\n")


@pytest.mark.harness
@pytest.mark.parametrize(
    ("program", "lacking"),
    [
        ("first_gpu", {"step beside tunix"}),
        ("first_tpu", {"server bfloat16", "server float32", "collective", "several hosts"}),
    ],
)
def test_every_section_runs_with_tiny_shapes(program, lacking, tmp_path):
    done, sections = measure(tmp_path / "found.json", "--limit-s", "1500", program=program, limit_s=1600)
    assert done.returncode == 0, done.stderr
    assert {name for name, found in sections.items() if found["status"] == "skipped"} == lacking
    assert {found["status"] for found in sections.values()} == {"ok", "skipped"}
    assert set(sections["publish"]["numbers"]["publish over writing"]) == {"shared", "directory"}
    if program == "first_gpu":
        assert sections["exact"]["numbers"]["bfloat16"] == {"status": 0, "logprob_abs_diff_max": [0.0, 0.0]}
