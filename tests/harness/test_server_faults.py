"""tests/harness/try_server_faults.py runs against the stand-in, with some faults of each kind and short stalls."""

import json

import pytest
import try_server_faults

pytestmark = pytest.mark.slow

SOME = ["stall", "1 MB/s", "500", "a log-probability NaN", "weights of another run", "a choice twice"]


@pytest.mark.harness
@pytest.mark.timeout(120)
def test_each_fault_is_survived_or_ends_in_one_line(tmp_path, capsys):
    arguments = [
        "--scripted",
        "--stall",
        "3",
        "--prompts",
        "2",
        "--responses",
        "4",
        "--out",
        str(tmp_path / "faults.md"),
    ]
    for fault in SOME:
        arguments += ["--fault", fault]
    assert try_server_faults.main(arguments) == 0, capsys.readouterr().out
    rows = json.loads((tmp_path / "faults.json").read_text())
    assert [row["fault"] for row in rows] == SOME
    for row in rows:
        assert row["some"]["planted"] == 3
        assert row["some"]["responses"] == 8
        assert (row["some"]["retries"] > 0) == (row["fault"] != "1 MB/s")
        assert row["every"]["planted"] >= 4
        assert bool(row["every"]["ended"]) == (row["fault"] != "1 MB/s")
    table = (tmp_path / "faults.md").read_text()
    assert "| 1 MB/s | 3 | survived, 0 retries, 0 losses of the server, 8 responses | survived, 0 retries" in table
    assert table.count("ended in one line: ") == len(SOME) - 1


def test_a_program_that_finds_a_fault_says_so(tmp_path, capsys, monkeypatch):
    """The checks of the program itself must find a client that hands on replies of any version."""
    sound = try_server_faults.is_sound
    monkeypatch.setattr(try_server_faults, "is_sound", lambda response, vocab: sound(response, 5))
    arguments = ["--scripted", "--stall", "3", "--prompts", "1", "--responses", "2", "--fault", "1 MB/s"]
    assert try_server_faults.main(arguments) == 1
    assert "NOT GOOD" in capsys.readouterr().out
