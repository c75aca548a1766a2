"""The exam's token dumps: planted faults in the forms of several projects, and an own run with a real vLLM."""

import json

import pytest
from scoring import CASES, score, unpack
from toy_runs import outcome

from rljax.commands import diagnose

DUMPS = [name for name in CASES if name.startswith("d_") or name == "p_qwen35_vllm_dump"]
# The causes that may be named where ``compare`` finds no pattern. Another cause of a verdict has one, or is the same.
UNNAMED = {
    "pass": {"healthy", "sixteen_bits", "router_noise", "extreme_tokens", "head_dtype"},
    "fail": {"other_weights", "staleness", "eight_bits", "length_growth", "extreme_tokens", "cannot_tell"},
}


@pytest.mark.slow
def test_dumps_of_other_projects(tmp_path):
    counts, others, lines = score(DUMPS, tmp_path)
    text = "\n".join(lines)
    assert counts["right"] >= len(DUMPS) == 25, text
    assert (counts["false hints"], others["compare right"], others["view right"]) == (0, 25, 25), text


@pytest.mark.parametrize("name", DUMPS)
def test_diagnose_says_what_compare_says(name, tmp_path):
    said = json.loads(outcome(diagnose.main, [unpack(CASES[name], tmp_path), "--json", "-"])[1])
    verdict = said["measured"]["tokens"]["compare"]
    same = {"left_out": "missing_numbers"}.get(verdict["cause"], verdict["cause"])
    if verdict["cause"] in ("none", "above_bar") or (verdict["status"], verdict["cause"]) == ("fail", "other_weights"):
        assert said["cause"] in UNNAMED["pass" if verdict["cause"] != "other_weights" else "fail"]
    else:
        assert said["cause"] in (same, "not_comparable")
