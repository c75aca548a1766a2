"""Real processes upload the shards that they hold to a real S3 server (tools/test_store.sh)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from shard_publishers import Publishers, assert_holds, take
from toy_runs import ROOT

from rljax.weights.mirror import Mirror

URL = "s3://runs/team/weights"
SLOW = {"store": URL, "heartbeat_s": 120.0}  # nothing is killed here, and on a busy machine a process may wait long
pytestmark = [pytest.mark.store, pytest.mark.timeout(900)]
pytest_plugins = ["s3_server"]


def bucket():
    import fsspec

    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


@pytest.mark.parametrize("count", [2, 4])
def test_what_each_process_uploads_is_pulled_bit_for_bit(s3, count, tmp_path):
    mirror = Mirror(tmp_path / "mirror")
    with Publishers(tmp_path / "run", count, **SLOW) as run:
        for number in range(5):
            told = run.publish()
            assert told["source"].startswith(f"{URL}/")
            name = Path(told["path"]).name
            # Another process of the same machine pulls, so what this process remembers of the bucket cannot help it.
            words = [sys.executable, "tests/support/pulling.py", told["source"], name, str(mirror.root)]
            done = json.loads(subprocess.run(words, check=True, cwd=ROOT, timeout=120, capture_output=True).stdout)
            assert (done["dense"], done["deltas"], done["repaired"]) == (number == 0, int(number > 0), "")
            assert_holds(mirror, run.truth(number))
            version = json.loads(bucket().cat_file(f"{told['source']}/{name}/version.json"))
            found = bucket().find(f"{told['source']}/{name}", detail=True).values()
            there = {it["name"].rpartition("/")[2]: it["size"] for it in found}
            there.pop("version.json")
            assert there == {file: it["bytes"] for file, it in version["files"].items()}
            assert {file.split("-")[0] for file in there} == {str(index) for index in range(count)}
            sizes = [
                sum(size for file, size in there.items() if file.startswith(f"{index}-")) for index in range(count)
            ]
            assert max(sizes) < 1.5 * min(sizes), "a process holds more than its part"
            assert not any("at" in it for it in version["files"].values())
        kept = {path.rpartition("/")[2] for path in bucket().ls(told["source"], detail=False)}
        assert kept == {f"v{number:08d}-{number + 1}" for number in (3, 4)} | {"owner.json"} & kept
        late = Mirror(tmp_path / "late")
        assert (take(told, late).dense, late.version.tag) == (True, mirror.version.tag)
        assert_holds(late, run.truth(4))
        assert not list((tmp_path / "run").glob("process_*/*/**/*.safetensors"))
        assert run.end() == [0] * count, run.printed()
    assert bucket().find(URL) == []
    assert not list((tmp_path / "run").glob("process_*/*"))


def test_where_one_process_cannot_upload_no_version_appears(s3, tmp_path):
    def inside(index):
        return ("env", "AWS_ENDPOINT_URL=http://127.0.0.1:9") if index == 1 else ()

    with Publishers(tmp_path / "run", 2, **SLOW, inside=inside) as run:
        run.ask(0.05)
        error = run.answer()["error"]
        assert "process 1: " in error
        assert "cannot be written" in error
        assert not [path for path in bucket().find(URL) if path.endswith("version.json")]
        assert run.end() == [0, 0], run.printed()
    assert bucket().find(URL) == []
