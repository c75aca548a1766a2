"""A run on a real vLLM server has the same rows on 1, 2 and 4 processes, given the answers to the first one."""

import pytest
from process_runs import FLOAT32, TINY, assert_alike, largest_differences, replay, without_publish
from toy_runs import comparable, tiny

from rljax.record.rows import read_rows
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.vllm.server import VllmConfig, start

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server(toy_base, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "float32.log"
    python = str(environment_python("vllm"))
    config = VllmConfig(str(toy_base), python, dtype="float32", max_model_len=512, log_path=log)
    with start(config, timeout_s=480) as started:
        yield started


@pytest.mark.parametrize("kind", ["directory", "http"])
def test_the_rows_are_those_of_one_process(kind, server, toy_base, tmp_path):
    """Each process writes its shards, by deltas, over HTTP into a directory that no other process reads."""

    def own(index):
        return "--rollout.transfer-dir", tmp_path / ("weights" if kind == "directory" else f"weights_{index}")

    def words(run_dir):
        engine = ("--rollout.engine", "vllm", "--rollout.urls", server.url, "--publish.store", kind)
        return tiny(toy_base, run_dir, 4, *FLOAT32, *TINY, *engine, "--loss.mini-batches", "2")

    replay(tmp_path, {str(count): (count, words) for count in (1, 2, 4)}, own=own)
    assert len(list(tmp_path.glob("weights*"))) == (1 if kind == "directory" else 4)
    assert not list(tmp_path.glob("weights*/*")), "what was published is left"
    first = comparable(tmp_path / "1")
    for name in ("1", "2", "4"):
        rows = comparable(tmp_path / name)
        assert_alike(without_publish(tmp_path / "1"), without_publish(tmp_path / name))
        assert all(row["publish/verified_tensors"] > 10 for row in rows)
        assert not any("publish/mirrors_repaired" in row for row in rows)
        fractions = [[row["publish/changed_fraction"] for row in each] for each in (first, rows)]
        assert fractions[1] == pytest.approx(fractions[0], rel=1e-3)


def test_colocated_state_is_on_the_host_during_sampling(server, toy_base, tmp_path):
    """The rows must equal those of a run whose state stays on the device. Each of two processes moves its shards."""
    shared = ("--rollout.colocated", "true")

    def words(run_dir, *options):
        engine = ("--rollout.engine", "vllm", "--rollout.urls", server.url)
        return tiny(toy_base, run_dir, 3, *FLOAT32, *TINY, *engine, *options)

    runs = {"stays": (1, words), "moves": (1, lambda run_dir: words(run_dir, *shared))}
    replay(tmp_path, runs | {"both_move": (2, lambda run_dir: words(run_dir, *shared, "--publish.store", "http"))})
    for name in ("stays", "moves", "both_move"):
        for row in read_rows(tmp_path / name / "metrics.jsonl"):
            assert (row.keys() >= {"time/offload_s", "time/reload_s", "time/sleep_s"}) == (name != "stays")
            assert row["publish/verified_tensors"] > 10
    stays = without_publish(tmp_path / "stays")
    assert largest_differences(stays, without_publish(tmp_path / "moves")) == {}
    assert_alike(stays, without_publish(tmp_path / "both_move"))
