"""The exam's training logs: numbers from public threads under their projects' names, and logs with planted faults."""

import pytest
from scoring import CASES, score

LOGS = [name for name in CASES if not name.startswith("d_") and name != "p_qwen35_vllm_dump"]


@pytest.mark.slow
def test_logs_of_other_projects(tmp_path):
    """The numbers are those of docs/diagnose.md. The other cases are acceptable."""
    counts, others, lines = score(LOGS, tmp_path)
    text = "\n".join(lines)
    assert (counts["wrong"], counts["error"], counts["cannot tell"], counts["false hints"]) == (0, 0, 0, 0), text
    assert (len(LOGS), counts["right"] >= 56) == (61, True), text
    assert (others["replay wrong"], others["replay error"], others["replay right"] >= 8) == (0, 0, True), text
