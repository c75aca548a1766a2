"""Access to a server is restricted: its address, a key on every route, and a key that is shown nowhere."""

import asyncio
import itertools
import logging
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from served_engines import PARAMS, PROMPTS
from served_engines import make as engine_of

from rljax.commands.serve import serve
from rljax.compare.scorers import score_column
from rljax.errors import HandshakeError, ServerRefusedError
from rljax.record.token_dumps import make_dump
from rljax.rollout.build import connect
from rljax.rollout.servers.process import ServerProcess
from rljax.rollout.servers.vllm import server
from rljax.rollout.servers.vllm.server import VllmConfig
from rljax.rollout.types import SamplingParams
from rljax.weights.access import KEY_FILE, RequireKey, find_key_file, read_api_key

KEY = "0123456789abcdef-a-key"
OTHER = "another-key-of-some-length"


@pytest.fixture
def fake(fake):
    fake.key = KEY
    return fake


def status_of(path="/update_weights", kind="http", headers=()):
    """Returns what the middleware sends, in front of an application that answers 200 to everything."""
    sent = []

    async def application(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "method": "POST", "headers": list(headers)}
    asyncio.run(RequireKey(application)(scope, None, send))
    return sent[0].get("status") or sent[0]["type"]


def bearer(text):
    return (b"authorization", b"Bearer " + text.encode())


def test_every_route_but_health_wants_the_key(key_file, monkeypatch):
    monkeypatch.delenv(KEY_FILE, raising=False)
    with pytest.raises(ValueError, match="key file"):
        RequireKey(None)
    monkeypatch.setenv(KEY_FILE, str(key_file))
    right, wrong = bearer(KEY), bearer(KEY[:-1])
    for path in ("/update_weights", "/v1/completions", "/inference/v1/generate", "/metrics", "/health/", "//health"):
        assert status_of(path) == status_of(path, headers=[wrong]) == 401
        assert status_of(path, headers=[right]) == 200
        assert status_of(path, headers=[(b"Authorization", right[1])]) == 200
    assert status_of(headers=[wrong, right]) == status_of(headers=[right, right]) == 401
    assert status_of(headers=[(b"authorization", KEY.encode())]) == 401
    assert status_of("/health") == 200
    assert status_of("", "lifespan") == 200
    assert status_of("/v1/realtime", "websocket") == "websocket.close"


def test_what_is_no_key_file_is_refused(tmp_path, make_key):
    for text, mode, said in (
        (KEY, 0o640, "others may read the key file .*: chmod 600 it"),
        (KEY, 0o604, "others may read the key file"),
        ("0123456789abcde", 0o600, "one word of at least 16 characters"),
        (KEY + "\n" + KEY, 0o600, "one word of at least 16"),
        ("schlüssel-schlüssel", 0o600, "more than plain ASCII"),
        (None, 0o600, "cannot be read: No such file"),
    ):
        path = tmp_path / "none" if text is None else make_key("key", text, mode)
        with pytest.raises(ValueError, match=said) as refused:
            read_api_key(path)
        assert not text or text not in str(refused.value)


def test_the_client_brings_the_key_on_every_path(fake, key_file, monkeypatch):
    sampling = SamplingParams(2)
    with closing(engine_of(fake.url, api_key_file=str(key_file))) as engine:
        engine.publish(PARAMS, 0)
        assert len(list(engine.generate(PROMPTS, 2, sampling, seed=0))) == 4
    with closing(connect([fake.url], api_key_file=str(key_file))) as model:
        assert len(list(model.generate(PROMPTS, 2, sampling, seed=0))) == 4
    monkeypatch.setenv(KEY_FILE, str(key_file))  # the tools have no option of their own
    vectors, _ = score_column(f"vllm:{fake.url}", make_dump(["x"], [[7, 8]], [[False, True]], {}))
    assert vectors[0][1] == np.float32(-0.125)


def test_the_client_finds_a_key_or_says_what_to_set(fake, key_file, make_key, monkeypatch, tmp_path, caplog):
    """``rljax serve`` makes ~/.rljax.key. A key that is named comes before it, and none is shown."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.delenv(KEY_FILE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    other = make_key("other", OTHER)
    for config in ({}, {"api_key_file": str(other)}):
        with pytest.raises(HandshakeError, match=r"answered 401: .*; name the server's key file in rollout") as ended:
            engine_of(fake.url, **config)
        assert "\n" not in str(ended.value)
        with pytest.raises((ServerRefusedError, ValueError), match="401"):
            connect([fake.url], **config)
    assert "httpcore" in caplog.text  # httpcore's debug lines name each step of a request
    assert not any(key in caplog.text + str(ended.value) for key in (KEY, OTHER))
    assert find_key_file(None) is None
    key_file.rename(tmp_path / "home/.rljax.key")
    connect([fake.url]).close()
    with pytest.raises((ServerRefusedError, ValueError), match="401"):
        connect([fake.url], api_key_file=str(other))
    monkeypatch.setenv(KEY_FILE, "/elsewhere")
    assert [str(find_key_file(path)) for path in (None, other)] == ["/elsewhere", str(other)]


def test_neither_command_line_nor_environment_holds_the_key(key_file, monkeypatch):
    monkeypatch.delenv(KEY_FILE, raising=False)
    config = VllmConfig("m", api_key_file=key_file)
    words = config.command(7, gpu=False)
    middleware = [after for word, after in itertools.pairwise(words) if word == "--middleware"]
    assert middleware[-1] == "rljax.weights.access.RequireKey"  # vLLM puts the last one outside all others
    settings = config.environment(gpu=False)
    assert settings[KEY_FILE] == str(key_file)
    assert KEY not in " ".join([*words, *settings.values(), repr(config)])
    monkeypatch.setenv(KEY_FILE, str(key_file))
    assert VllmConfig("m").api_key_file == key_file
    monkeypatch.delenv(KEY_FILE)
    assert "rljax.weights.access.RequireKey" not in VllmConfig("m").command(7, gpu=False)
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        assert VllmConfig("m", host=host, extra_args=("--x",)).command(7, gpu=False)[-2:] == ["--host", host]
    undoing = ("--host", "--host=0.0.0.0", "--api-key", "--api_key=x", "--trust-remote-code", "--trust_remote_code")
    for argument in undoing:
        with pytest.raises(ValueError, match="is not passed to vLLM"):
            VllmConfig("m", extra_args=(argument,))


PUBLIC = ["0.0.0.0", "::", "8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "::ffff:0.0.0.0", "255.255.255.255"]


@pytest.mark.parametrize("host", ["10.1.2.3", "192.168.0.9", "172.16.0.1", "fd00::1", "169.254.1.1", *PUBLIC])
def test_a_private_address_needs_a_key_a_public_one_is_refused(host, key_file, monkeypatch, caplog):
    monkeypatch.delenv(KEY_FILE, raising=False)
    said = f"host {host} is not loopback: others reach it, so it needs an api_key_file"
    if host in PUBLIC:
        said = f"host must be a loopback or private address, got {host}"
        with pytest.raises(ValueError, match="host must be a loopback or private address"):
            VllmConfig("m", host=host, api_key_file=key_file)
    else:
        assert VllmConfig("m", host=host, api_key_file=key_file).host == host
    assert serve(server, ["m", "--host", host]) == 2
    assert (len(caplog.records), said in caplog.text) == (1, True)


def test_a_server_on_loopback_has_a_key_by_default(monkeypatch, tmp_path, caplog, key_file):
    """The user's own key is made once. A key that is named comes before it, and another address needs one."""
    monkeypatch.delenv(KEY_FILE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = []

    def make(**options):
        asked.append(VllmConfig(**options).api_key_file)
        raise ValueError("that is all")

    make.kind = VllmConfig.kind

    def key_of(*words):
        assert serve(SimpleNamespace(CONFIG=make), ["m", *words]) == 2
        return asked.pop() if asked else None

    own = tmp_path / ".rljax.key"
    assert key_of("--api-key-file", str(key_file)) == key_file
    assert key_of("--host", "10.0.0.7") is None
    assert "host 10.0.0.7 is not loopback" in caplog.text
    assert not own.exists()
    assert key_of() == key_of("--host", "::1") == own
    made = read_api_key(own)
    assert (len(made), key_of(), read_api_key(own)) == (64, own, made)
    monkeypatch.setenv(KEY_FILE, str(key_file))
    assert key_of() == key_file
    monkeypatch.delenv(KEY_FILE)
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    assert key_of() is None
    assert "the server asks for no key, so every user of this machine reaches it" in caplog.text


def test_health_is_asked_past_any_proxy(fake, monkeypatch):
    """The environment names a proxy that refuses every connection."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ServerProcess.__new__(ServerProcess)
    server.url = fake.url
    assert server.healthy()
    fake.key = ""
    with closing(connect([fake.url])) as model:
        assert len(list(model.generate(PROMPTS, 1, SamplingParams(1), seed=0))) == 2
