"""docs/metrics.md holds every key of real rows, and no key that nothing writes."""

import json
import re

import pytest
from glossary import glossary
from toy_runs import command, completed

pytestmark = pytest.mark.slow

# Other tests show these keys, which a toy's run of one process on the embedded engine does not have.
ELSEWHERE = re.compile(
    r"publish/.*|rollout/(requests|retries|server_losses|servers|servers_(joined|left|brought_back|rejected)"
    r"|mixed_fraction|executable_runs|cached_prompt_fraction)"
    r"|mismatch_self/mesh/<name>|turns/.*|router/.*|policy/router_balance|mismatch_free_routing/.*"
    r"|response_length/missed_stop_fraction|rollout/refill(ed_groups|_rounds|ed_tokens)"
    r"|rollout/(waiting_groups|dropped_stale_rows|failed_trajectories|mixed_prompts|constant_logprobs|after_stop)"
    r"|diagnosis/(cause|confidence)|time/((server_)?checksums|sleep|wake|reload|offload)_s|perf/<act>_slowest_(process|s)"
)
SMALL = [
    *("--data.batch-size", "6", "--rollout.group-size", "4", "--packing.rows-per-micro-batch", "4"),
    *("--packing.row-tokens", "44", "--run.steps", "2", "--eval.every", "2", "--eval.at-start", "true"),
    *("--eval.n", "2", "--eval.pass-k", "1", "2", "--eval.temperature", "1", "--eval.max-response-tokens", "6"),
    *("--loss.kl", "k3", "--loss.kl-coefficient", "0.01", "--correction.preset", "one_sided_tv"),
    *("--correction.score-centering", "true", "--rollout.top-logprobs", "4"),
    *("--diagnosis.self-every", "2"),
]


@pytest.mark.harness  # test_train_run.py looks its rows up
def test_the_glossary_has_exactly_the_keys_of_rows(toy_base, tmp_path, monkeypatch):
    monkeypatch.setattr("rljax.run.step.REFERENCE_STEPS", 1)
    completed(command(toy_base, tmp_path / "run", *SMALL))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    seen = {key.removesuffix("_at_start") for line in lines for key in json.loads(line)}
    assert any(key.endswith("accuracy_at_start") for key in json.loads(lines[0]))
    known = glossary()
    assert [key for key in sorted(seen) if not any(pattern.fullmatch(key) for pattern in known.values())] == []
    unseen = {key for key, pattern in known.items() if not any(pattern.fullmatch(key) for key in seen)}
    assert [key for key in sorted(unseen) if not ELSEWHERE.fullmatch(key)] == []
