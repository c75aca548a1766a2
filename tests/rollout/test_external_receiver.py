"""Trajectories over HTTP: acknowledged rows are on disk, and a full queue says so. Strangers may send anything."""

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
from external_rows import FACTS, LIMITS, Served, make_row
from waiting import until

from rljax.rollout.external import receiver as module
from rljax.rollout.external.receiver import MOST_ROWS, make_reader
from rljax.rollout.types import Response
from rljax.weights import http_limits

pytestmark = pytest.mark.timeout(120)
KEY = "k" * 32
JSON = {"content-type": "application/json"}


@pytest.fixture(params=[False, True], ids=["open", "with a key"])
def guarded(request, tmp_path, monkeypatch):
    """Yields a receiver, with a key and without one. A connection may keep it waiting for half a second."""
    monkeypatch.setattr(http_limits, "WAIT_S", 0.5)
    monkeypatch.setattr("rljax.rollout.external.receiver.WAIT_S", 0.5)
    monkeypatch.delenv("RLJAX_API_KEY_FILE", raising=False)
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
    """A second one is, too, and a body in drops, each of which comes long before its silence would end it."""
    second = connect(guarded, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert second.recv(1000).endswith(b"ok\n")
    second.sendall(b"GET /he")
    with ThreadPoolExecutor() as pool:
        took = list(pool.map(closed_after, [*(connect(guarded, text) for text in HALF.values()), second]))
    assert min(took[:-1]) > 0.3, took
    assert max(took) < 8, took
    began = time.monotonic()
    with connect(guarded, HALF["half a body"].replace(b"100\r", b"1000\r")) as connection, contextlib.suppress(OSError):
        while time.monotonic() - began < 10:
            connection.sendall(b" ")
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                assert connection.recv(100).startswith(b"HTTP/1.1 408")
                break
    assert time.monotonic() - began < 8


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


def test_strangers_do_not_take_the_files_of_the_process():
    """300 half requests meet a process that may open 200 files. It still opens 100, answers, and keeps rows."""
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
            assert httpx.post(f"{url}/trajectories", json=[make_row("a", 1)], timeout=8).status_code == 200
        server.stdin.close()
    assert server.returncode == 0


def test_web_pages_are_refused(guarded, tmp_path):
    """Names that point to this machine are refused, too. Where others reach the receiver, there must be a key."""
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
    assert guarded.post(*rows).status_code == guarded.client.get("/policy").status_code == (200 if is_open else 401)
    assert guarded.client.get("/health").status_code == 200
    assert guarded.post(*rows, **has_key).status_code == 200
    with pytest.raises(ValueError, match=r"rollout.trajectories: host .* is not loopback: others reach it, so rollout"):
        Served(tmp_path / "other", "http://10.0.0.7:0")


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
            assert reply.status_code == 400, said
            assert reply.text.startswith(f"POST: {said}")
            assert reply.text.count("\n") == 1
        assert served.files() == []
        assert served.queue.counts() == (0, 0, 0)


# ---- What is kept ----


@pytest.fixture
def served(tmp_path):
    with Served(tmp_path / "spool") as running:
        yield running


def test_an_answer_comes_once_the_rows_are_kept(served, monkeypatch):
    """The versions of all tokens are looked at once, when a row is read. The newest policy version is told."""
    reply = served.post(make_row("a", 1), make_row("a", 2))
    assert reply.status_code == 200
    assert reply.json() == {"rows": 2, "policy_version": 0, "waiting_groups": 1, "max_waiting_groups": 2} | FACTS
    (name,) = served.files()
    lines = [json.loads(line) for line in (served.spool / name).read_text().splitlines()]
    assert [line["reward"] for line in lines] == [1, 2]
    assert served.client.get("/policy").json()["policy_version"] == 0
    served.queue.expect(1)
    assert served.post(make_row("b", 1, version=1)).status_code == 200
    served.queue.publish(1)
    assert served.client.get("/policy").json()["policy_version"] == 1
    monkeypatch.delattr(Response, "versions")
    assert served.rewards() == [[1, 2]]


def test_rows_come_as_json_lines_and_msgpack(served):
    """A page of another origin may send the forms' types and none without asking, and so never rows."""

    def post(kind, body):
        return served.client.post("/trajectories", content=body, headers={} if kind is None else {"content-type": kind})

    one = json.dumps([make_row("a", 1)]).encode()
    for kind in ("text/csv", "text/plain", "application/x-www-form-urlencoded", None):
        assert post(kind, one).status_code == 415
        assert "must be one of application/json, application/jsonl" in post(kind, one).text
    assert served.queue.counts() == (0, 0, 0)
    lines = "\n".join(["", json.dumps(make_row("a", 1)), "", json.dumps(make_row("a", 2)), ""])
    kinds = {"application/x-ndjson": lines.encode(), "application/json": json.dumps(make_row("b", 3)).encode()}
    kinds["application/msgpack"] = msgspec.msgpack.encode([make_row("b", 4)])
    assert [post(*each).status_code for each in kinds.items()] == [200] * 3
    assert [served.rewards(), served.rewards()] == [[[1, 2]], [[3, 4]]]


def test_more_groups_than_may_wait_are_refused_for_good(served):
    """Two groups may wait, and three never can, not even their first rows. A lost first row takes no place."""
    for size in (1, 2):
        reply = served.post(*[make_row(name, i) for i in range(size) for name in "abc"])
        assert reply.status_code == 413
        assert "3 groups, and at most 2 may wait; send fewer at once" in reply.text
    assert served.queue.counts() == (0, 0, 0)
    assert served.post(make_row("lost", 1)).status_code == 200
    for group in "ab":
        assert served.post(make_row(group, 2), make_row(group, 3)).status_code == 200
    assert served.queue.counts() == (2, 0, 1)


def test_a_full_queue_takes_only_the_rest_of_groups(served):
    """Two complete groups and two incomplete ones may wait. Rows that complete a group are always accepted."""
    assert served.post(make_row("a", 1), make_row("a", 2)).status_code == 200
    assert served.post(make_row("b", 3), make_row("c", 4)).json()["waiting_groups"] == 1
    reply = served.post(make_row("d", 5))
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert served.post(make_row("b", 6), make_row("c", 7)).status_code == 200
    assert served.post(make_row("d", 5), make_row("d", 8)).status_code == 429
    assert len(served.files()) == 3
    assert served.rewards() == [[1, 2]]
    assert served.post(make_row("d", 5)).status_code == 200


def test_a_request_with_one_key_is_kept_once(tmp_path):
    """A server that starts again on the same files also keeps the request only once."""
    rows = [make_row("a", 1)]
    with Served(tmp_path / "spool") as first:
        assert [first.post(*rows, idempotency_key="one").status_code for _ in range(2)] == [200, 200]
        assert len(first.files()) == 1
    with Served(tmp_path / "spool") as second:
        assert second.post(*rows, idempotency_key="one").status_code == 200
        assert len(second.files()) == 1
        assert second.post(*rows, idempotency_key="two").status_code == 200
        assert second.queue.read_file()
        assert not second.queue.read_file()
        assert second.rewards() == [[1, 1]]


def test_used_files_are_deleted_and_their_keys_forgotten(served):
    rows = make_row("a", 1), make_row("a", 2)
    for step in (1, 2):
        served.post(*rows, idempotency_key=str(step))
        served.rewards(step)
    _first, second = served.files()
    served.receiver.delete_finished(1)
    assert served.files() == [second]
    assert list(served.queue.state_dict()["finished"]) == [second]
    kept = [served.post(*rows, idempotency_key=key) and len(served.files()) for key in "21"]
    assert kept == [1, 2]


def test_a_request_that_is_too_large_is_refused(served, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    for body in (json.dumps([make_row("a", 1)]).encode(), iter([b"x" * 99, b"x" * 2])):
        reply = served.client.post("/trajectories", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 413


def test_many_writers_lose_nothing(served):
    """Four threads send groups to a full queue, and one thread takes them."""

    def send(writer):
        for i in range(5):
            rows = [make_row(f"{writer}-{i}", 10 * writer + i, tokens=(3,)) for _ in range(2)]
            while served.post(*rows).status_code == 429:
                time.sleep(0.01)

    seen = []
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send, writer) for writer in range(4)]
        until(lambda: seen.extend(each[0] for each in served.rewards() or []) or len(seen) == 20, 30)
        [each.result() for each in sent]
    assert sorted(seen) == [10 * writer + i for writer in range(4) for i in range(5)]
