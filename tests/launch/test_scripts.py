"""The small scripts of launch/: the search for an interpreter, environments, the quickstart, keys, copies of runs."""

import os
import re
import shutil
import stat
import sys

import pytest
from programs import bash, of_script, program
from toy_runs import ROOT

from rljax.weights.access import read_api_key

SEARCHING = ["launch/environment.sh", "launch/installing.sh", "launch/install_compilers.sh", "tools/test_peers.sh"]


@pytest.fixture
def machine(tmp_path):
    """Returns a directory with pyenv's shims for Pythons that are not chosen, and the real interpreter."""
    version = f"3.{sys.version_info.minor}"
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        program(tmp_path / "bin" / name, "echo 'pyenv: command not found' >&2; exit 127")
    program(tmp_path / "bin/pyenv", f'[ "$1" != root ] || echo {tmp_path}/pyenv')
    real = program(tmp_path / f"pyenv/versions/{version}.9/bin/python{version}", f'exec {sys.executable} "$@"')
    return tmp_path, real


def search(path, *words):
    status, said, _ = of_script(ROOT / "launch/python.sh", "find_python", *words, PATH=f"{path}/bin:/usr/bin:/bin")
    return status, said.strip()


def test_the_interpreter_is_found(machine):
    """A version that pyenv has but has not chosen is found. The path comes first, and a named program before it."""
    path, real = machine
    assert search(path, "11") == (0, str(real))
    program(path / "bin/python3", f'exec {sys.executable} "$@"')
    assert search(path, "11") == (0, "python3")
    assert search(path, str(sys.version_info.minor + 1)) == (1, "")
    assert search(path, "11", str(real)) == (0, str(real))
    assert search(path, "11", str(path / "bin/python3.12")) == (1, "")
    for script in SEARCHING:
        assert "find_python" in (ROOT / script).read_text(encoding="utf-8")


def make_environment(python, venv):
    status, _, said = of_script(ROOT / "launch/python.sh", "make_environment", python, venv)
    return status, said


def test_half_an_environment_is_removed(tmp_path):
    """Debian without python3-venv makes the interpreter's link and then fails, and later has the package."""
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "install.log").touch()  # the scripts' own file
    half = 'if [ "$1" = -m ]; then mkdir -p "$3/bin" && ln -s /bin/true "$3/bin/python"; exit 1; fi; echo 3.11'
    status, said = make_environment(str(program(tmp_path / "python3.11", half)), str(venv))
    assert status == 1
    assert "install python3.11-venv (Debian, Ubuntu)" in said
    assert [path.name for path in venv.iterdir()] == ["install.log"]
    whole = 'mkdir -p "$3/bin" && ln -s /bin/true "$3/bin/python"'
    assert make_environment(str(program(tmp_path / "mended", whole)), str(venv)) == (0, "")
    assert make_environment("never called", str(venv)) == (0, "")
    bare = program(tmp_path / "bare/bin/python", "exit 1")
    status, said = make_environment("never called", str(tmp_path / "bare"))
    assert (status, bare.exists()) == (1, True)
    assert f"{tmp_path}/bare has no pip" in said


def test_the_quickstart_reads_its_settings_with_the_engine(tmp_path):
    """``--publish.store http`` is only for servers, so the settings must be read with the engine that is requested."""
    (tmp_path / "launch").mkdir()
    for name in ("configs", "rljax"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "launch/quickstart.sh", tmp_path / "launch")
    bin_directory = program(tmp_path / "bin/python", f'exec {sys.executable} "$@"').parent
    (tmp_path / "launch/environment.sh").write_text(f"prepare_environment() {{ RLJAX_BIN={bin_directory}; }}\n")
    program(tmp_path / "launch/install_vllm.sh", "exit 0")
    program(tmp_path / "launch/single_node.sh", 'echo "$@"')
    words = ["--vllm", "--", "--publish.store", "http", "--rollout.dtype", "float16"]
    status, out, err = bash(tmp_path / "launch/quickstart.sh", *words, PYTHONPATH=str(ROOT))
    assert (status, err) == (0, "")
    options = "--run.dir runs/quickstart-vllm-float16 --publish.store http --rollout.dtype float16"
    assert out.strip() == f"configs/quickstart.yaml --engine vllm -- {options}"


def shell(script, tmp_path):
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


@pytest.mark.parametrize(("launcher", "own"), [("single_node.sh", False), ("slurm.sbatch", True)])
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


@pytest.fixture
def copy_run(tmp_path):
    """Returns a function from words to (exit status, standard error, calls of a planted ``aws``)."""
    log = tmp_path / "calls"
    aws = program(tmp_path / "bin/aws", f'echo "$@" >> {log}')

    def run(*words):
        log.write_text("")
        status, _, said = bash(ROOT / "launch/copy_run.sh", *words, PATH=f"{aws.parent}:{os.environ['PATH']}")
        return status, said, [line.split()[:5] for line in log.read_text().splitlines()]

    return run


def test_rows_are_saved_first_and_a_bare_disk_is_loaded(copy_run, tmp_path):
    quiet = "--only-show-errors"
    status, _, calls = copy_run("save", "s3://b/p/", tmp_path / "run/checkpoints/20")
    rows = ["s3", "cp", quiet, f"{tmp_path}/run/metrics.jsonl", "s3://b/p/metrics.jsonl"]
    assert (status, calls) == (0, [rows, ["s3", "sync", quiet, f"{tmp_path}/run", "s3://b/p"]])
    status, _, calls = copy_run("load", "s3://b/p", tmp_path / "run")
    assert (status, calls) == (0, [["s3", "sync", quiet, "s3://b/p", f"{tmp_path}/run"]])
    (tmp_path / "run/checkpoints/20").mkdir(parents=True)
    assert copy_run("load", "s3://b/p", tmp_path / "run") == (0, "", [])


def test_other_words_are_refused_in_one_line(copy_run):
    for words in (("load", "s3://b/p"), ("fetch", "s3://b/p", "run"), ("load", "ftp://b/p", "run")):
        status, said, calls = copy_run(*words)
        assert (status, calls, said.count("\n")) == (2, [], 1)
        assert f"got '{' '.join(words)}'" in said
