"""Tests of what strangers may do to the receiver of trajectories: connect, wait, send rubbish, and send web pages."""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
from external_rows import make_row
from served_receivers import LIMITS, Served

from rljax.rollout.external.receiver import MOST_ROWS, make_reader
from rljax.weights import http_limits

pytestmark = pytest.mark.timeout(120)
KEY = "k" * 32
JSON = {"content-type": "application/json"}


@pytest.fixture(params=[False, True], ids=["open", "with a key"])
def guarded(request, tmp_path, monkeypatch):
    """Yields a receiver, with a key and without one. A connection may keep it waiting for half a second."""
    monkeypatch.setattr(http_limits, "WAIT_S", 0.5)
    monkeypatch.setattr("rljax.rollout.external.receiver.WAIT_S", 0.5)
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(KEY)
    with Served(tmp_path / "spool", **({"api_key_file": str(key)} if request.param else {})) as served:
        yield served


def connect(served, text):
    url = httpx.URL(str(served.receiver.url))
    connection = socket.create_connection((url.host, url.port), timeout=20)
    connection.sendall(text)
    return connection


def closed_after(connection):
    """Returns the seconds until the server closes the connection."""
    began = time.monotonic()
    with connection, contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return time.monotonic() - began


HEAD = b"POST /trajectories HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HALF = {
    "nothing": b"",
    "half a head": b"GET /policy HTTP/1.1\r\n",
    "half a body": HEAD + b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Length: 100\r\n\r\n{",
    "half a body without the key": HEAD + b"Content-Length: 100\r\n\r\n{",
    "the body of no route": HEAD.replace(b"trajectories", b"nothing") + b"Content-Length: 100\r\n\r\n{",
}


def test_half_a_request_is_closed(guarded):
    """So is half of a second one."""
    second = connect(guarded, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert second.recv(1000).endswith(b"ok\n")
    second.sendall(b"GET /he")
    with ThreadPoolExecutor() as pool:
        took = list(pool.map(closed_after, [*(connect(guarded, text) for text in HALF.values()), second]))
    assert min(took[:-1]) > 0.3, took
    assert max(took) < 8, took


def test_a_body_in_drops_is_given_up(guarded):
    """Each byte comes long before the connection would be closed for its silence."""
    authorized = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
    with connect(guarded, HEAD + authorized + b"Content-Length: 1000\r\n\r\n") as connection:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 10:
                connection.sendall(b" ")
                connection.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(100).startswith(b"HTTP/1.1 408")
                    break
    assert time.monotonic() - began < 8


def test_slow_bodies_keep_nobody_waiting(tmp_path):
    head = HEAD + b"Content-Length: 60000000\r\n\r\n{"
    with Served(tmp_path / "spool") as served, contextlib.ExitStack() as opened:
        for _ in range(8):
            opened.enter_context(connect(served, head))
        began = time.monotonic()
        assert served.post(make_row("a", 1)).status_code == 200
        assert time.monotonic() - began < 4


SERVER = """
import resource, sys, tempfile
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from served_receivers import Served
with Served(Path(tempfile.mkdtemp()) / "spool") as served:
    print(served.receiver.url, flush=True)
    sys.stdin.readline()
    print(len([open("/dev/null") for _ in range(100)]), flush=True)
    sys.stdin.readline()
"""


def test_strangers_do_not_take_the_files_of_the_process():
    """300 half requests meet a process that may open 200 files. It still opens 100, and answers."""
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        url = httpx.URL(server.stdout.readline().strip())

        def hold(number):
            connection = socket.create_connection((url.host, url.port), timeout=30)
            connection.sendall(HALF["half a head" if number % 2 else "half a body"])
            return connection

        with contextlib.ExitStack() as held, ThreadPoolExecutor(32) as pool:
            for connection in pool.map(hold, range(300)):
                held.enter_context(connection)
            server.stdin.write("\n")
            server.stdin.flush()
            assert server.stdout.readline() == "100\n"
            assert httpx.get(f"{url}/policy", timeout=20).status_code == 200
        server.stdin.close()
    assert server.returncode == 0


def test_web_pages_are_refused(guarded):
    """A page of any origin, also of this machine's, cannot send rows; nor can a name that points to this machine."""
    has_key = {"authorization": f"Bearer {KEY}"}
    rows = [make_row("a", 1)]
    for origin in ("http://localhost:8000", "https://example.org", "null", guarded.receiver.url):
        assert guarded.post(*rows, origin=origin, **has_key).status_code == 403
    assert guarded.queue.counts() == (0, 0, 0)
    is_open = "KEY" not in guarded.client.get("/policy").text
    for host in ("rebound.example.org", "127.0.0.1.example.org", "localhost.example.org", "", "["):
        assert guarded.client.get("/policy", headers={"host": host, **has_key}).status_code == (403 if is_open else 200)
    for host in ("127.0.0.1", "localhost:99", "[::1]:99", "127.0.0.2:1"):
        assert guarded.client.get("/policy", headers={"host": host, **has_key}).status_code == 200


# ---- What a body may be ----


MEMORY = """
import resource, sys
from served_receivers import LIMITS, rubbish
from rljax.rollout.external.receiver import make_reader
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for kind, body in rubbish(2**24):
    try:
        make_reader(LIMITS)(body, kind)
    except ValueError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_rubbish_takes_no_memory():
    """16 MiB of each kind of rubbish. The largest body and a copy of it are the memory that is needed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.check_output([sys.executable, "-c", MEMORY], env=environment, text=True, timeout=60)
    *said, mebibytes = output.splitlines()
    assert len(said) == 8
    assert all(line.startswith("POST: ") for line in said)
    assert int(mebibytes) < 130


def test_the_rows_of_a_request_are_bounded():
    row, read = make_row("a", 1), make_reader(LIMITS)
    for count in (1000, MOST_ROWS + 1):
        is_refused = pytest.raises(ValueError, match=f"{MOST_ROWS}") if count > 1000 else contextlib.nullcontext()
        bodies = {"application/json": json.dumps([row] * count).encode()}
        bodies["application/msgpack"] = msgspec.msgpack.encode([row] * count)
        bodies["application/jsonl"] = (json.dumps(row).encode() + b"\n") * count
        for kind, body in bodies.items():
            with is_refused:
                assert len(read(body, kind)) == count


def test_the_numbers_that_python_writes_are_read():
    """NaN is no JSON, but Python writes it for a failed reward, and in columns that nobody reads."""
    unread = {"note": '"NaN" \\', "metrics": {"x": math.nan, "y": -math.inf}}
    rows = [make_row("NaN", math.nan, **unread, logprobs=[-1, math.nan, -1]), make_row("a", math.inf)]
    (_, found), (_, other) = make_reader(LIMITS)(json.dumps(rows).encode(), "application/json")
    assert (found.group, found.reward, found.logprobs) == ("NaN", None, [-1, None, -1])
    assert other.reward == 1e308


REFUSED = {
    "Expected `float | null`, got `str` - at `$[0].logprobs[1]`": [make_row("a", 1, logprobs=[-1, "x", -1])],
    "lacks mask (or turns) - at `$[0]`": [{name: value for name, value in make_row("a", 1).items() if name != "mask"}],
    "Expected `object`, got `int` - at `$[1]`": [make_row("a", 1), 3],
    "Expected `int | str`, got `array` - at `$.group`": make_row(["a"], 1),
    "row 1: version is 1, but the newest policy of the run is 0": [make_row("a", 1, version=1)],
    "the request has no row": [],
}


def test_what_is_wrong_is_named_and_not_kept(tmp_path):
    forms = (("application/json", json.dumps), ("application/msgpack", msgspec.msgpack.encode))
    sent = [(kind, write(rows), said) for said, rows in REFUSED.items() for kind, write in forms]
    sent += [("application/json", body, "") for body in (b"{", b"\xff", b'[{"group": ' + b"[" * 100_000)]
    with Served(tmp_path / "spool") as served:
        for kind, body, said in sent:
            reply = served.client.post("/trajectories", content=body, headers={"content-type": kind})
            assert reply.status_code == 400
            assert reply.text.startswith(f"POST: {said}")
            assert reply.text.count("\n") == 1
        assert served.files() == []
        assert served.queue.counts() == (0, 0, 0)
