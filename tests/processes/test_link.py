"""Two network namespaces act as two machines that share a file system: trainers here, a vLLM server there."""

import os
import secrets
import subprocess

import pytest
from network_link import Side, linked
from process_runs import FLOAT32, complete_together
from toy_runs import comparable, tiny
from waiting import until

from rljax.rollout.servers.process import environment_python

pytestmark = pytest.mark.processes

TRAINERS, SERVERS = Side("rljax-trainers", "rljax-t0", "10.203.0.1"), Side("rljax-servers", "rljax-s0", "10.203.0.2")
PORT = 18731


@pytest.fixture
def served(toy_base, tmp_path):
    """Yields the URL and key file of a float32 server on the other side of a link. The server is ended by its id."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with linked(TRAINERS, SERVERS):
        yield from serve(toy_base, tmp_path)


def serve(toy_base, tmp_path):
    key, url = tmp_path / "key", tmp_path / "url"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    options = ["--dtype", "float32", "--host", SERVERS.address, "--port", str(PORT), "--max-model-len", "512"]
    files = ["--api-key-file", str(key), "--url-file", str(url), "--log", str(tmp_path / "server.log")]
    words = [str(environment_python("vllm")), "-m", "rljax.cli", "serve", "vllm", str(toy_base), *options, *files]
    with (tmp_path / "server.out").open("wb") as out:
        process = subprocess.Popen([*SERVERS.inside, *words], stdout=out, stderr=out)
    try:
        said = (tmp_path / "server.out").read_text
        until(url.exists, 480, said=said, may_come=lambda: process.poll() is None, every_s=0.5)
        yield url.read_text().strip(), key
    finally:
        process.terminate()
        process.wait(60)


def test_two_trainer_processes_and_a_server_beyond_the_link(served, toy_base, tmp_path):
    url, key = served
    engine = ("--rollout.engine", "vllm", "--rollout.urls", url, "--rollout.api-key-file", str(key))
    size = ("--data.batch-size", "16", "--packing.rows-per-micro-batch", "4", "--rollout.max-response-tokens", "24")
    run_dir, before = tmp_path / "run", [side.sent_bytes() for side in (TRAINERS, SERVERS)]
    words = tiny(toy_base, run_dir, 6, *FLOAT32, *engine, *size, "--optimizer.learning-rate", "2e-4")
    complete_together(words, 2, tmp_path / "printed", heartbeat_s=30, inside=TRAINERS.inside)
    rows = comparable(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert 0 < row["mismatch/logprob_abs_diff_max"] < 1e-4
        assert row["rollout/policy_version"] == row["step"] - 1
        assert row["publish/verified_tensors"] > 10
    assert any(row["publish/changed_fraction"] > 0.5 for row in rows)
    after = [side.sent_bytes() for side in (TRAINERS, SERVERS)]
    sent = [last - first for first, last in zip(before, after, strict=True)]
    assert min(sent) > 10_000
