"""The scripts that make environments search for the interpreter in one way; the quickstart starts its server."""

import shutil
import sys

import pytest
from programs import bash, of_script, program
from toy_runs import ROOT


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
    assert search(path, str(sys.version_info.minor + 1)) == (1, "")
    program(path / "bin/python3", f'exec {sys.executable} "$@"')
    assert search(path, "11") == (0, "python3")
    assert search(path, "11", str(real)) == (0, str(real))
    assert search(path, "11", str(path / "bin/python3.12")) == (1, "")
    for script in (
        "launch/environment.sh",
        "launch/installing.sh",
        "launch/install_compilers.sh",
        "tools/test_peers.sh",
    ):
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
