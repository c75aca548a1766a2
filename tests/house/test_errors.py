"""A program must print and return the right things after a caller's mistake, an interrupt or a bug."""

import gc
import signal
import subprocess
import sys
import time

import pytest

from rljax.errors import ConfigError, VerificationError, caller_errors, run_cli


def test_run_cli_prints_one_line_and_returns_2(capsys):
    def main(argv):
        if argv:
            raise ConfigError("steps: expected\n a number")
        return 5

    assert run_cli(main, []) == 5
    assert run_cli(main, ["x"]) == 2
    assert capsys.readouterr().err == "error: steps: expected a number\n"


def test_a_server_that_fails_the_proof_is_one_line_and_status_1(capsys):
    def main(argv):
        raise VerificationError("http://h: the band\n is 0.1")

    assert run_cli(main, []) == 1
    assert capsys.readouterr().err == "error: http://h: the band is 0.1\n"


def test_run_cli_reads_the_process_arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["prog", "a", "b"])
    assert run_cli(lambda argv: len(argv)) == 2


def test_run_cli_keeps_tracebacks_of_bugs_and_quiets_interrupts(capsys):
    def bug(argv):
        raise ValueError("shapes differ")

    def interrupt(argv):
        raise KeyboardInterrupt

    with pytest.raises(ValueError, match="shapes differ"):
        run_cli(bug, [])
    assert run_cli(interrupt, []) == 130
    assert capsys.readouterr().err == "interrupted\n"


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
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    program.stdout.close()
    program.stdin.close()
    assert program.stderr.read() == ""
    assert program.wait(60) == 141


def test_a_broken_pipe_elsewhere_keeps_its_traceback():
    def main(argv):
        raise BrokenPipeError("a connection")

    with pytest.raises(BrokenPipeError, match="a connection"):
        run_cli(main, [])
