"""``rljax accept`` beside real vLLM servers: clean pairs pass, and each planted fault fails the check for it."""

import json
import shutil
import threading

import pytest
from opened_clients import call
from vllm_checks import rpc, sabotaged

from rljax.commands import accept, check_server
from tests.integration.conftest import Model, Served, accepted, failed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.harness]


@pytest.fixture(autouse=True)
def _short_watch(monkeypatch):
    monkeypatch.setattr(check_server, "QUIET_S", 0.5)


@pytest.fixture(scope="module")
def toy(toy_base, start_server):
    """A server of the practised toy base, whose weights are the first ones before and after each test."""
    model = Model(toy_base, *[None] * 3)
    with start_server(model, "bfloat16") as server:
        yield Served(server, model, "bfloat16")


def test_a_clean_pair_passes_and_passed_checks_are_kept(toy, tmp_path):
    status, checks, page = accepted(toy, tmp_path)
    assert (status, failed(checks)) == (0, []), page
    assert list(checks) == [*accept.CHECKS, accept.PUT_BACK]
    document = json.loads((tmp_path / "accept.json").read_text())
    document["checks"]["tokens"]["status"] = "FAIL"
    (tmp_path / "accept.json").write_text(json.dumps(document))
    status, again, _ = accepted(toy, tmp_path)
    assert status == 0
    assert {name for name in again if again[name] != checks[name]} == {"tokens"}
    status, other, _ = accepted(toy, tmp_path, "--bar", "1e-9")  # another subject: all are made, and the bar is crossed
    assert (status, failed(other)) == (1, ["log-probabilities"])
    assert other["training"]["status"] == "SKIPPED"


# The fault in the worker, what takes it out unless it is usual, the check that fails, and words of its problem.
DROPPED = "model.layers.1.mlp.down_proj.weight"
WORKER_FAULTS = {
    "temperature": (["logits", "temperature", "1.1"], (), "log-probabilities", "a sharpened form"),
    "cut": (["logits", "cut", "3"], (), "log-probabilities", "gave a log-probability of -inf"),
    "rope": (["layers", "rope base"], (), "log-probabilities", "jax:bfloat16 / vllm:bfloat16"),
    "swapped": (["layers", "swapped"], (), "log-probabilities", "vllm-decode:bfloat16"),
    "head": (["head_dtype", "float32"], ("bfloat16",), "server", "the LM head computes in float32"),
    "dropped": (["load", "skip", DROPPED], (), "publish", DROPPED),
    "stale": (["load", "previous", ""], (), "publish", "tensors differ"),
}


@pytest.mark.parametrize("fault", WORKER_FAULTS)
def test_a_fault_of_the_worker_fails(toy, tmp_path, fault):
    (planted, *given), undo, check, words = WORKER_FAULTS[fault]
    rpc(toy, "sabotage_load", "off", "")
    if fault == "stale":  # the worker keeps the version of this publish
        assert accepted(toy, tmp_path / "before")[0] == 0
    with sabotaged(toy, planted, *given, undo=undo):
        status, checks, page = accepted(toy, tmp_path)
    assert status == 1
    assert failed(checks)[0] == check, page
    assert any(words in problem for problem in checks[check]["problems"]), page
    assert (check == "publish") == (accept.PUT_BACK in checks)
    status, checks, page = accepted(toy, tmp_path)  # the same command puts the first weights back, and goes on
    assert (status, failed(checks)) == (0, []), page


@pytest.mark.parametrize("during", ["start", "training"])
def test_other_requests_end_the_command(toy, tmp_path, during):
    """The server has another client, whose requests come at once, or while the run trains."""
    ended, rows = threading.Event(), tmp_path / "run/metrics.jsonl"
    body = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}

    def ask():
        while not ended.wait(0.1):
            if during == "start" or rows.exists():
                call(toy.url, "POST", "/inference/v1/generate", json=body)

    client = threading.Thread(target=ask)
    client.start()
    try:
        status, checks, page = accepted(toy, tmp_path, "--steps", "400")
    finally:
        ended.set()
        client.join()
    assert (status, failed(checks)) == (2, [])
    assert "answers requests of others" in page
    if during == "training":
        assert list(checks) == [*[name for name in accept.CHECKS if name != "training"], accept.PUT_BACK]
        assert checks[accept.PUT_BACK]["status"] == "PASS"
        assert rows.read_text().count("\n") < 400


def test_faults_of_a_servers_start_are_each_named(toy_base, start_server, tmp_path):
    """The files have another angle and tokenizer, and options an 8-bit cache and another end."""
    theirs = tmp_path / "theirs"
    shutil.copytree(toy_base, theirs)
    config = json.loads((theirs / "config.json").read_text())
    config["rope_theta"] = 500.0
    config["rope_parameters"]["rope_theta"] = 500.0
    (theirs / "config.json").write_text(json.dumps(config))
    tokenizer = (theirs / "tokenizer.json").read_text()
    assert '"1": 1' in tokenizer
    (theirs / "tokenizer.json").write_text(tokenizer.replace('"1": 1,', '"1": 2,').replace('"2": 2,', '"2": 1,'))
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling/generation_config.json").write_text('{"eos_token_id": 13}')
    more = ("--generation-config", str(tmp_path / "sampling"), "--kv-cache-dtype", "fp8_e5m2")
    model = Model(theirs, *[None] * 3)
    with start_server(model, "bfloat16", more=more) as server:
        status, checks, page = accepted(Served(server, model, "bfloat16"), tmp_path / "out", model=toy_base)
    assert status == 1
    assert failed(checks) == ["server", "tokens", "log-probabilities"], page
    wanted = ["form of the cache is fp8_e5m2", "rope_parameters"]
    said = " ".join(checks["server"]["problems"])
    assert all(words in said for words in wanted), said
    wanted = ["the server ends a response at [13], the model at [14]", "the server has another tokenizer"]
    assert checks["tokens"]["problems"] == wanted
    assert {checks[name]["status"] for name in ("publish", "training")} == {"SKIPPED"}
