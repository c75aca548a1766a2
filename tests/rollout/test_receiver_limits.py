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
from external_rows import LIMITS, Served, make_row

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
    url = httpx.URL(served.receiver.url)
    connection = socket.create_connection((url.host, url.port), timeout=20)
    connection.sendall(text)
    return connection


def closed_after(connection):
    """Returns the seconds until the server closes the connection, and what it sent before."""
    began, sent = time.monotonic(), b""
    with connection, contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            sent += part
    return time.monotonic() - began, sent


HEAD = b"POST /trajectories HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HALF = {
    "nothing": b"",
    "half a head": b"GET /policy HTTP/1.1\r\n",
    "half a body": HEAD + b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Length: 100\r\n\r\n{",
    "half a body without the key": HEAD + b"Content-Length: 100\r\n\r\n{",
    "the body of no route": HEAD.replace(b"trajectories", b"nothing") + b"Content-Length: 100\r\n\r\n{",
}


@pytest.mark.parametrize("text", HALF.values(), ids=HALF.keys())
def test_half_a_request_is_closed(guarded, text):
    seconds, _ = closed_after(connect(guarded, text))
    assert 0.3 < seconds < 8


def test_half_a_second_request_is_closed(guarded):
    connection = connect(guarded, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert connection.recv(1000).endswith(b"ok\n")
    connection.sendall(b"GET /he")
    assert closed_after(connection)[0] < 4


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
from external_rows import Served
with Served(Path(tempfile.mkdtemp()) / "spool") as served:
    print(served.receiver.url, flush=True)
    sys.stdin.readline()
    print(len([open("/dev/null") for _ in range(100)]), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("half", ["half a head", "half a body"])
def test_strangers_do_not_take_the_files_of_the_process(half):
    """300 half requests meet a process that may open 200 files. It still opens 100, and answers."""
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        url = httpx.URL(server.stdout.readline().strip())

        def hold(_):
            connection = socket.create_connection((url.host, url.port), timeout=30)
            connection.sendall(HALF[half])
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
from external_rows import LIMITS, rubbish
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
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *said, mebibytes = done.stdout.splitlines()
    assert len(said) == 8
    assert all(line.startswith("POST: ") for line in said)
    assert int(mebibytes) < 130


@pytest.mark.parametrize("kind", ["application/json", "application/msgpack", "application/jsonl"])
def test_the_rows_of_a_request_are_bounded(kind):
    row = make_row("a", 1)
    bodies = {
        "application/json": lambda count: json.dumps([row] * count).encode(),
        "application/msgpack": lambda count: msgspec.msgpack.encode([row] * count),
        "application/jsonl": lambda count: (json.dumps(row).encode() + b"\n") * count,
    }
    read = make_reader(LIMITS)
    assert len(read(bodies[kind](1000), kind)) == 1000
    with pytest.raises(ValueError, match=f"{MOST_ROWS}"):
        read(bodies[kind](MOST_ROWS + 1), kind)


def read_one(text):
    ((_, row),) = make_reader(LIMITS)(text.encode(), "application/json")
    return row


def test_the_numbers_that_python_writes_are_read():
    """NaN is no JSON, but Python writes it for a failed reward, and in columns that nobody reads."""
    row = make_row(
        "NaN", math.nan, note='"NaN" \\', metrics={"x": math.nan, "y": -math.inf}, logprobs=[-1, math.nan, -1]
    )
    found = read_one(json.dumps(row))
    assert (found.group, found.reward, found.logprobs) == ("NaN", None, [-1, None, -1])
    assert read_one(json.dumps(make_row("a", math.inf))).reward == 1e308


WITHOUT_MASK = {key: value for key, value in make_row("a", 1).items() if key != "mask"}
REFUSED = {
    "POST: Expected `float | null`, got `str` - at `$[1].logprobs[1]`": [
        make_row("a", 1),
        make_row("a", 1, logprobs=[-1, "x", -1]),
    ],
    "POST: lacks mask (or turns) - at `$[0]`": [WITHOUT_MASK],
    "POST: Expected `object`, got `int` - at `$[1]`": [make_row("a", 1), 3],
    "POST: Expected `int | str`, got `array` - at `$.group`": make_row(["a"], 1),
    "POST: row 1: version is 1, but the newest policy of the run is 0": [make_row("a", 1, version=1)],
    "POST: the request has no row": [],
}


def test_what_is_wrong_is_named_and_not_kept(tmp_path):
    forms = (("application/json", json.dumps), ("application/msgpack", msgspec.msgpack.encode))
    sent = [(kind, write(rows), said) for said, rows in REFUSED.items() for kind, write in forms]
    sent += [("application/json", body, "POST: ") for body in (b"{", b"\xff", b'[{"group": ' + b"[" * 100_000)]
    with Served(tmp_path / "spool") as served:
        for kind, body, said in sent:
            reply = served.client.post("/trajectories", content=body, headers={"content-type": kind})
            assert reply.status_code == 400
            assert reply.text.startswith(said)
            assert reply.text.count("\n") == 1
        assert served.files() == []
        assert served.queue.counts() == (0, 0, 0)
