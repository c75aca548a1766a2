"""Tests of ``launch/single_node.sh``: the commands it would run, a short run on the CPU, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import httpx
import psutil
import pytest
from process_runs import FLOAT32
from programs import bash, of_script, program
from toy_runs import ROOT, TOY_BASE, comparable, environment, wait_for_rows
from vllm_processes import kill_worker, members
from waiting import until

from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.run.directory import saved_steps
from rljax.weights.access import read_api_key

pytestmark = pytest.mark.slow


def of_servers(test):
    """Marks a test that starts a real server."""
    return pytest.mark.harness(pytest.mark.vllm(test))


SCRIPT = str(ROOT / "launch/single_node.sh")
CONFIG = str(ROOT / "configs/quickstart.yaml")
SMALL = ("--data.batch-size", "4", "--rollout.group-size", "4", "--eval.every", "0", *FLOAT32)
LIMIT_S = 240


def settings(**more):
    return environment() | {"RLJAX_VENV": sys.prefix} | more


@pytest.fixture(scope="module")
def unplanned(tmp_path_factory):
    """Returns an environment whose interpreter skips the trainer's dry run. Other tests read that dry run."""
    venv = tmp_path_factory.mktemp("unplanned")
    program(venv / "bin/python", f'case "$*" in *"rljax.train "*" --dry-run") exit ;; esac\nexec {sys.executable} "$@"')
    return {"RLJAX_VENV": str(venv)}


def outcome(*words, **more):
    return bash(SCRIPT, *words, **settings(**more))


def marked(mark):
    """Returns ids and command lines of the live processes that inherited the mark."""
    every = [one.info | {"pid": one.pid} for one in psutil.process_iter(["environ", "cmdline"])]
    marks = [one for one in every if (one["environ"] or {}).get("RLJAX_TEST_MARK") == mark]
    return {one["pid"]: " ".join(one["cmdline"] or ()) for one in marks}


@pytest.fixture
def launch(vllm_interpreter, tmp_path):
    """Starts the script in a session of its own, as a terminal does. Processes that are left at the end are killed."""
    mark = uuid.uuid4().hex
    started = []

    def run(*options):
        # A test run in the background hands down an ignored SIGINT, and bash cannot trap a signal that was ignored.
        words = ["env", "--default-signal=INT", "bash", SCRIPT, CONFIG, "--", *SMALL, *options]
        words += ["--model.path", str(TOY_BASE), "--run.dir", str(tmp_path / "run")]
        own = settings(RLJAX_VLLM_VENV=str(Path(vllm_interpreter).parents[1]), RLJAX_TEST_MARK=mark)
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(words, env=own, cwd=ROOT, start_new_session=True, **both))
        return started[0], mark, tmp_path / "run"

    yield run
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    for process in started:
        process.wait(10)


def assert_locked(processes, key_file):
    """Checks that every kind of route of the server but /health asks for the key, which only the owner can read."""
    (port,) = {line.split("--port ")[1].split()[0] for line in processes.values() if "bin/vllm serve " in line}
    own = {"authorization": f"Bearer {read_api_key(key_file)}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        for path in ("/pause", "/collective_rpc", "/init_weight_transfer_engine", "/v1/completions", ROLLOUTS):
            assert client.post(path, json={}).status_code == 401, path
        assert client.get("/weight_info").status_code == 401
        assert client.get("/weight_info", headers=own).status_code == 200
        assert client.get("/health").status_code == 200


@of_servers
def test_ctrl_c_saves_the_step_and_leaves_no_process(launch):
    process, mark, run_dir = launch("--run.steps", "1000", "--checkpoint.every", "0")
    wait_for_rows(process, run_dir, 2)
    assert any("rljax.train" in line for line in marked(mark).values())
    assert any("bin/vllm serve " in line for line in marked(mark).values())
    assert_locked(marked(mark), Path(f"{run_dir}-servers/api_key"))
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output
    assert "the same command goes on from there" in output
    rows = comparable(run_dir)
    assert saved_steps(run_dir) == [len(rows)]
    assert len(rows) >= 2
    assert all(row["mismatch/logprob_abs_diff_max"] < 1e-4 for row in rows)  # both sides compute in float32, over HTTP
    assert marked(mark) == {}


@of_servers
def test_the_death_of_its_server_ends_the_run_at_once(launch):
    """The worker dies of SIGILL, as it would from AMX without permission. Steps are saved, and nothing is left."""
    process, mark, run_dir = launch("--run.steps", "1000", "--checkpoint.every", "0")
    wait_for_rows(process, run_dir, 2)
    (group,) = (pid for pid, line in marked(mark).items() if "rljax.rollout.servers.process" in line)
    kill_worker(group)
    output, _ = process.communicate(timeout=LIMIT_S)  # the trainer itself would wait for 900 s
    assert process.returncode == 1, output
    log = Path(f"{run_dir}-servers/0.log")
    assert f"single_node: server 0 ended, 0 of 1 left; the whole log is {log}\n" in output
    assert "single_node: no server is left; stopping the training\n" in output
    # Other processes of the server may write after the end of the log was shown, in their last moments.
    assert sum(line in output for line in log.read_text().splitlines()[-30:] if line.strip()) >= 5
    assert saved_steps(run_dir) == [len(comparable(run_dir))]
    assert marked(mark) == members(group) == {}


@of_servers
def test_a_signal_before_the_server_is_healthy_ends_it(launch):
    process, mark, run_dir = launch("--run.steps", "1")

    def serves():
        return any("bin/vllm serve " in line for line in marked(mark).values())

    until(serves, LIMIT_S, may_come=lambda: process.poll() is None, every_s=0.1)
    process.terminate()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143, output
    assert marked(mark) == {}
    assert not run_dir.exists()


def test_a_dry_run_shows_a_server_for_each_group_of_gpus(unplanned, tmp_path):
    words = ("--trainer-gpus", "0-3", "--server-gpus", "4,5-7", "--tensor-parallel", "2", "--dry-run")
    where = ("--", "--run.dir", str(tmp_path / "run"), "--run.steps", "7")
    config = str(ROOT / "configs/paper/qwen3_4b_fp16.yaml")
    code, out, err = outcome(config, *words, *where, **unplanned)
    assert code == 0, err
    first, second, trainer = (line for line in out.splitlines() if line.startswith(("server", "trainer")))
    assert first.startswith("server 0: CUDA_VISIBLE_DEVICES=4,5 ")
    assert second.startswith("server 1: CUDA_VISIBLE_DEVICES=6,7 ")
    for line in (first, second):
        assert "vllm_server.sh Qwen/Qwen3-4B-Base --dtype float16 --max-model-len 9216 " in line
        assert "--head-dtype" not in line
        assert line.rstrip().endswith("-- --tensor-parallel-size 2")
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 " in trainer
    assert "--run.steps 7 --rollout.engine vllm --rollout.urls <server 0> <server 1>" in trainer
    assert list(tmp_path.iterdir()) == []


SHARED = ("--trainer-gpus", "0", "--server-gpus", "0")
SHARE = ("--gpu-memory-utilization", "0.4", "--dry-run", "--", "--model.path")


@pytest.mark.harness  # launch/test_walkthroughs.py types the command
def test_dapo_needs_no_gpu_and_no_hub_for_its_dry_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = bash(ROOT / "launch/dapo.sh", "--dry-run", "--", "--run.dir", tmp_path / "run", **settings())
    assert code == 0, err
    lines = out.splitlines()
    servers = [line.split()[2] for line in lines if line.startswith("server ")]
    assert servers == [f"CUDA_VISIBLE_DEVICES={gpu}" for gpu in (4, 5, 6, 7)]
    assert any(line.startswith("trainer:  CUDA_VISIBLE_DEVICES=0,1,2,3 ") for line in lines)
    assert "4,022,468,096" in out
    assert any(re.fullmatch(r"mesh +fsdp 4 x tp 1 = 4 devices.*", line) for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "extra"), [(0, "gpu"), (9, "train"), (None, "train")])
def test_the_environment_has_cuda_where_nvidia_smi_finds_a_gpu(tmp_path, status, extra):
    """Status 9 stands for a program that is there and finds no driver."""
    if status is not None:
        program(tmp_path / "nvidia-smi", f"exit {status}")
    found = of_script(ROOT / "launch/environment.sh", f"PATH={tmp_path} trainer_extra")
    assert found == (0, extra + "\n", "")


def test_a_shared_gpu_needs_a_share_and_leaves_jax_no_more(unplanned):
    """The dry run has a key and a head in float32, which reach the server, too."""
    for words, more in ((SHARED, {}), (SHARED[2:], {"CUDA_VISIBLE_DEVICES": "1,0", "JAX_PLATFORMS": "cuda"})):
        code, _, err = outcome(CONFIG, *words, "--dry-run", **more)
        remedy = "give other --trainer-gpus, or --gpu-memory-utilization"
        assert (code, err) == (2, f"single_node: GPU 0 is to train and to serve: {remedy}\n")
    key = ("--rollout.api-key-file", "/secrets/key", "--precision.lm-head-dtype", "float32")
    code, out, err = outcome(CONFIG, *SHARED, *SHARE, str(TOY_BASE), *key, **unplanned)
    assert code == 0, err
    assert "-- --gpu-memory-utilization 0.4" in out
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in out
    assert "sleep" not in out
    server, trainer = (line for line in out.splitlines() if line.startswith(("server", "trainer")))
    found = re.findall(r"--(?:api-key-file|head-dtype) \S+", server)
    assert sorted(found) == ["--api-key-file /secrets/key", "--head-dtype float32"]
    assert "--rollout.api-key-file /secrets/key " in trainer
    assert "--precision.lm-head-dtype float32" in trainer
    code, out, err = outcome(CONFIG, *SHARED, *SHARE, str(TOY_BASE), "--rollout.colocated", "true", **unplanned)
    assert code == 0, err
    assert "-- --gpu-memory-utilization 0.4 --enable-sleep-mode" in out
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform" in out


def test_a_mistake_is_one_line_and_status_2():
    odd = (CONFIG, "--server-gpus", "0-2", "--tensor-parallel", "2")
    for words, line in (
        ((), "name a configuration (see --help)"),
        (("--gpus", "3"), "unknown option --gpus (see --help; options of rljax.train come after --)"),
        ((CONFIG, "other.yaml"), f"unexpected argument other.yaml after the configuration {CONFIG}"),
        ((CONFIG, "--trainer-gpus"), "--trainer-gpus: expected a value"),
        ((CONFIG, "--server-gpus", "3-1"), "--server-gpus: expected GPUs such as 0-3 or 0,1,2, got '3-1'"),
        (odd, "--server-gpus: 3 GPUs do not divide into servers of --tensor-parallel 2"),
    ):
        assert outcome(*words) == (2, "", f"single_node: {line}\n")
    code, out, _ = outcome("--help")
    assert code == 0
    assert out.startswith("One machine: starts servers")
    assert "--tensor-parallel N" in out
    assert "set -euo" not in out


def test_a_server_that_does_not_start_ends_the_script(unplanned, tmp_path):
    words = (CONFIG, "--", "--run.dir", str(tmp_path / "run"))
    code, _, err = outcome(*words, RLJAX_VLLM_VENV=str(tmp_path / "none"), **unplanned)
    assert code == 2
    assert f"no vLLM environment at {tmp_path}/none" in err
    assert err.endswith("single_node: server 0 did not start; its reason is above\n")
