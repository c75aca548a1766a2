"""The errors that cross rooms: a caller's mistake (one line, exit 2), a server's, and what stops a run."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin, get_type_hints

START_AGAIN_STATUS = 75
"""Exit status (EX_TEMPFAIL) of a run that ended for want of another process: the same command goes on."""


class ConfigError(ValueError):
    """A mistake in what the caller wrote. The message is one line that prints; the middle of a very long one is cut."""

    exit_status = 2
    LONGEST = 2000  # characters

    def __init__(self, message: object) -> None:
        line = " ".join(str(message).split())
        shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
        half = self.LONGEST // 2
        super().__init__(shown if len(shown) <= self.LONGEST else f"{shown[:half]} ... {shown[-half:]}")


@contextmanager
def caller_errors(*more: type[Exception]) -> Iterator[None]:
    """Within it a ``ValueError``, ``OSError``, ``ServerError`` or one of ``more`` becomes a ``ConfigError``.

    For the part of a program that checks its arguments and opens its inputs, where an error is the caller's mistake;
    not for the work itself.
    """
    caught: tuple[type[Exception], ...] = (ValueError, ServerError, *more)
    try:
        yield
    except (ConfigError, StartAgainError):
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}" if error.filename else error) from error
    except caught as error:
        raise ConfigError(error) from error


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within it an ``OSError`` that names no file gets the name of ``path``: a write that fails has none."""
    try:
        yield
    except OSError as error:
        if error.filename or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error


@contextmanager
def full_disk_errors() -> Iterator[None]:
    """Within it a ``NotWrittenError``, or an ``OSError`` for want of room on a disk, becomes a ``ConfigError``.

    For the work itself, where any other error keeps its traceback.
    """
    try:
        yield
    except NotWrittenError as error:
        raise ConfigError(error) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with caller_errors():
            raise


def run_cli(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Runs a program's ``main`` (on ``sys.argv[1:]`` unless told) and returns its exit status.

    A ``ConfigError`` becomes one line ``error: ...`` on stderr and status 2, a ``StartAgainError`` likewise with
    ``START_AGAIN_STATUS``, an interrupt status 130. Where the reader of standard output has left, as ``head`` does, a
    program ends silently with status 141. Everything else, a plain ``ValueError`` included, keeps its traceback: deep
    in a run it is a bug, not the caller's mistake. Where it is the caller's, say so with ``caller_errors``.
    """
    try:
        status = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except (ConfigError, StartAgainError, KeyboardInterrupt) as error:
        print_end(error)
        return exit_status(error)
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the interpreter flushes at its end
        return 128 + signal.SIGPIPE
    return status


def _reader_left() -> bool:
    """Whether nobody reads standard output any more, as after ``| head``."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def exit_status(error: BaseException) -> int:
    """That of a program which ends by ``error``."""
    if isinstance(error, (ConfigError, StartAgainError)):
        return error.exit_status
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def print_end(error: BaseException) -> None:
    """Says on stderr by what a program ends: one line where that is known, else a traceback."""
    if isinstance(error, (ConfigError, StartAgainError)):
        print(f"error: {error}", file=sys.stderr, flush=True)
    elif isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


class StartAgainError(RuntimeError):
    """Another process of the run is lost, or failed; the same command goes on from the last checkpoint."""

    exit_status = START_AGAIN_STATUS


class NotWrittenError(RuntimeError):
    """Files could not be written; the message says which, and why."""


class OwnedError(ValueError):
    """Another living process owns what was to be claimed; the message names it."""


class StoppedWaitingError(RuntimeError):
    """The run was asked to stop, and the engine would have to wait: for servers that are gone, or for responses."""


def stop_sampling(gives_up: Callable[[], bool]) -> None:
    """Raises StoppedWaitingError when ``gives_up`` says that what is sampled is to be given up."""
    if gives_up():
        raise StoppedWaitingError("asked to stop while responses were sampled")


class ServerError(RuntimeError):
    """What a server did wrong."""


class ServerGoneError(ServerError):
    """The server does not answer, or answered that its engine is broken: try again when it is back."""


class ServerRefusedError(ServerError):
    """The server answered and refused; trying again would not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ReplyError(ServerError):
    """The server answered 200 with something that is not a completion."""


class ServersLostError(ServerError):
    """None is left to sample, and those that come back cannot be verified before the next publish."""


class HandshakeError(ValueError):
    """Trainer and server do not fit together; one line for each thing that differs."""


class VerificationError(RuntimeError):
    """The server does not sample from the trainer's weights."""


class ServerFailedError(RuntimeError):
    """The server ended or did not become healthy in time; the message ends with the tail of its log."""


def check_choice(name: str, value: Any, choices: Any) -> None:
    """``value`` must be one of the values of ``choices``, a ``Literal``."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {get_args(choices)}, got {value!r}")


def check_choices(config: Any) -> None:
    """Every field of the dataclass that is declared as a ``Literal`` must have one of its values."""
    for name, declared in get_type_hints(type(config)).items():
        if get_origin(declared) is Literal:
            check_choice(name, getattr(config, name), declared)


def check_at_least(config: Any, least: int, *names: str) -> None:
    """The fields must not be below ``least``; a number that is not a number is."""
    for name in names:
        if not getattr(config, name) >= least:
            wanted = f"be at least {least}" if least else "not be negative"
            raise ValueError(f"{name} must {wanted}, got {getattr(config, name)}")


def check_positive(config: Any, *names: str) -> None:
    """The fields must be above 0; they may be infinite."""
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be positive, got {getattr(config, name)}")


def check_finite(config: Any, *names: str) -> None:
    """The fields must be finite and not negative."""
    for name in names:
        if not 0.0 <= getattr(config, name) < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, got {getattr(config, name)}")


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text stands for. Raises ValueError, in a user's words, for anything that is not one."""
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text, at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read (nested too deeply)") from error
