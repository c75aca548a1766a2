"""launch/copy_run.sh calls ``aws`` in the right order, and only where it has something to do."""

import os

import pytest
from programs import bash, program
from toy_runs import ROOT


@pytest.fixture
def copy_run(tmp_path):
    """Returns a function from words to (exit status, standard error, calls of a planted ``aws``)."""
    log = tmp_path / "calls"
    aws = program(tmp_path / "bin/aws", f'echo "$@" >> {log}')

    def run(*words):
        log.write_text("")
        status, _, said = bash(ROOT / "launch/copy_run.sh", *words, PATH=f"{aws.parent}:{os.environ['PATH']}")
        return status, said, [line.split()[:5] for line in log.read_text().splitlines()]

    return run


def test_the_rows_are_saved_before_the_checkpoints(copy_run, tmp_path):
    status, _, calls = copy_run("save", "s3://b/p/", tmp_path / "run/checkpoints/20")
    rows = ["s3", "cp", "--only-show-errors", f"{tmp_path}/run/metrics.jsonl", "s3://b/p/metrics.jsonl"]
    assert (status, calls) == (0, [rows, ["s3", "sync", "--only-show-errors", f"{tmp_path}/run", "s3://b/p"]])


def test_a_run_is_loaded_only_onto_a_bare_disk(copy_run, tmp_path):
    status, _, calls = copy_run("load", "s3://b/p", tmp_path / "run")
    assert (status, calls) == (0, [["s3", "sync", "--only-show-errors", "s3://b/p", f"{tmp_path}/run"]])
    (tmp_path / "run/checkpoints/20").mkdir(parents=True)
    assert copy_run("load", "s3://b/p", tmp_path / "run") == (0, "", [])


def test_other_words_are_refused_in_one_line(copy_run):
    for words in (("load", "s3://b/p"), ("fetch", "s3://b/p", "run"), ("load", "ftp://b/p", "run")):
        status, said, calls = copy_run(*words)
        assert (status, calls, said.count("\n")) == (2, [], 1)
        assert f"got '{' '.join(words)}'" in said
