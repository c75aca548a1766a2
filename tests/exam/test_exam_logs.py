"""The exam's training logs: numbers from public threads under their projects' names, and logs with planted faults."""

import pytest
from scoring import CASES, score

LOGS = [name for name in CASES if not name.startswith("d_") and name != "p_qwen35_vllm_dump"]


@pytest.mark.slow
def test_logs_of_other_projects(tmp_path):
    counts, others, lines = score(LOGS, tmp_path)
    text = "\n".join(lines)
    print(text)
    assert sum(counts.values()) - counts["false hints"] == len(LOGS) == 61
    assert counts["wrong"] <= 10, text
    assert others["replay right"] >= 8, text
