"""Tests of trajectories over HTTP: acknowledged rows are on disk, wrong rows are refused, and a full queue says so."""

import json
import time
from collections import Counter

import msgspec
import pytest
from external_rows import FACTS, Served, make_row

from rljax.rollout.external import receiver as module
from rljax.rollout.types import Response


@pytest.fixture
def served(tmp_path):
    with Served(tmp_path / "spool") as running:
        yield running


def test_an_answer_comes_once_the_rows_are_kept(served, monkeypatch):
    """The versions of all tokens are looked at once, when a row is read."""
    reply = served.post(make_row("a", 1), make_row("a", 2))
    assert reply.status_code == 200
    assert reply.json() == {"rows": 2, "policy_version": 0, "waiting_groups": 1, "max_waiting_groups": 2} | FACTS
    (name,) = served.files()
    lines = [json.loads(line) for line in (served.spool / name).read_text().splitlines()]
    assert [line["reward"] for line in lines] == [1, 2]
    monkeypatch.delattr(Response, "versions")
    assert served.rewards() == [[1, 2]]


def test_rows_come_as_json_lines_and_msgpack(served):
    lines = "\n".join(["", json.dumps(make_row("a", 1)), "", json.dumps(make_row("a", 2)), ""])
    kinds = {"application/x-ndjson": lines.encode(), "application/json": json.dumps(make_row("b", 3)).encode()}
    kinds["application/msgpack"] = msgspec.msgpack.encode([make_row("b", 4)])
    for kind, body in kinds.items():
        reply = served.client.post("/trajectories", content=body, headers={"content-type": kind})
        assert reply.status_code == 200, reply.text
    assert [served.rewards(), served.rewards()] == [[[1, 2]], [[3, 4]]]


@pytest.mark.parametrize("kind", ["text/csv", "text/plain", "application/x-www-form-urlencoded", None])
def test_a_content_type_is_demanded(served, kind):
    """A page of another origin may send the forms' types and none without asking, and so never rows."""
    body = json.dumps([make_row("a", 1)]).encode()
    reply = served.client.post("/trajectories", content=body, headers={} if kind is None else {"content-type": kind})
    assert reply.status_code == 415
    assert "must be one of application/json, application/jsonl" in reply.text
    assert served.queue.counts() == (0, 0, 0)


def test_more_groups_than_may_wait_are_refused_for_good(served):
    """Two groups of two rows may wait, and three never can, not even their first rows."""
    for size in (1, 2):
        reply = served.post(*[make_row(name, i) for i in range(size) for name in "abc"])
        assert reply.status_code == 413
        assert "3 groups, and at most 2 may wait; send fewer at once" in reply.text
    assert served.queue.counts() == (0, 0, 0)


def test_a_full_queue_takes_only_the_rest_of_groups(served):
    """Two complete groups and two incomplete ones may wait. Rows that complete a group are always accepted."""
    assert served.post(make_row("a", 1), make_row("a", 2)).status_code == 200
    assert served.post(make_row("b", 3), make_row("c", 4)).json()["waiting_groups"] == 1
    reply = served.post(make_row("d", 5))
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
    assert served.post(make_row("b", 6), make_row("c", 7)).status_code == 200
    assert served.post(make_row("d", 5), make_row("d", 8)).status_code == 429
    assert len(served.files()) == 3
    assert served.rewards() == [[1, 2]]
    assert served.post(make_row("d", 5)).status_code == 200


def test_a_group_that_is_never_complete_takes_no_place(served):
    assert served.post(make_row("lost", 1)).status_code == 200
    for group in "ab":
        assert served.post(make_row(group, 2), make_row(group, 3)).status_code == 200
    assert served.queue.counts() == (2, 0, 1)


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


def test_the_policy_version_is_told(served):
    assert served.client.get("/policy").json()["policy_version"] == 0
    served.queue.expect(1)
    assert served.post(make_row("a", 1, version=1)).status_code == 200
    served.queue.publish(1)
    assert served.client.get("/policy").json()["policy_version"] == 1


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
    assert served.post(make_row("a", 1)).status_code == 413

    def parts():
        yield b"x" * 99
        yield b"x" * 2

    kind = {"content-type": "application/json"}
    assert served.client.post("/trajectories", content=parts(), headers=kind).status_code == 413


def test_a_key_is_asked_for_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("RLJAX_API_KEY_FILE", raising=False)
    key = tmp_path / "key"
    key.write_text("k" * 32)
    key.chmod(0o600)
    with pytest.raises(ValueError, match=r"rollout.trajectories: host .* is not loopback: others reach it, so rollout"):
        Served(tmp_path / "spool", "http://10.0.0.7:0")
    with Served(tmp_path / "spool", api_key_file=str(key)) as served:
        assert served.post(make_row("a", 1)).status_code == 401
        assert served.client.get("/policy").status_code == 401
        assert served.client.get("/health").status_code == 200
        assert served.post(make_row("a", 1), authorization=f"Bearer {'k' * 32}").status_code == 200


def test_many_writers_lose_nothing(served):
    """Four threads send groups to a full queue, and one thread takes them."""
    from concurrent.futures import ThreadPoolExecutor

    def send(writer):
        for i in range(5):
            rows = [make_row(f"{writer}-{i}", 10 * writer + i, tokens=(3,)) for _ in range(2)]
            while served.post(*rows).status_code == 429:
                time.sleep(0.01)

    seen = Counter()
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send, writer) for writer in range(4)]
        deadline = time.monotonic() + 30
        while sum(seen.values()) < 20 and time.monotonic() < deadline:
            if found := served.rewards():
                seen[found[0][0]] += 1
            time.sleep(0.002)
        [each.result() for each in sent]
    assert seen == Counter(10 * writer + i for writer in range(4) for i in range(5))
