"""Tests of files that appear whole or not at all, and of directories that are removed with their owner."""

import json
import shutil

import pytest

from rljax.distributed.files import OwnedDirectory, free_memory, memory_directory, replacing, write_whole

VERSIONS = {
    2: ("0::", "sys/fs/cgroup", "memory.max", "memory.current", ""),
    1: ("4:cpu,memory:", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_limit_of_a_job_bounds_the_free_memory(version, tmp_path):
    """The process is in a group below that of its job. Only the job has a limit."""
    line, folder, limit, usage, prefix = VERSIONS[version]
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n",
        "proc/self/cgroup": f"3:pids:/other\n{line}/job_1/task_0\n",
        f"{folder}/job_1/{limit}": "900000\n",
        f"{folder}/job_1/{usage}": "300000\n",
        f"{folder}/job_1/memory.stat": f"anon 150000\n{prefix}inactive_file 100000\n{prefix}active_file 50000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == 900_000 - 300_000 + 150_000
    (tmp_path / folder / "job_1" / limit).unlink()
    assert free_memory(tmp_path) == 4000 * 1024


def test_a_file_or_directory_is_replaced_when_the_block_ends(tmp_path):
    """An error leaves what was there."""
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path) as partial:
        partial.write_bytes((tmp_path / "absent").read_bytes())
    assert path.read_text() == "old"
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    write_whole(path, "né")
    assert path.read_bytes() == "né".encode()
    with replacing(out) as partial:
        partial.mkdir()
        (partial / "a").write_bytes(b"1")
        assert not out.exists()
    assert (out / "a").read_bytes() == b"1"
    assert {*tmp_path.iterdir()} == {path, out}


def test_an_error_without_a_name_names_the_file(tmp_path):
    """A disk that is full gets the room of the half file back."""
    said, path = r"No space left on device: '.*rows\.partial'", tmp_path / "rows"
    path.with_name("rows.partial").write_text("half")
    with pytest.raises(OSError, match=said), replacing(path):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_an_owned_directory_is_removed_when_it_is_closed(tmp_path, monkeypatch):
    """Other machines get its path, so that a relative parent must become a whole one."""
    monkeypatch.chdir(tmp_path)
    owned = OwnedDirectory("mine-", "parent")
    assert owned.root.parent == owned.parent == tmp_path / "parent"
    assert owned.root.name.startswith("mine-")
    owned.close()
    owned.close()
    assert list(owned.parent.iterdir()) == []
    assert memory_directory().is_dir()


def test_only_directories_of_dead_owners_are_removed(tmp_path):
    """A directory without an owner stays. ``test_ownership`` shows when an owner is dead."""
    living, dead, nobodys = OwnedDirectory("mine-", tmp_path), tmp_path / "mine-dead", tmp_path / "mine-nobodys"
    shutil.copytree(living.root, dead)
    record = json.loads((dead / "owner.json").read_text())
    (dead / "owner.json").write_text(json.dumps(record | {"started": 1}))
    nobodys.mkdir()
    newcomer = OwnedDirectory("mine-", tmp_path)
    assert set(tmp_path.iterdir()) == {living.root, nobodys, newcomer.root}
    newcomer.close()
    living.close()
    assert list(tmp_path.iterdir()) == [nobodys]
