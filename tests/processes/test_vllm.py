"""A run on a real vLLM server has the same rows on 1, 2 and 4 processes.

All of them use the server's answers to the first run.
"""

import pytest
from process_runs import FLOAT32, SITE, TINY, complete_together, largest_differences, without_publish
from toy_runs import comparable, tiny

from rljax.record.rows import read_rows
from rljax.rollout.servers.vllm.server import VllmConfig, start, vllm_python

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server(toy_base, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "float32.log"
    config = VllmConfig(str(toy_base), str(vllm_python()), dtype="float32", max_model_len=512, log_path=log)
    started = start(config, timeout_s=480)
    yield started
    started.stop()


def test_the_same_responses_give_the_same_rows(server, toy_base, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "answers").mkdir()
    rows = {}
    for count in (1, 2, 4):
        mode = {"RLJAX_RECORD" if count == 1 else "RLJAX_REPLAY": str(tmp_path / "answers"), "path": tmp_path}
        run_dir = tmp_path / f"run_{count}"
        engine = ("--rollout.engine", "vllm", "--rollout.urls", server.url, "--loss.mini-batches", "2")
        words = tiny(toy_base, run_dir, 4, *FLOAT32, *TINY, *engine)
        complete_together(words, count, tmp_path / f"printed_{count}", heartbeat_s=30, **mode)
        rows[count] = without_publish(run_dir)
        assert all(row["publish/verified_tensors"] > 10 for row in comparable(run_dir))
    for count in (2, 4):
        differences = largest_differences(rows[1], rows[count])
        print(f"{count} processes: {max(differences.values(), default=0.0):.1e}")
        assert max(differences.values(), default=0.0) < 1e-5, (count, differences)


@pytest.mark.parametrize("kind", ["directory", "http"])
def test_each_process_writes_the_shards_that_it_holds(kind, server, toy_base, tmp_path):
    """The server receives the same weights, by deltas, and checks every tensor against the devices' checksums.

    Over HTTP each process has its own directory, which no other process reads.
    """
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "answers").mkdir()
    store = ("--publish.store", kind, "--publish.anchor-every", "2")
    rows = {}

    def own(index):
        return "--rollout.transfer-dir", tmp_path / ("weights" if kind == "directory" else f"weights_{index}")

    for count in (1, 2, 4):
        mode = {"RLJAX_RECORD" if count == 1 else "RLJAX_REPLAY": str(tmp_path / "answers"), "path": tmp_path}
        run_dir = tmp_path / f"run_{count}"
        engine = ("--rollout.engine", "vllm", "--rollout.urls", server.url, *store)
        words = tiny(toy_base, run_dir, 4, *FLOAT32, *TINY, *engine)
        complete_together(words, count, tmp_path / f"printed_{count}", heartbeat_s=30, own=own, **mode)
        rows[count] = comparable(run_dir)
        assert len(list(tmp_path.glob("weights*"))) == (1 if kind == "directory" else count)
        assert not list(tmp_path.glob("weights*/*")), "what was published is left"
        assert all(row["publish/verified_tensors"] > 10 for row in rows[count])
        assert not any("publish/mirrors_repaired" in row for row in rows[count])
    for count in (2, 4):
        fractions = [[row["publish/changed_fraction"] for row in rows[number]] for number in (1, count)]
        assert fractions[1] == pytest.approx(fractions[0], rel=1e-3)


def test_colocated_state_is_on_the_host_during_sampling(server, toy_base, tmp_path):
    """The rows must equal those of a run whose state stays on the device.

    With two processes, each moves its shards and serves its weights.
    """
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "answers").mkdir()
    rows, engine, shared = (
        {},
        ("--rollout.engine", "vllm", "--rollout.urls", server.url),
        ("--rollout.colocated", "true"),
    )
    for name, count, options in (
        ("stays", 1, ()),
        ("moves", 1, shared),
        ("both_move", 2, (*shared, "--publish.store", "http")),
    ):
        mode = {"RLJAX_RECORD" if name == "stays" else "RLJAX_REPLAY": str(tmp_path / "answers"), "path": tmp_path}
        run_dir = tmp_path / name
        words = tiny(toy_base, run_dir, 3, *FLOAT32, *TINY, *engine, *options)
        complete_together(words, count, tmp_path / f"printed_{name}", heartbeat_s=30, **mode)
        rows[name] = without_publish(run_dir)
        written = read_rows(run_dir / "metrics.jsonl")
        assert [row.keys() >= {"time/offload_s", "time/reload_s", "time/sleep_s"} for row in written] == [
            name != "stays"
        ] * 3
        assert all(row["publish/verified_tensors"] > 10 for row in written)
    assert max(largest_differences(rows["stays"], rows["moves"]).values(), default=0.0) == 0.0
    assert max(largest_differences(rows["stays"], rows["both_move"]).values(), default=0.0) < 1e-5
