"""Two real SGLang servers with a key: access, weights over HTTP, and servers that join, leave, die and return."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from sglang_policy import PROMPTS, START_S, Policy, config_of
from vllm_processes import kill_server

from rljax.errors import HandshakeError
from rljax.rollout.servers.process import ServerProcess
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.sglang.server import start
from rljax.rollout.types import SamplingParams
from rljax.weights.publish_config import PublishConfig

pytestmark = pytest.mark.sglang
LONGEST_S = 120


@dataclasses.dataclass
class Pair:
    """A pair of servers and their policy; ``key`` is the key file with which both were started."""

    policy: Policy
    key: Path
    servers: list[ServerProcess]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def kill_and_restart(self) -> None:
        """Kills the first server and restarts it on its port."""
        kill_server(server := self.servers[0])
        where = {"port": server.port, "log_path": server.log_path.with_name("restarted.log")}
        self.servers[0] = start(dataclasses.replace(server.config, **where), START_S)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, toy_base):
    folder = tmp_path_factory.mktemp("sglang")
    key = folder / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    key.chmod(0o600)
    # Fewer responses run at once than are requested, so some have not begun when the first are complete.
    options = {"max_num_seqs": 16, "api_key_file": key}
    configs = [config_of(toy_base, "float32", folder / f"server{i}.log", **options) for i in range(2)]
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as stack:
        servers = list(threads.map(lambda each: start(each, START_S), configs))
        found = Pair(Policy.read(toy_base, "float32"), key, servers)
        stack.callback(lambda: [server.stop() for server in found.servers])
        yield found


@pytest.fixture
def engine_of(pair):
    """Yields a function that builds engines with the key and version 0 published, and closes them afterwards."""
    engines = []

    def build(*urls, **options):
        engines.append(pair.policy.engine(*urls, **{"api_key_file": str(pair.key)} | options))
        build.first = engines[-1].publish(pair.policy.params, 0)
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def test_every_route_but_health_wants_the_key(pair, engine_of, tmp_path, monkeypatch):
    url, key = pair.urls[0], pair.key.read_text().strip()
    with httpx.Client(base_url=url, trust_env=False) as client:
        routes = client.get("/openapi.json", headers={"Authorization": f"Bearer {key}"}).json()["paths"]
        assert {"/generate", "/update_weights_from_disk", "/weights_checker"} <= routes.keys()
        asked = [(method, path) for path, methods in routes.items() for method in methods]
        asked.append(("get", "/openapi.json"))
        for headers in ({}, {"Authorization": "Bearer 0123456789abcdef"}):
            given = {path for way, path in asked if client.request(way, path, headers=headers).status_code != 401}
            assert given == {"/health"}
    other = tmp_path / "other"
    other.write_text("fedcba9876543210")
    other.chmod(0o600)
    for file in (None, str(other)):
        with pytest.raises(HandshakeError, match="answered 401"):
            engine_of(url, api_key_file=file)
    monkeypatch.setenv("RLJAX_API_KEY_FILE", str(pair.key))
    engine = engine_of(url, api_key_file=None)
    assert len(list(engine.generate(PROMPTS, 1, SamplingParams(4), seed=0))) == 3


def test_both_servers_pull_what_changed_over_http(pair, engine_of):
    """A version in which one tensor changed is a delta of this tensor. Both servers prove that they hold it."""
    engine = engine_of(*pair.urls, publish=PublishConfig(store="http"))
    whole = engine_of.first
    assert whole["publish/pulled_bytes"] == whole["publish/bytes"] > 0
    params = pair.policy.params
    for version in range(1, 4):
        params = params | {"final_norm": {"scale": params["final_norm"]["scale"] * (1 + 0.2 * version)}}
        metrics = engine.publish(params, version)
        assert metrics["rollout/servers"] == 2
        assert metrics["publish/verified_tensors"] == 24
        assert metrics["publish/pulled_bytes"] == metrics["publish/bytes"] < whole["publish/bytes"] / 5
    responses = list(engine.generate(PROMPTS, 8, SamplingParams(24), seed=0))
    assert all(response["version"].tolist() == [3] * 24 for response in responses)
    assert pair.policy.gaps(params, responses).max() < 2e-5


def test_servers_join_and_leave_while_responses_are_sampled(pair, engine_of, tmp_path):
    listed = tmp_path / "servers"
    listed.write_text(f"{pair.urls[0]}\n")
    engine = engine_of(discovery=str(listed))
    assert engine.fleet.opened() == pair.urls[:1]
    params = pair.policy.moved(3)
    engine.publish(params, 1)
    responses = []

    def sample_until(opened) -> None:
        until = time.monotonic() + LONGEST_S
        while engine.fleet.opened() != opened:
            assert time.monotonic() < until, (engine.fleet.opened(), engine.fleet.down())
            responses.extend(engine.generate(PROMPTS, 8, SamplingParams(60), seed=len(responses)))

    for wanted in (pair.urls, pair.urls[1:]):
        listed.write_text("\n".join(wanted))
        sample_until(wanted)
    responses += engine.generate(PROMPTS, 8, SamplingParams(60), seed=0)
    metrics = engine.fleet.report()
    assert [metrics[f"rollout/servers_{what}"] for what in ("joined", "left", "brought_back")] == [1, 1, 1]
    assert "rollout/servers_rejected" not in metrics
    assert all(response["version"].tolist() == [1] * 60 for response in responses)
    assert pair.policy.gaps(params, responses).max() < 2e-5


def test_responses_of_a_killed_server_are_sampled_elsewhere(pair, engine_of):
    engine = engine_of(*pair.urls, publish=PublishConfig(store="http"))
    lost = pair.urls[0]
    params = pair.policy.moved(7)
    engine.publish(params, 1)
    restarting = threading.Thread(target=pair.kill_and_restart)
    try:
        stream = iter(samples := engine.generate(PROMPTS, 32, SamplingParams(120), seed=0))
        responses = [next(stream)]
        restarting.start()
        responses += stream
        metrics = engine.fleet.report() | samples.metrics
        assert len({(r.prompt_index, r.sample_index) for r in responses}) == len(responses) == 96
        assert metrics["rollout/server_losses"] == 1
        assert metrics["rollout/retries"] > 0
        assert engine.fleet.opened() == pair.urls[1:]
        until = time.monotonic() + START_S
        while "rollout/servers_brought_back" not in metrics:
            assert time.monotonic() < until, engine.fleet.down()
            responses += engine.generate(PROMPTS, 1, SamplingParams(120), seed=1)
            metrics = engine.fleet.report()
    finally:
        restarting.join()
    assert engine.fleet.opened() == pair.urls
    assert metrics["publish/verify_abs_diff_mean"] < 1e-5
    assert all(response["version"].tolist() == [1] * 120 for response in responses)
    assert pair.policy.gaps(params, responses).max() < 2e-5
    request = Request(PROMPTS[0], SamplingParams(24), seed=0)
    (completion,) = engine.fleet.wait(engine.fleet.server(lost).sample([request]))
    (scored,) = pair.policy.scorer()(params, [np.concatenate([PROMPTS[0], completion.response])])
    np.testing.assert_allclose(completion["rollout_logprobs"], scored[-24:], atol=2e-5)
