"""Weights over HTTP: the server's files and access, links that break, a server that ends, and who may read files."""

import contextlib
import grp
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from rljax.weights.access import KEY_FILE
from rljax.weights.format import PROTOCOL, FileRecord
from rljax.weights.outlets import HttpOutlet
from rljax.weights.publish_config import PublishConfig
from rljax.weights.source import HttpSource, SourceError, open_source
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum
from rljax.weights.worker import WorkerWeights
from rljax.weights.writer import PartWriter, whole_parts


def server_at(url):
    """Returns the id of the process that serves the weights at a URL on this machine, besides those that started it."""
    port = int(url.rpartition(":")[2])
    holders = [one for one in psutil.process_iter() if _listens(one, port)]
    (server,) = {one.pid for one in holders} - {one.ppid() for one in holders}
    return server


def kill_server(url):
    server = server_at(url)
    os.kill(server, signal.SIGKILL)
    return server


def _listens(process, port):
    try:
        return (port, psutil.CONN_LISTEN) in [(one.laddr.port, one.status) for one in process.net_connections("tcp4")]
    except psutil.Error:  # it has ended, or belongs to another user
        return False


class CuttingProxy:
    """A proxy on a free port before a server on 127.0.0.1; it refuses connections unless it is ``open``.

    It cuts a connection after ``cut_after`` bytes of an answer; it counts ``cuts`` and the bytes that it ``passed``.
    """

    def __init__(self, url, cut_after):
        self._server = ("127.0.0.1", int(url.rpartition(":")[2]))
        self.open, self.cut_after, self.passed, self.cuts = True, cut_after, 0, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if self.open:
                    server = socket.create_connection(self._server)
                    for ends in ((client, server, False), (server, client, True)):
                        threading.Thread(target=self._forward, args=ends, daemon=True).start()
                else:
                    client.close()

    def _forward(self, source, target, limited):
        count = 0
        with contextlib.suppress(OSError):
            while content := source.recv(16_384):
                target.sendall(content)
                count += len(content)
                if limited:
                    self.passed += len(content)
                    if not self.open or count >= self.cut_after:
                        self.cuts += 1
                        break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def served(tmp_path):
    (tmp_path / "root").mkdir()
    with contextlib.ExitStack() as stack:

        def serve(key_file=None):
            outlet = HttpOutlet(tmp_path / "root", host="127.0.0.1", port=0, api_key_file=key_file)
            return stack.enter_context(contextlib.closing(outlet))

        yield serve


NAME = "v00000001-1/0-dense.safetensors"


@pytest.fixture
def content(tmp_path, served):
    """Returns the content of a file of 3 MB in a version's directory."""
    content = np.random.default_rng(0).bytes(3_000_000)
    (tmp_path / "root" / NAME).parent.mkdir(parents=True)
    (tmp_path / "root" / NAME).write_bytes(content)
    return content


def test_ranges_of_the_runs_files_and_nothing_else(tmp_path, served, content):
    """A page can send the header Origin, or a name of its own as the host, and a stranger the half of a request."""
    (tmp_path / "outside.txt").write_text("secret")
    (tmp_path / "root/owner.key").write_text("secret")
    url = httpx.URL(served().url)
    assert httpx.get(f"{url}/health").text == "ok\n"
    assert httpx.get(f"{url}/{NAME}").content == content
    part = httpx.get(f"{url}/{NAME}", headers={"Range": "bytes=1000-1999"})
    assert (part.status_code, part.content) == (206, content[1000:2000])
    outside = ("outside.txt", "../outside.txt", "%2e%2e/outside.txt")
    for name in (*outside, "owner.key", "v00000001-1", "", "v1-1/../owner.key"):
        assert httpx.get(f"{url}/{name}").status_code == 404, name
    assert httpx.post(f"{url}/{NAME}").status_code == 405
    for headers in ({"origin": "http://localhost"}, {"host": "rebound.example.org"}):
        assert httpx.get(f"{url}/{NAME}", headers=headers).status_code == 403
    with socket.create_connection((url.host, url.port), timeout=20) as half:
        began = time.monotonic()
        half.sendall(b"GET / HTTP/1.1\r\n")
        assert half.recv(1) == b""
        assert time.monotonic() - began < 15


def test_without_the_key_nothing_is_given(served, content, key_file, monkeypatch):
    files = served(key_file)
    assert httpx.get(f"{files.url}/{NAME}").status_code == 401
    with pytest.raises(SourceError, match="answered with status 401"):
        HttpSource(files.url).read(NAME)
    monkeypatch.setenv(KEY_FILE, str(key_file))
    assert HttpSource(files.url).read(NAME) == content
    files.close()  # a server that stays away is given up with its name
    began = time.monotonic()
    with pytest.raises(SourceError, match=rf"{files.url}/probe.txt sent no byte for 1 s: "):
        open_source(files.url, 1.0).read("probe.txt")
    assert time.monotonic() - began < 30


def test_a_link_that_breaks_goes_on_where_it_was(tmp_path, served, content, monkeypatch):
    """Each connection is cut after 100 kB, and no one is accepted for a second; no byte is asked for again."""
    monkeypatch.setattr("rljax.weights.source.RANGE_BYTES", 1_000_000)
    proxy = CuttingProxy(served().url, cut_after=100_000)
    with contextlib.closing(proxy), ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(HttpSource(proxy.url).fetch, NAME, FileRecord(len(content), ""), tmp_path)
        while proxy.passed < 200_000:
            time.sleep(0.001)
        proxy.open = False
        time.sleep(1.0)
        assert not fetching.done()
        proxy.open = True
        assert fetching.result(60).read_bytes() == content
    assert proxy.cuts >= 24
    assert proxy.passed < 1.3 * len(content)


def test_a_shown_trainer_leaves_no_connection_in_the_worker(tmp_path):
    files = WeightDirectory(PublishConfig(store="http"), tmp_path)
    with contextlib.closing(files):
        path, text = files.probe()
        before, weights = len(os.listdir("/proc/self/fd")), WorkerWeights()
        weights.show(str(path), text, PROTOCOL, files.source)
        assert weights.pulls.source == files.source
        weights.pulls.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_killed_server_is_replaced_or_the_publish_fails(tmp_path, caplog, key_file, monkeypatch):
    monkeypatch.setenv(KEY_FILE, str(key_file))
    (tmp_path / "probe.txt").write_text("seen")
    with contextlib.closing(HttpOutlet(tmp_path, host="127.0.0.1", port=0, api_key_file=key_file)) as files:
        killed, source = kill_server(files.url), open_source(files.url)
        assert source.read("probe.txt") == b"seen"
        assert server_at(files.url) != killed
        files.add(tmp_path, "run")
        key_file.unlink()
        kill_server(files.url)
        with pytest.raises(OSError, match=r"a server of weights cannot be started: the key file \S+ cannot be read"):
            repeat(lambda: files.add(tmp_path, "run"))
    assert f"the server of weights at {files.url} died (exit status -9)" in caplog.text


def test_the_server_ends_with_the_run(tmp_path):
    words = "import sys; from pathlib import Path; from rljax.weights.outlets import HttpOutlet\n"
    words += "print(HttpOutlet(Path(sys.argv[1]), host='127.0.0.1', port=0, api_key_file=None).url, flush=True)\n"
    words += "sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", words, str(tmp_path)], stdin=pipe, stdout=pipe, text=True) as run:
        url = run.stdout.readline().strip()
        assert httpx.get(f"{url}/health").status_code == 200
        run.kill()
    with pytest.raises(httpx.TransportError):
        repeat(lambda: httpx.get(f"{url}/health", timeout=20))


def repeat(call):
    """Calls a function until it raises an error, for at most 30 seconds."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        call()
        time.sleep(0.05)


# ---- the modes of the files under every umask, and another user who tries ----

OWN_GROUP = grp.getgrgid(os.getgid()).gr_name
MODES = {"owner": (0o700, 0o600), f"group:{OWN_GROUP}": (0o750, 0o640), "all": (0o755, 0o644)}


def publish(parent, store, readable_by):
    """Writes the probe and two versions, of which the second is a delta unless the store is shared."""
    writer = None if store == "shared" else PartWriter(whole_parts)
    files = WeightDirectory(PublishConfig(store=store, readable_by=readable_by), parent, writer=writer)
    files.probe()
    weights = np.arange(4096, dtype=np.float32)
    for version in range(2):
        files.write([("w", weights)], version, {"w": array_checksum(weights)})
        weights = weights.copy()
        weights[7] += 1
    return files


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("store", ["shared", "http"])
@pytest.mark.parametrize("readable_by", MODES)
def test_exactly_the_named_users_may_read(tmp_path, readable_by, store, umask):
    before = os.umask(umask)
    try:
        with contextlib.closing(publish(tmp_path, store, readable_by)) as files:
            found = {path: stat.S_IMODE(path.stat().st_mode) for path in (files.root, *files.root.rglob("*"))}
            for path, mode in found.items():
                assert mode == MODES[readable_by][not path.is_dir()], path
            names = " ".join(path.name for path in found)
            assert ("delta" in names) == (store != "shared")
            assert len(found) >= 8
    finally:
        os.umask(before)


def test_nobody_else_writes_into_a_version(tmp_path):
    modes, weights = [], np.ones(4, np.float32)

    def tensors(root):
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in root.glob("v*"))
        yield "w", weights

    before = os.umask(0)
    try:
        with contextlib.closing(WeightDirectory(PublishConfig(readable_by="all"), tmp_path)) as files:
            files.write(tensors(files.root), 0, {"w": array_checksum(weights)})
    finally:
        os.umask(before)
    assert modes == [0o700]
    for value in ("", "group", "group:", "everybody", "owner:me", "all:x", "Owner"):
        with pytest.raises(ValueError, match="readable_by must be owner, group:NAME or all, got"):
            PublishConfig(readable_by=value)
    with pytest.raises(ValueError, match=r"publish.readable_by: this machine has no group 'no-such-group'"):
        publish(tmp_path, "shared", "group:no-such-group")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(("readable_by", "may_read"), [("owner", False), ("group:nogroup", True), ("all", True)])
def test_another_user(readable_by, may_read):
    """A process of the user nobody, whose only group is nogroup, reads the newest version, or cannot."""
    if "nogroup" not in {group.gr_name for group in grp.getgrall()}:
        pytest.skip("this machine has no group nogroup")
    as_nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    with contextlib.closing(publish(Path("/dev/shm"), "shared", readable_by)) as files:
        for path in files.root.glob("v*/*"):
            done = subprocess.run(["cat", str(path)], **as_nobody, capture_output=True)
            assert (done.returncode == 0) == may_read, done.stderr
            assert done.stdout == (path.read_bytes() if may_read else b"")
