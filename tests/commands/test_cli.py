"""The command ``rljax`` starts fast, explains each of its commands, and reports a mistake in one line."""

import subprocess
import sys

import pytest
from isolated import run_with_only
from toy_runs import outcome, refused

from rljax import cli


def test_the_help_and_each_mistake_are_one_line(monkeypatch):
    done = run_with_only([], "import rljax.cli\n")
    assert (done.returncode, done.stderr) == (0, "")
    for module in ("rljax", "rljax.cli"):
        words = [sys.executable, "-m", module, "replay", "--help"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr, "rljax replay" in done.stdout) == (0, "", True)
    status, out, err = outcome(cli.main, ["--help"])
    assert (status, err) == (0, "")
    for name, command in cli.COMMANDS.items():
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {name} ")]
        assert (line.endswith(command.summary), len(line) <= 100) == (True, True)
    for words, message in (
        (["evalute"], "error: unknown command evalute; did you mean evaluate?"),
        (["--dry-run"], "error: unknown command --dry-run; commands: train, evaluate, "),
        (["replay", "nowhere.csv"], "error: nowhere.csv: no such file"),
    ):
        assert refused(cli.main, words).startswith(message)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.delitem(sys.modules, "rljax.commands.compare", raising=False)
    remedy = "pip install '.[train]' in a checkout of rljax, or 'WHEEL[train]' with its wheel"
    said = f"error: rljax compare needs the package tqdm, which is not installed: {remedy}\n"
    assert refused(cli.main, ["compare", "--help"]) == said


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_has_a_program_that_explains_itself(name, capsys):
    try:
        status = cli.main([name, "--help"])
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    assert f"rljax {name}" in out


def test_the_shell_completes_commands_and_options(tmp_path):
    status, script, _ = outcome(cli.main, ["--print-completion", "bash"])
    assert status == 0
    (tmp_path / "rljax.bash").write_text(script)

    def completions(*words):
        shell = f"""
            source {tmp_path}/rljax.bash
            COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; COMP_LINE="{" ".join(words)}"
            COMP_POINT=${{#COMP_LINE}}
            _rljax
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
        return [line.split()[0] for line in done.stdout.splitlines() if line]

    assert completions("rljax", "exp") == ["export"]
    options = completions("rljax", "train", "--run.st")
    assert [word for word in options if word[0] == "-"] == ["--run.steps", "--run.stuck-s"]
