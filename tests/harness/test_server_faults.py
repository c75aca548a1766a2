"""tests/harness/try_server_faults.py runs against the stand-in, with some faults of each kind and short stalls."""

import json

import pytest
import try_server_faults

pytestmark = pytest.mark.slow
SOME = ["stall", "1 MB/s", "500", "a log-probability NaN", "weights of another run", "a choice twice"]
QUICK = ["--scripted", "--stall", "3"]


@pytest.mark.harness
@pytest.mark.timeout(120)
def test_each_fault_is_survived_or_ends_in_one_line(tmp_path, capsys):
    words = [*QUICK, "--prompts", "2", "--responses", "4", "--out", str(tmp_path / "faults.md")]
    words += [word for fault in SOME for word in ("--fault", fault)]
    assert try_server_faults.main(words) == 0, capsys.readouterr().out
    rows = json.loads((tmp_path / "faults.json").read_text())
    assert [row["fault"] for row in rows] == SOME
    for row in rows:
        assert (row["some"]["planted"], row["some"]["responses"]) == (3, 8)
        assert row["every"]["planted"] >= 4
        ends = row["fault"] != "1 MB/s"
        assert (row["some"]["retries"] > 0, bool(row["every"]["ended"])) == (ends, ends)
    table = (tmp_path / "faults.md").read_text()
    assert "| 1 MB/s | 3 | survived, 0 retries, 0 losses of the server, 8 responses | survived, 0 retries" in table
    assert table.count("ended in one line: ") == len(SOME) - 1


def test_a_program_that_finds_a_fault_says_so(capsys, monkeypatch):
    sound = try_server_faults.is_sound
    monkeypatch.setattr(try_server_faults, "is_sound", lambda response, vocab: sound(response, 5))
    assert try_server_faults.main([*QUICK, "--prompts", "1", "--responses", "2", "--fault", "1 MB/s"]) == 1
    assert "| **NO** |" in capsys.readouterr().out
