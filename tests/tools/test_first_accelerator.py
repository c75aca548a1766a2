"""``tools/first_gpu.py`` and ``first_tpu.py`` run sections one by one, and their file has what is measured so far."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import first_gpu
import numpy as np
import pytest
from first_gpu import DTYPES
from sections import run_section
from toy_runs import ROOT
from waiting import is_gone


def measure(path, *words, program="first_gpu", limit_s=300, size=("--tiny",), **variables):
    command = [sys.executable, f"tools/{program}.py", *size, "--json", str(path), *words]
    given = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    environment = given | {"JAX_PLATFORMS": "cpu", "RLJAX_VLLM_VENV": str(path.parent)} | variables
    options = {"capture_output": True, "text": True, "timeout": limit_s, "check": False}
    done = subprocess.run(command, cwd=ROOT, env=environment, **options)
    return done, json.loads(path.read_text())["sections"] if path.exists() else {}


def test_without_an_accelerator_the_program_stops(tmp_path):
    done, sections = measure(tmp_path / "found.json", "--only", "versions", "step beside tunix", size=())
    assert done.returncode == 1, done.stderr
    assert "\nJAX finds no accelerator here: " in done.stdout
    assert list(sections) == ["versions"]
    assert sections["versions"]["numbers"]["device"] == {"kind": "cpu", "platform": "cpu", "count": 1}


@pytest.mark.harness
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
    done, sections = measure(tmp_path / "found.json", "--limit-s", "1", PATH="")  # git is not found
    assert done.returncode == 0, done.stderr
    assert len(sections) > 8
    assert {found["status"] for found in sections.values()} == {"skipped"}
    done, _ = measure(tmp_path / "found.json", "--model", str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"error: --model: {tmp_path} has no config.json\n")


def test_a_section_is_judged_by_its_numbers_and_ends_in_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    for facts, is_ok in (({"problems": []}, True), ({"problems": ["p"]}, False), ({"error": "e"}, False)):
        status = "ok" if is_ok else "partly failed"
        code = f"import os, sys; print({json.dumps({'x': facts})!r}); print(3)"
        code += "; print('XLA_CLIENT_MEM_FRACTION' in os.environ, file=sys.stderr)"
        found = run_section([sys.executable, "-c", code], 60.0, (), str(tmp_path))
        assert (found["status"], found["numbers"], found["stderr"]) == (status, {"x": facts}, "False\n")
    late = run_section(["bash", "-c", 'sleep 60 & echo "{\\"child\\": $!}"; wait'], 1.0, (), str(tmp_path))
    assert late["status"] == "not done within 1 s"
    assert is_gone(late["numbers"]["child"])


def test_kernels_try_trees_and_a_run_that_fails_says_why(monkeypatch, capsys):
    for name in ("check_attention", "check_head"):
        monkeypatch.setattr(f"rljax.commands.check_device.{name}", lambda *given: {})
    monkeypatch.setattr("rljax.policy.attention_errors.why_no_trees", lambda name, device, dtype, policy: dtype)
    found = first_gpu.kernels(first_gpu.TINY, None)
    assert {dtype: found[f"trees {dtype}"]["problems"] for dtype in DTYPES} == {dtype: [dtype] for dtype in DTYPES}
    failed = subprocess.CompletedProcess((), 1, stderr="no device")
    monkeypatch.setattr(subprocess, "run", lambda *words, **more: failed)
    found = first_gpu.exact(first_gpu.TINY, None)
    assert [found[dtype]["error"].splitlines()[-1] for dtype in DTYPES] == ["RuntimeError: no device"] * 2
    capsys.readouterr()
    first_gpu.pinned(first_gpu.TINY, None)
    assert [json.loads(line)["arrays"] for line in capsys.readouterr().out.splitlines()] == [1, 2, 3, 4]


def test_engines_count_numbers_that_are_not_finite(monkeypatch):
    def score(spec, dump, *given, **more):
        if spec == "jax:bfloat16":
            raise RuntimeError("x" * 4000 + " no kernel")
        column = np.full((len(dump.token_ids), len(dump.token_ids[0])), -1.0)
        column[0, [0, -1]] = np.nan  # in the prompt and in the response
        return list(column), None

    monkeypatch.setattr("rljax.compare.scorers.score_column", score)
    found = first_gpu.engines(first_gpu.TINY, first_gpu.TOY)
    assert found["hf bfloat16"]["error"].endswith(" no kernel\n")
    assert found["hf float16"]["nonfinite_count"] == 1


def test_a_directory_has_room_and_a_fetched_wheel_may_be_newer(tmp_path, monkeypatch):
    def pip(words, check):
        for name in ("numpy", "typing_extensions") if "download" in words else ():
            (tmp_path / f"{name}-9-py3-none-any.whl").touch()

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(first_gpu, "memory_directory", lambda: tmp_path)
    assert [first_gpu.roomy_directory(size) for size in (1, 2**80)] == [tmp_path, Path(tempfile.gettempdir())]
    first_gpu.fetch(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["typing_extensions-9-py3-none-any.whl"]


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
    published = sections["publish"]["numbers"]["publish, directory"]
    # A number between 1 and 2 grows by 2**-12 to 2**-11, and is rounded to multiples of 2**-7.
    assert 0.02 < published["share_changed"] < 2**-4
    assert published["bytes_for_servers"] < published["bytes"] / 2
    assert list(sections["step bfloat16, remat blocks"]["numbers"]) == ["compilation", "step"]
    if program == "first_gpu":
        assert sections["exact"]["numbers"]["bfloat16"]["logprob_abs_diff_max"] == [0.0, 0.0]
