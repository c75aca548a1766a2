"""``tools/first_gpu.py`` runs its sections one by one, and its file has what is measured so far."""

import json
import os
import subprocess
import sys

import pytest
from toy_runs import ROOT


def measure(path, *words, limit_s=300):
    command = [sys.executable, "tools/first_gpu.py", "--tiny", "--json", str(path), *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
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


def test_without_time_each_section_is_skipped(tmp_path):
    done, sections = measure(tmp_path / "found.json", "--limit-s", "4")
    assert done.returncode == 0
    assert len(sections) > 8
    assert {found["status"] for found in sections.values()} == {"skipped"}


def test_a_directory_without_a_model_is_one_line(tmp_path):
    done, _ = measure(tmp_path / "found.json", "--model", str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"error: --model: {tmp_path} has no config.json\n")


@pytest.mark.harness
def test_every_section_runs_with_tiny_shapes(tmp_path):
    done, sections = measure(tmp_path / "found.json", "--limit-s", "1500", limit_s=1600)
    assert done.returncode == 0, done.stderr
    skipped = {name for name, found in sections.items() if found["status"] == "skipped"}
    assert skipped == {"step beside tunix"}
    assert {found["status"] for found in sections.values()} == {"ok", "skipped"}
    assert sections["exact"]["numbers"]["bfloat16"] == {"status": 0, "logprob_abs_diff_max": [0.0, 0.0]}
    assert set(sections["publish"]["numbers"]["publish over writing"]) == {"shared", "directory"}
