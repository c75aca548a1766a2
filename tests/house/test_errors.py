"""A program must print and return the right things after a caller's mistake, an interrupt or a bug."""

import gc
import signal
import subprocess
import sys
import time

import pytest

from rljax.errors import ConfigError, VerificationError, caller_errors, run_cli


def raising(error):
    def main(argv):
        raise error

    return main


def test_run_cli_prints_one_line_and_returns_a_status(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["prog", "a", "b"])
    assert run_cli(lambda argv: len(argv)) == run_cli(lambda argv: 2, ["x"]) == 2
    errors = [ConfigError("steps: expected\n a number"), VerificationError("http://h: the band\n is 0.1")]
    assert [run_cli(raising(error), []) for error in [*errors, KeyboardInterrupt()]] == [2, 1, 130]
    assert capsys.readouterr().err == (
        "error: steps: expected a number\nerror: http://h: the band is 0.1\ninterrupted\n"
    )


@pytest.mark.parametrize("error", [ValueError("shapes differ"), BrokenPipeError("a connection")])
def test_run_cli_keeps_the_tracebacks_of_bugs(error):
    with pytest.raises(type(error), match=str(error)):
        run_cli(raising(error), [])


def test_an_interrupt_inside_a_callback_is_not_lost(capsys):
    """Python ignores every error there, and jax has such a callback."""

    def interrupted(phase, facts):
        gc.callbacks.remove(interrupted)
        signal.raise_signal(signal.SIGINT)

    def main(argv):
        gc.callbacks.append(interrupted)
        gc.collect()
        time.sleep(5)
        return 0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # another test may have left its own
    try:
        assert run_cli(main, []) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"


def test_caller_errors_turns_the_callers_mistakes_into_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^batch_size must divide, got 3$"), caller_errors():
        raise ValueError("batch_size\n must divide, got 3")
    with pytest.raises(ConfigError, match=r"nothing: No such file or directory$"), caller_errors():
        (tmp_path / "nothing").read_text()
    with pytest.raises(RuntimeError), caller_errors():
        raise RuntimeError("server gone")


@pytest.mark.parametrize("length", [1, 200_000])
def test_a_reader_that_leaves_ends_a_program_silently(length):
    code = f"""
import sys
from rljax.errors import run_cli

def main(argv):
    sys.stdin.read()
    print("x" * {length})
    return 0

sys.exit(run_cli(main))
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    program = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    program.stdout.close()
    program.stdin.close()
    assert program.stderr.read() == ""
    assert program.wait(60) == 141
