"""launch/tpu.sh must run the right commands, and its commands must write the right systemd unit on a host."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from programs import bash, program

SCRIPT = Path(__file__).parents[2] / "launch/tpu.sh"
PLACE = ["--tpu", "slice", "--zone", "us-central2-b"]
CLUSTER = ["--cluster", "c", "--tpu-type", "v6e-32", "--image", "registry/rljax:1"]
CASES = {
    "install trainer": ["install", "trainer", *PLACE, "--nfs", "10.0.0.2:/share", "--api-key-file", "rljax.key"],
    "install server": ["install", "server", *PLACE, "--project", "mine"],
    "train": ["train", "/shared/config.yaml", *PLACE, "--", "--run.steps", "3"],
    "serve": ["serve", "/shared/model", *PLACE, "--", "--dtype=bfloat16"],
    "logs": ["logs", *PLACE],
    "stop": ["stop", *PLACE],
    "xpk": ["xpk", "/shared/config.yaml", *CLUSTER],
    "xpk-serve": ["xpk-serve", "/shared/model", *CLUSTER, "--", "--dtype=bfloat16"],
}


def dry_run(case):
    words = [*CASES[case], "--dry-run"] if "--" not in CASES[case] else ["--dry-run", *CASES[case]]
    status, out, err = bash(SCRIPT, *words)
    assert (status, err) == (0, "")
    return [shlex.split(line) for line in out.splitlines()]


def remote(case):
    found = [word.partition("=")[2] for words in dry_run(case) for word in words if word.startswith("--command=")]
    assert found
    return found


def test_every_host_is_given_every_command():
    for case in list(CASES)[:-2]:
        for words in dry_run(case):
            if words[0] != "git":
                assert words[:4] == ["gcloud", "compute", "tpus", "tpu-vm"]
                assert words[4] in ("ssh", "scp")
                assert {"--worker=all", "--zone=us-central2-b"} < set(words)
                assert ("--project=mine" in words) == (case == "install server")
        for command in remote(case):
            done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")
    # vllm-tpu has wheels for Python 3.12 alone, and the trainer keeps the one of the image.
    assert "python3.11 -m venv .venv && " in remote("install trainer")[2]
    assert remote("install server")[2] == "cd rljax && bash launch/install_vllm.sh --tpu"


XPK = {
    "xpk": "python3 -m rljax.train /shared/config.yaml",
    "xpk-serve": ".venv-vllm/bin/python -m rljax.cli serve vllm /shared/model --port=8000 --timeout=3600 "
    "--host=$(hostname -i) --dtype=bfloat16",
}


def test_xpk_starts_again_what_may_be_started_again():
    for case, command in XPK.items():
        (words,) = dry_run(case)
        assert words[:3] == ["xpk", "workload", "create"]
        assert f"--command={command}" in words
        assert "--restart-on-exit-codes=1,75" in words  # and 127 to 255, which are xpk's own; never 2 and 3


@pytest.mark.parametrize("case", XPK)
def test_xpk_takes_the_line(case):
    core = pytest.importorskip("xpk.parser.core", reason="xpk is installed by nothing here: pip install xpk")
    (words,) = dry_run(case)
    parser = argparse.ArgumentParser()
    core.set_parser(parser)
    values = vars(parser.parse_args(words[1:]))
    assert values["command"] == XPK[case]
    assert (values["tpu_type"], values["max_restarts"], values["restart_on_exit_codes"]) == ("v6e-32", "20", "1,75")


def test_what_is_wrong_is_said_and_nothing_is_run():
    for words, says in [
        ([], "expected install, train"),
        (["train", *PLACE], "train: name a configuration"),
        (["train", "c.yaml"], "train: give --tpu and --zone"),
        (["install", "both", *PLACE], "expected trainer or server"),
        (["logs", "x", *PLACE], "unexpected argument x"),
        (["xpk", "c.yaml", "--cluster", "c"], "give --cluster, --tpu-type and --image"),
        (["train", "c.yaml", *PLACE, "--worker", "0"], "unknown option --worker"),
        (["train", "c.yaml", *PLACE, "--", "--run.dir", "a b"], "write what is not plain into the configuration"),
        (["train", "$(id).yaml", *PLACE], "write what is not plain into the configuration"),
        (["train", "c.yaml", "--tpu"], "--tpu: expected a value"),
    ]:
        status, out, err = bash(SCRIPT, *words)
        assert (status, out) == (2, "")
        assert says in err


@pytest.fixture
def host(tmp_path):
    """Returns a directory that acts as a host: ``sudo`` runs its arguments, ``systemctl`` writes them down."""
    for name, text in {"sudo": 'exec "$@"', "systemctl": f'echo "$*" >> {tmp_path}/systemctl'}.items():
        program(tmp_path / "bin" / name, text)
    return tmp_path


def written(host, case):
    """Returns the unit that a case's command writes on the host: its path, and its values as {key: value}."""
    (command,) = remote(case)
    env = {"PATH": f"{host / 'bin'}:{os.environ['PATH']}", "HOME": str(host), "USER": "root"}
    command = command.replace("/etc/systemd/system", str(host))
    subprocess.run(["sh", "-c", command], env=env, check=True, capture_output=True, timeout=60)
    (unit,) = host.glob("*.service")
    return unit, dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))


def test_training_is_a_unit_that_starts_again(host):
    unit, values = written(host, "train")
    assert unit.name == "rljax-train.service"
    assert values["ExecStart"] == f"{host}/rljax/.venv/bin/python -m rljax.train /shared/config.yaml --run.steps 3"
    assert (values["Restart"], values["RestartPreventExitStatus"]) == ("on-failure", "2 3")
    assert values["KillMode"] == "mixed"  # SIGTERM goes only to the program
    assert values["Environment"] == f"PYTHONUNBUFFERED=1 JAX_COMPILATION_CACHE_DIR={host}/rljax/.cache/jax "
    told = (host / "systemctl").read_text().splitlines()
    assert told == ["daemon-reload", "enable rljax-train", "restart rljax-train"]


def test_a_server_binds_to_its_own_address_and_has_the_key(host):
    (host / ".rljax.key").write_text("k")
    _, values = written(host, "serve")
    address = r"([\d.]+|[\da-f:]+)"
    assert re.search(rf" --port=8000 --timeout=3600 --host={address} --dtype=bfloat16$", values["ExecStart"])
    assert values["Environment"].endswith(f" RLJAX_API_KEY_FILE={host}/.rljax.key")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("case", ["train", "serve"])
def test_systemd_takes_the_unit(host, case):
    unit, values = written(host, case)
    python = Path(values["ExecStart"].split()[0])
    program(python, "")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert unit.name not in done.stderr
    unit.write_text(unit.read_text().replace("Restart=on-failure", "Restart=on-failures"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert "on-failures" in done.stderr


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="no gcloud")
@pytest.mark.parametrize("verb", ["ssh", "scp"])
def test_gcloud_has_the_options(verb):
    used = {word.partition("=")[0] for case in CASES for words in dry_run(case) if verb in words for word in words[5:]}
    used = {word for word in used if word.startswith("--")} - {"--project"}  # gcloud takes it for every verb
    words, plain = ["gcloud", "compute", "tpus", "tpu-vm", verb, "--help"], os.environ | {"TERM": "dumb"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=plain)
    text = re.sub(r"\x1b\[\d*;?\d*m", "", done.stdout)
    assert used
    assert [option for option in sorted(used) if option not in text] == []
