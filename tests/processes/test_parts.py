"""Real processes serve the shards that they hold. What is pulled from all of them is the whole tensors' bits."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from network_link import Side, linked
from shard_publishers import Publishers, assert_holds, take
from toy_runs import ROOT, environment
from waiting import until

from rljax.distributed.ownership import provably_dead
from rljax.errors import START_AGAIN_STATUS
from rljax.weights.mirror import Mirror

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def files_of(told):
    return json.loads((Path(told["path"]) / "version.json").read_text())["files"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_process_leaves_no_server_and_its_files_go(victim, tmp_path):
    mirror = Mirror(tmp_path / "mirror")
    with Publishers(tmp_path / "run", 2) as run:
        told = run.publish()
        left = [run.own(index) for index in range(2)]
        urls = [told["source"], *{it["at"] for it in files_of(told).values() if "at" in it}]
        run.ask(0.5)
        run.processes[victim].kill()
        assert run.processes[1 - victim].wait(60) == START_AGAIN_STATUS, run.printed()
        for url in urls:
            until(lambda url=url: not _answers(url))
    assert all(provably_dead(own / "owner.json") for own in left if own.exists())
    for folder in ("truth", "answers"):
        shutil.rmtree(tmp_path / "run" / folder)
    with Publishers(tmp_path / "run", 2) as again:
        take(again.publish(), mirror)
        assert_holds(mirror, again.truth(0))
        assert not any(own.exists() for own in left)
        assert again.end() == [0, 0]


def test_a_process_elsewhere_serves_at_its_own_address(tmp_path):
    """Two network namespaces act as two machines. The program that pulls runs on the machine of process 0."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    first, second = Side("rljax-parts-0", "rljax-p0", "10.203.1.1"), Side("rljax-parts-1", "rljax-p1", "10.203.1.2")
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("a-key-of-more-than-sixteen-letters")
    for side in (first, second):  # each machine has its own: JAX's collectives take the address of its name
        (tmp_path / side.name).write_text(f"127.0.0.1 localhost\n{side.address} {socket.gethostname()}\n")

    def inside(index):
        side = (first, second)[index]
        named = ("sh", "-c", f'mount --bind {tmp_path / side.name} /etc/hosts && exec "$@"', "sh")
        return (*side.inside, *named, "env", f"RLJAX_API_KEY_FILE={key}")

    with linked(first, second):
        where = {"coordinator": first.address, "inside": inside}
        with Publishers(tmp_path / "run", 2, host=first.address, **where) as run:
            for number in range(2):
                told = run.publish()
                assert told["source"].startswith(f"http://{first.address}:")
                places = {it["at"].rpartition(":")[0] for it in files_of(told).values() if "at" in it}
                assert places == {f"http://{second.address}"}
                before = second.sent_bytes()
                pulled = [sys.executable, "tests/support/pulling.py", told["source"], Path(told["path"]).name]
                words = [*inside(0), *pulled, str(tmp_path / "mirror")]
                subprocess.run(words, check=True, cwd=ROOT, env=environment(), timeout=120, capture_output=True)
                assert_holds(Mirror(tmp_path / "mirror"), run.truth(number))
                own = sum(it["bytes"] for it in files_of(told).values() if "at" in it)
                assert own < second.sent_bytes() - before < 1.3 * own + 50_000
            assert run.end() == [0, 0], run.printed()
        shutil.rmtree(tmp_path / "run")
        with Publishers(tmp_path / "run", 2, host="127.0.0.1", **where) as run:
            assert run.processes[1].wait(120) == 2
            line = "process 1 cannot hand over its part of the weights: publish.host = 127.0.0.1 is reached only on the"
            assert line in run.printed()[1].replace("\n", " ")


def _answers(url):
    with contextlib.suppress(httpx.TransportError):
        httpx.get(f"{url}/health")
        return True
    return False
