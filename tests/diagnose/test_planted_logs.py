"""Ten runs of the toy task have planted causes (``experiments/planted_logs.py``), which are told apart."""

import dataclasses
import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from rljax.commands import diagnose
from rljax.diagnose.page import diagnose as diagnosis
from rljax.diagnose.token_facts import read_facts
from rljax.record.token_dumps import read_dump, write_dump

LOGS = Path(__file__).parents[1] / "data" / "planted_logs"
REAL = LOGS.parent / "real_run"
# Each planted cause maps to the cause that is named.
CAUSES = {name: name for name in sorted(path.name.partition(".")[0] for path in LOGS.glob("*.gz"))} | {
    "stale_layer": "other_weights"
}
# A log without the tokens cannot tell a head in bfloat16 from sound rounding in bfloat16. No limit is crossed.
OF_LOGS = CAUSES | {"head_dtype": "healthy"}
# One step's tokens cannot show the course of the training, nor whether other weights are older ones.
OF_TOKENS = CAUSES | {"entropy_collapse": "healthy", "high_rate": "healthy", "staleness": "other_weights"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder of logs without their tokens."""
    path = tmp_path_factory.mktemp("logs")
    for cause in CAUSES:
        (path / f"{cause}.jsonl").write_bytes(gzip.decompress((LOGS / f"{cause}.jsonl.gz").read_bytes()))
    return path


def found(source, tokens=None):
    return diagnosis(source.name, diagnose.facts_of(source, tokens))


@pytest.mark.parametrize("planted", CAUSES)
def test_a_log_its_tokens_and_both(planted, folder):
    assert len(CAUSES) == 10
    said = found(folder / f"{planted}.jsonl", LOGS / f"{planted}.parquet")
    assert (said["cause"], said["confidence"] in (None, "sure", "likely")) == (CAUSES[planted], True)
    assert found(folder / f"{planted}.jsonl")["cause"] == OF_LOGS[planted]
    assert found(LOGS / f"{planted}.parquet")["cause"] == OF_TOKENS[planted]


def test_a_real_policy_that_has_become_certain_is_healthy(tmp_path):
    """Qwen2.5-Coder-0.5B with vLLM in bfloat16, 60 steps: its entropy falls to 0.01, and then few tokens are uncertain.

    Errors of certain tokens looked like those of another temperature in the first 25 steps, and of a router at the end.
    """
    lines = gzip.decompress((REAL / "sharp_policy.jsonl.gz").read_bytes()).decode().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_text("".join(lines[:25]))
    assert found(tmp_path / "run.jsonl")["cause"] == "healthy"
    (tmp_path / "run.jsonl").write_text("".join(lines))
    dump = REAL / "sharp_policy.parquet"
    for said in (found(tmp_path / "run.jsonl", dump), found(dump)):
        assert (said["cause"], said["findings"]) == ("healthy", [])
    assert math.isnan(read_facts(read_dump(dump)).effect_without)


def test_a_dump_with_versions_is_called_stale(tmp_path):
    """Older rollouts look like other weights, but the versions of tokens and weights tell them apart."""
    dump = read_dump(LOGS / "staleness.parquet")
    assert dump.sources["trainer"].weights_hash == "staleness version 39"
    said = {}
    for version in (37, 39):
        versions = tuple(np.where(mask, np.float32(version), np.nan) for mask in dump.response_mask)
        with_versions = dataclasses.replace(dump, columns={**dump.columns, "values/version": versions})
        said[version] = found(write_dump(tmp_path / f"{version}.parquet", with_versions))
    assert (said[37]["cause"], said[37]["confidence"]) == ("staleness", "likely")
    assert "sampled 2 versions before" in str(said[37]["findings"])
    assert said[39]["cause"] == "other_weights"


def test_the_answers_say_what_the_log_shows(folder):
    """The mismatch is not blamed for a collapse, and the buckets of a log stand in for few tokens."""
    collapsed = found(folder / "high_rate.jsonl")
    assert collapsed["kind"] == "optimisation"
    assert not [one for one in collapsed["limits"] if one["crossed"]]
    assert "the mismatch does not double before it" in collapsed["answers"]["before or after the collapse"]
    stale = found(folder / "staleness.jsonl")
    assert stale["kind"] == "staleness"
    assert stale["findings"][0]["evidence"].startswith("rollouts are 2 versions old")
    assert "between the trainer and itself" in found(folder / "healthy.jsonl")["answers"]["floor"]
    unknown = found(folder / "temperature.jsonl")
    assert "floor" not in unknown["answers"]
    assert any(line.startswith("the floor: ") for line in unknown["next"])
    said = found(folder / "entropy_collapse.jsonl", LOGS / "entropy_collapse.parquet")["answers"]
    assert said["with entropy"].startswith("the error of the logits by entropy: 0.01_to_0.1 ")
    assert said["with length"].startswith("the error of the logits by position: lt_4 ")
    # A numeric cause is looked for in the layers, and the tokens are looked at one by one.
    text = " ".join(found(LOGS / "eight_bits.parquet")["next"])
    assert "--layers" in text
    assert "rljax view" in text
    assert "--layers" not in " ".join(found(LOGS / "temperature.parquet")["next"])
