"""The exceptions that several subpackages use, the exit statuses of programs, and checks of configuration fields."""

from __future__ import annotations

import errno
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A mistake of the caller. The message is one printable line; the middle of a very long one is cut out."""

    exit_status = 2
    LONGEST = 2000  # characters

    def __init__(self, message: object) -> None:
        shown = printable(str(message))
        half = self.LONGEST // 2
        super().__init__(shown if len(shown) <= self.LONGEST else f"{shown[:half]} ... {shown[-half:]}")


def printable(text: str) -> str:
    """Returns a text in one line, in which a letter that cannot be printed is written as its escape sequence."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in " ".join(text.split()))


def describe(error: BaseException) -> str:
    """Describes an exception in one printable line of at most 300 characters."""
    try:
        text = printable(str(error)[:3000])
    except Exception:  # a user's exception may fail in str()
        text = ""
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


@contextmanager
def caller_errors(*more: type[Exception]) -> Iterator[None]:
    """Turns a ``ValueError``, ``OSError``, ``ServerError`` or one of ``more`` into a ``ConfigError``.

    Use it for a ``with`` block that checks arguments and opens inputs, never around the work itself. A StartAgainError
    passes. So does a BrokenPipeError, because ``run_cli`` ends silently if nobody reads the output any more.
    """
    caught: tuple[type[Exception], ...] = (ValueError, ServerError, *more)
    try:
        yield
    except (ConfigError, StartAgainError, BrokenPipeError):
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}" if error.filename else error) from error
    except caught as error:
        raise ConfigError(error) from error


def install_words(extra: str) -> str:
    """Returns the words that say how to install rljax with an ``extra``, from a checkout or a wheel."""
    return f"pip install '.[{extra}]' in a checkout of rljax, or 'WHEEL[{extra}]' with its wheel"


class MissingPackageError(ConfigError):
    """An error of a caller who needs a package that is not installed."""


def import_for(user: str, module: str, extra: str, package: str = "") -> ModuleType:
    """Imports a module of rljax for ``user``, the name of the caller's feature in messages.

    Raises MissingPackageError if the module needs a package that is missing. The message names ``package``, or else the
    one whose import failed, and says how to install ``extra``. If a module of rljax itself is missing, the error of the
    import passes.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "rljax"):
            raise
        remedy = f"which is not installed: {install_words(extra)}"
        raise MissingPackageError(f"{user} needs the package {package or missing}, {remedy}") from error


class ServerError(RuntimeError):
    """A failure of a server."""


class ServerGoneError(ServerError):
    """The server does not answer, or its engine is broken. Try again when it is back."""


class ServerRefusedError(ServerError):
    """The server answered and refused. Trying again does not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ReplyError(ServerError):
    """The server answered, but its reply cannot be used: it has a wrong form, or answers something else."""


class OtherPromptError(ReplyError):
    """A reply answers another prompt than its request has. Something between trainer and server mixes replies up."""


class ServersLostError(ServerError):
    """No server is left to sample. A server that comes back cannot be verified before the next publish."""


class HandshakeError(ValueError):
    """Trainer and server do not fit together. The message has one line for each difference."""


class VerificationError(RuntimeError):
    """The server does not sample from the trainer's weights. A run without another server ends with this message."""

    exit_status = 1


class ServerFailedError(RuntimeError):
    """The server ended or did not become healthy in time. The message ends with the tail of its log."""


START_AGAIN_STATUS = 75  # EX_TEMPFAIL: a run lost another of its processes, and the same command continues it


class StartAgainError(RuntimeError):
    """Another process of the run failed or was lost. The same command continues from the last checkpoint."""

    exit_status = START_AGAIN_STATUS


_IN_ONE_LINE = (ConfigError, StartAgainError, VerificationError)


class NotWrittenError(RuntimeError):
    """Files could not be written. The message names them and the reason."""


class OwnedError(ValueError):
    """Another living process owns the path that this process wanted to claim. The message names the owner."""


class StoppedWaitingError(RuntimeError):
    """The run was asked to stop while it waited for servers that are gone, for responses, or for trajectories."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the name ``path`` to an ``OSError`` of a ``with`` block that names no file, as after a failed write."""
    try:
        yield
    except OSError as error:
        if error.filename or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error


@contextmanager
def full_disk_errors() -> Iterator[None]:
    """Turns a ``NotWrittenError``, or an ``OSError`` of a full disk or quota, into a ``ConfigError``; others pass."""
    try:
        yield
    except NotWrittenError as error:
        raise ConfigError(error) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with caller_errors():
            raise


_REPEAT_S = 0.02  # the time after which the callback has returned (seconds)


def run_cli(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Runs the ``main`` of a program and returns the exit status.

    A ``ConfigError``, ``StartAgainError`` or ``VerificationError`` becomes one line ``error: ...`` on stderr, with
    status 2, ``START_AGAIN_STATUS`` or 1. An interrupt gives status 130. If the reader of standard output has closed
    it, as ``head`` does, the program ends silently with status 141. Every other error keeps its traceback. A plain
    ``ValueError`` is one of them, because deep in a run it is a bug.

    ``argv`` are the arguments of ``main``. None: ``sys.argv[1:]``.
    """
    try:
        with _kept_interrupts():
            status = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except (*_IN_ONE_LINE, KeyboardInterrupt) as error:
        print_end(error)
        return exit_status(error)
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # The interpreter flushes standard output when it exits.
        return 128 + signal.SIGPIPE
    return status


@contextmanager
def _kept_interrupts() -> Iterator[None]:
    """Repeats an interrupt that came inside a callback whose errors Python ignores, as jax's for garbage."""
    before = sys.unraisablehook

    def repeat(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(_REPEAT_S, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            before(lost)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before


def _reader_left() -> bool:
    """Returns whether nobody reads standard output any more, as after ``| head``."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def exit_status(error: BaseException) -> int:
    """Returns the exit status of a program that ends with ``error``."""
    if isinstance(error, _IN_ONE_LINE):
        return error.exit_status
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def print_end(error: BaseException) -> None:
    """Prints on stderr why a program ends: one line for an expected error, a traceback for any other."""
    if isinstance(error, _IN_ONE_LINE):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    elif isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


def check_choices(config: Any) -> None:
    """Raises ValueError unless each ``Literal`` field of the dataclass instance ``config`` has one of its choices."""
    for name, declared in get_type_hints(type(config)).items():
        if get_origin(declared) is Literal and (value := getattr(config, name)) not in get_args(declared):
            raise ValueError(f"{name} must be one of {get_args(declared)}, got {value!r}")


def check_at_least(config: Any, least: int, *names: str) -> None:
    """Raises ValueError if one of the fields ``names`` of ``config`` is below ``least`` or NaN."""
    wanted = f"be at least {least}" if least else "not be negative"
    _check_each(config, names, lambda value: value >= least, wanted)


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError unless the fields ``names`` of ``config`` are above 0. They may be infinite."""
    _check_each(config, names, lambda value: value > 0, "be positive")


def check_finite(config: Any, *names: str) -> None:
    """Raises ValueError unless the fields ``names`` of ``config`` are finite and not negative."""
    _check_each(config, names, lambda value: 0.0 <= value < float("inf"), "be finite and not negative")


def _check_each(config: Any, names: Sequence[str], is_right: Callable[[Any], bool], wanted: str) -> None:
    for name in names:
        if not is_right(getattr(config, name)):
            raise ValueError(f"{name} must {wanted}, got {getattr(config, name)}")


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Puts ``where`` and a colon before the message of a ``ValueError`` that a ``with`` block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is not UTF-8 or not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text, at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read (nested too deeply)") from error


def name_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns a text that names each key whose value in ``now`` is new, with the old and the new value; "" for none."""
    changed = [key for key, value in now.items() if before.get(key) != value]
    return ", ".join(f"{key} ({before.get(key)} there, {now[key]} now)" for key in changed)
