"""Tests of the keys that the launchers make: for whom they are, and how servers and trainer get them."""

import re
import stat
import sys

import pytest
from programs import bash, program
from toy_runs import ROOT

from rljax.weights.access import read_api_key


def shell(script, tmp_path):
    """Returns the exit status of a script in the folder ``tmp_path``."""
    return bash("-c", f"set -euo pipefail; umask 000; source {ROOT}/launch/served.sh; cd {tmp_path}; {script}")[0]


def test_a_key_is_made_once_for_its_owner_alone(tmp_path):
    assert shell("for i in 1 2 3 4; do make_key key & done; wait", tmp_path) == 0
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    made = read_api_key(tmp_path / "key")
    assert re.fullmatch("[0-9a-f]{64}", made)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert shell("make_key key", tmp_path) == 0
    assert read_api_key(tmp_path / "key") == made
    assert shell("make_key nowhere/key", tmp_path) == 1


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("launcher", ["single_node.sh", "slurm.sbatch"])
def test_servers_and_trainer_of_a_run_get_one_key(tmp_path, launcher, own):
    """A dry run shows the commands, and makes nothing. A key file that the user has named stays."""
    skip = 'case "$*" in *"rljax.train "*" --dry-run") exit ;; esac'
    program(tmp_path / "venv/bin/python", f'{skip}\nexec {sys.executable} "$@"')
    key = "/secrets/key" if own else f"{tmp_path}/run-servers/api_key"
    words = ["configs/quickstart.yaml", "--dry-run", "--", "--run.dir", f"{tmp_path}/run/"]
    words += ["--rollout.engine", "vllm"] if launcher == "slurm.sbatch" else []
    variables = {"PYTHONPATH": str(ROOT), "RLJAX_VENV": str(tmp_path / "venv")}
    variables |= {"RLJAX_API_KEY_FILE": key} if own else {}
    status, out, err = bash(ROOT / "launch" / launcher, *words, **variables)
    assert status == 0, err
    (server,) = (line for line in out.splitlines() if line.startswith("server"))
    (trainer,) = (line for line in out.splitlines() if line.startswith("trainer"))
    assert f"--api-key-file {key} " in server
    assert f"RLJAX_API_KEY_FILE={key} " in trainer or f"--rollout.api-key-file {key} " in trainer
    assert [path.name for path in tmp_path.iterdir()] == ["venv"]
