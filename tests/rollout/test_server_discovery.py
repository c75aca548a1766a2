"""Tests of stand-in servers that join and leave during a run, and of the places that list servers."""

import contextlib
import socket
import threading
import time

import pytest
from served_engines import PARAMS, PROMPTS, make, published
from vllm_fake import FakeVllm
from waiting import until

from rljax.errors import HandshakeError
from rljax.rollout.servers.discovery import Discovery, make_lookup
from rljax.rollout.servers.http import check_url
from rljax.rollout.servers.vllm.client import GENERATE
from rljax.rollout.types import ClientLimits, SamplingParams


@pytest.fixture
def fakes(another):
    return lambda count: [another() for _ in range(count)]


def write(path, *fakes: FakeVllm) -> None:
    new = path.with_suffix(".new")
    new.write_text("# servers\n" + "".join(f"{each.url}/  # one\n\n" for each in fakes))
    new.rename(path)


def test_a_file_a_directory_and_a_name_list_servers(tmp_path, monkeypatch):
    """The name of this machine is resolved, and then one whose addresses are planted."""
    file = tmp_path / "servers"
    file.write_text("# all of them\nhttp://a:1\n\n  http://b:2/ # the second\n")
    assert make_lookup(str(file))() == ("http://a:1", "http://b:2/")
    for name, text in (("2.url", "http://b:2\n"), ("1.url", "http://a:1\n"), ("1.log", "http://c:3\n")):
        (tmp_path / name).write_text(text)
    assert make_lookup(str(tmp_path))() == ("http://a:1", "http://b:2")
    assert "http://127.0.0.1:81" in make_lookup("dns://localhost:81")()
    addresses = [("10.0.0.9", 8000), ("fd00::1", 8000, 0, 0), ("10.0.0.10", 8000)]
    found = [(socket.AF_INET6 if address[2:] else socket.AF_INET, 1, 6, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: found if host == "servers.run.svc" else [])
    expected = ("http://10.0.0.10:8000", "http://10.0.0.9:8000", "http://[fd00::1]:8000")
    assert make_lookup("dns://servers.run.svc:8000")() == expected
    for where in ("", "dns://servers", "dns://:80", "http://a:1", "dns://a:1/path", "s3://a:1"):
        with pytest.raises(ValueError, match=r"rollout\.discovery must be a"):
            make_lookup(where)


def test_a_list_counts_once_it_has_been_seen_twice(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("rljax.rollout.servers.discovery.LOOK_EVERY_S", 0.02)
    file, both = tmp_path / "servers", ("http://a:1", "http://b:2")
    file.write_text("http://a:1\nhttp://a:1/\n")
    with contextlib.closing(Discovery(str(file), check_url)) as found:
        until(lambda: found.urls == ("http://a:1",))
        file.write_text("http://a:1\nhttp://b:2\n")
        until(lambda: found.urls == both)
        for text in ("http://user:secret@c:3\n", "not a URL\n"):
            file.write_text(text)
            time.sleep(0.1)
            assert found.urls == both
        file.unlink()
        until(lambda: "does not list servers, those known are kept" in caplog.text and "No such file" in caplog.text)
        assert found.urls == both
        assert "secret" not in caplog.text
        file.write_text("")
        until(lambda: found.urls == ())


@pytest.mark.slow
def test_servers_join_and_leave_in_the_middle_of_a_rollout(fakes, tmp_path):
    """The server that joins gets the current weights and is verified first. When the other leaves, nothing is lost."""
    first, second = fakes(2)
    file = tmp_path / "servers"
    write(file, first)
    limits = ClientLimits(max_outstanding=2)
    with published(discovery=str(file), limits=limits) as engine:
        first.delay_s = second.delay_s = 0.05
        places, of_first = [], 0
        for response in engine.generate(PROMPTS, 60, SamplingParams(2), seed=0):
            places.append((response.prompt_index, response.sample_index))
            if len(places) == 20:
                write(file, first, second)
                until(lambda: engine.fleet.discovery.urls == (first.url, second.url))
            if second.seen[GENERATE] > 20 and not of_first:
                write(file, second)
                until(lambda: engine.fleet.discovery.urls == (second.url,))
                of_first = first.seen[GENERATE]
        assert sorted(places) == [(i, j) for i in range(2) for j in range(60)]
        assert 0 < of_first <= first.seen[GENERATE] < of_first + 20
        assert second.version == engine.files.tag(0)
        assert engine.fleet.opened() == [second.url]
        metrics = engine.fleet.report()
        assert (metrics["rollout/servers_joined"], metrics["rollout/servers_left"]) == (1, 1)
        assert (metrics["rollout/servers"], metrics["rollout/server_losses"]) == (1, 0)
        engine.publish(PARAMS, 1)
        assert (first.version, second.version) == (engine.files.tag(0), engine.files.tag(1))


def test_a_publish_takes_in_the_servers_that_are_listed_by_then(fakes, tmp_path):
    """A launcher can list servers for a configuration that names other ones. Then only the listed servers are used."""
    named, *servers = fakes(4)
    write(tmp_path / "servers", servers[0])
    with published(named.url, discovery=str(tmp_path / "servers")) as engine:
        write(tmp_path / "servers", *servers[1:])
        until(lambda: len(engine.fleet.discovery.urls) == 2)
        engine.publish(PARAMS, 1)
        assert engine.fleet.opened() == [each.url for each in servers[1:]]
        assert [each.version for each in servers] == [engine.files.tag(version) for version in (0, 1, 1)]
        assert len(list(engine.generate(PROMPTS, 2, SamplingParams(1), seed=0))) == 4
    assert not named.seen


def test_a_run_waits_for_the_first_server_to_be_listed(fakes, tmp_path, caplog):
    """A listed server that does not fit is named."""
    good, other = fakes(2)
    other.dtype = "bfloat16"
    servers = {"discovery": str(tmp_path / "servers")}
    (tmp_path / "servers").write_text("")
    threading.Timer(0.3, lambda: write(tmp_path / "servers", good, other)).start()
    with published(**servers) as engine:
        assert f"waiting for a vLLM server, 0 s of at most 10 s ({tmp_path}/servers lists none)" in caplog.text
        assert engine.fleet.opened() == [good.url]
        assert "the dtype is bfloat16, expected float32" in caplog.text
        assert other.seen[GENERATE] == 0
    write(tmp_path / "servers", other)
    with pytest.raises(HandshakeError, match="the dtype is bfloat16, expected float32"):
        make(**servers)
    with pytest.raises(RuntimeError, match=r"no vLLM server came back within 0.2 s: .*nowhere lists none"):
        make(discovery=str(tmp_path / "nowhere"), server_wait_s=0.2)


def test_servers_are_verified_side_by_side(fakes):
    """Each reply takes half a second. A publish to eight servers takes about the time of one."""
    servers, took = fakes(8), []
    for count in (1, 8):
        with published(*(each.url for each in servers[:count])) as engine:
            for each in servers:
                each.delay_s = 0.5
            began = time.monotonic()
            engine.publish(PARAMS | {"a": PARAMS["a"] + 1}, 1)
            took.append(time.monotonic() - began)
            assert len(engine.fleet.opened()) == count
        for each in servers:
            each.delay_s = 0.0
    assert took[1] < 3 * took[0]


@contextlib.contextmanager
def held(server, path, tag=None):
    """Yields an event until which ``server`` does not answer at ``path``. With ``tag``: for this version alone."""
    answer, over = server.answer, threading.Event()

    def waits(method, asked, body):
        if asked == path and tag in (None, body.get("update_info", {}).get("tag")):
            over.wait(30)
        return answer(method, asked, body)

    server.answer = waits
    try:
        yield over
    finally:
        over.set()


@contextlib.contextmanager
def pair(fakes, **settings):
    """Yields an engine that has published to two servers, and the servers."""
    quick, slow = fakes(2)
    with published(quick.url, slow.url, **settings) as engine:
        yield engine, quick, slow


@contextlib.contextmanager
def recovering(fakes, **settings):
    """Yields what ``pair`` yields, and the event until which the second server is being recovered for version 0."""
    with pair(fakes, **settings) as (engine, quick, slow), held(slow, "/update_weights", engine.files.tag(0)) as over:
        slow.version = "another"
        list(engine.generate(PROMPTS, 1, SamplingParams(1), seed=0))
        until(lambda: engine.fleet.recover() or slow.seen["/start_weight_update"] == 2)
        yield engine, quick, slow, over


def test_a_slow_recovery_delays_no_rollout(fakes):
    with pair(fakes) as (engine, quick, slow), held(slow, "/update_weights") as over:
        slow.version = "another"
        began = time.monotonic()
        assert len(list(engine.generate(PROMPTS, 100, SamplingParams(2), seed=0))) == 200
        assert time.monotonic() - began < 15
        assert engine.fleet.opened() == [quick.url]
        over.set()
        until(lambda: not engine.fleet.busy())
        assert len(list(engine.generate(PROMPTS, 100, SamplingParams(2), seed=0))) == 200
        # If the first rollout ended before the slow server was asked, the server is being recovered only now.
        until(lambda: engine.fleet.recover() or set(engine.fleet.opened()) == {quick.url, slow.url})


def test_what_was_recovered_for_older_weights_is_not_opened(fakes):
    """A publish comes while a server is being recovered, so the server is proven once more, for the new version."""
    with recovering(fakes) as (engine, quick, slow, over):
        engine.publish(PARAMS, 1)
        assert engine.fleet.opened() == [quick.url]
        over.set()
        until(lambda: not engine.fleet.busy())
        engine.fleet.judge()
        assert engine.fleet.opened() == [quick.url]
        until(lambda: engine.fleet.recover() or slow.url in engine.fleet.opened())
        assert slow.version == engine.files.tag(1)


def test_no_proof_is_judged_by_a_policy_that_is_gone(fakes):
    """A server is recovered while the trainer trains, and so reuses the buffers of the policy before."""
    gone = threading.Event()

    def shift():
        if gone.is_set():
            raise RuntimeError("Array has been deleted")
        return 0.0

    with recovering(fakes, score_shift=shift) as (engine, quick, slow, over):
        over.set()
        until(lambda: not engine.fleet.busy())
        gone.set()
        engine.prepare(PARAMS, 1)
        gone.clear()
        assert "rollout/servers_rejected" not in engine.publish(PARAMS, 1)
        assert engine.fleet.opened() == [quick.url, slow.url]


@pytest.mark.parametrize("path", ["/collective_rpc", pytest.param("/start_weight_update", marks=pytest.mark.harness)])
def test_a_publish_waits_for_a_straggler_for_a_while(fakes, path, monkeypatch):
    """A server that hangs in its update or in its proof is left out. It is opened once it is ready."""
    monkeypatch.setattr("rljax.rollout.servers.engine.STRAGGLER_S", 1.0)
    with pair(fakes) as (engine, quick, slow), held(slow, path) as over:
        began = time.monotonic()
        engine.publish(PARAMS, 1)
        assert 1.0 < time.monotonic() - began < 15
        assert engine.fleet.opened() == [quick.url]
        engine.publish(PARAMS, 2)
        assert engine.fleet.opened() == [quick.url]
        over.set()
        until(lambda: engine.fleet.recover() or slow.url in engine.fleet.opened())
        assert slow.version == engine.files.tag(2)
        assert len(list(engine.generate(PROMPTS, 4, SamplingParams(2), seed=0))) == 8
