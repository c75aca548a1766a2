"""Healthy runs of the embedded engine whose mismatch is large or whose responses are short: the watch says nothing."""

import pytest
from toy_runs import complete, tiny

from rljax.record.rows import read_rows

# All runs of tests fail at such a line (``toy_runs.complete``), so each of these has several causes at once.
EIGHT_BITS = ("--rollout.kv-cache-dtype", "fp8_e5m2", "--rollout.weight-quantization", "fp8")
STALE = ("--rollout.max-staleness", "1", "--diagnosis.behaviour-responses", "0")
RUNS = {
    "stale and rounded": (*STALE, *EIGHT_BITS),
    "short and cut": (
        *("--rollout.max-response-tokens", "2", "--rollout.group-size", "32"),
        *("--rollout.top-p", "0.7", "--rollout.top-k", "6"),
    ),
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_a_healthy_run_has_no_line(toy_base, tmp_path, options):
    status, output = complete(tiny(toy_base, tmp_path / "run", 4, *options))  # it fails if there is a line
    assert status == 0, output
    keys = ("rollout/repeated_responses", "rollout/constant_responses", "mismatch/jump")
    assert [[row[key] for key in keys] for row in read_rows(tmp_path / "run/metrics.jsonl")] == [[0, 0, 0]] * 4
