"""Runs a command on one input, in this process and in its own folder, and judges the result.

An input is *refused* if the command ends with status 2 and one line on stderr. It is *accepted* if the command does its
task. Everything else is a failure, such as a file outside the folders of the command or a changed input.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from malformed_inputs import LORA, POLICIES, Case, Special

from rljax import train
from rljax.commands import compare, diagnose, plot, prepare, replay, view
from rljax.errors import caller_errors, run_cli
from rljax.evaluate import find_policy
from rljax.policy.peft import load_adapters
from rljax.sharding import MeshConfig, make_mesh

LONGEST_LINE = 2500  # the number of characters of an error
# Phrases that Python prints for a programmer. A user should not read them about an input.
PYTHON_WORDS = re.compile(
    r"not supported between|has no attribute|unhashable type|is not iterable|indices must be|unsupported operand|"
    r"is not subscriptable|positional argument|keyword argument|expected Invalid|object is not|codec can't|"
    r"recursion depth|has no len|must be real number|cannot be interpreted|cannot unpack|^error: :|Errno"
)
NOTICES = ("\r", "warning: ", "waiting for ")  # starts of lines before the last one; \r is a progress bar
TABLE_HEAD = r"data +rows +no answer +over .* tokens +repeated prompts +answers that fail"
INTERRUPTED = 130  # the status of run_cli after an interrupt


def load(words: Sequence[str]) -> int:
    with caller_errors():
        find_policy(words[0]).load(make_mesh(MeshConfig(1, 1)))
    return 0


def load_tiny_adapters(words: Sequence[str]) -> int:
    with caller_errors():
        load_adapters(words[0], POLICIES["qwen3"], LORA)
    return 0


class Command(NamedTuple):
    """A command: its function, the folders that it may write, and its acceptable results."""

    main: Callable[[Sequence[str]], int]
    writes: tuple[str, ...] = ()  # top folders of the case that the command may write into
    accepted: tuple[int, ...] = (0,)  # statuses that mean success
    last_line: str | None = None  # part of the line that stops it on purpose after all its inputs were read


COMMANDS = {
    "dry run": Command(train.main),
    "train": Command(train.main, ("held",), (), "run.resume = never; give another run.dir"),
    **{"prepare": Command(prepare.main, ("out",)), "load": Command(load), "adapters": Command(load_tiny_adapters)},
    **{"compare": Command(compare.main, ("out",), (0, 1)), "diagnose": Command(diagnose.main, (), (0, 1))},
    **{"silent": Command(diagnose.main, (), (1,)), "replay": Command(replay.main, ("out",))},
    **{"view": Command(view.main, ("out",)), "plot": Command(plot.main, ("run",))},
}


class Outcome(NamedTuple):
    """The result of a case: whether the command accepted its input, and what it printed."""

    accepted: bool
    said: str


class TooLongError(BaseException):
    """An error for the end of the time limit; no handler of errors may catch it."""


def stop(*_: Any) -> None:
    raise TooLongError


class Watch:
    """A watch that notes every file that Python opens for writing, makes, moves or removes outside a folder."""

    EVENTS = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        caches = [os.environ.get("JAX_COMPILATION_CACHE_DIR", ""), os.environ.get("MPLCONFIGDIR", "")]
        self._free = ("/dev/", "/proc/", *(os.path.abspath(cache) for cache in caches if cache))
        sys.addaudithook(self._note)

    def _note(self, event: str, given: tuple[Any, ...]) -> None:
        if self.folder is None or not (event == "open" or event in self.EVENTS):
            return
        if event == "open" and not (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return
        for name in given[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
            if isinstance(name, str | bytes | os.PathLike):
                path = os.path.abspath(os.fsdecode(name))
                if not path.startswith((self.folder, *self._free)) and "__pycache__" not in path:
                    self.seen.append(f"{event} {path}")


WATCH = Watch()


def write_case(case: Case, folder: Path) -> None:
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is Special.DIRECTORY:
            path.mkdir(exist_ok=True)
        elif content is Special.UNREADABLE:
            path.touch(0o000)
        else:
            path.symlink_to(path.name if content is Special.LOOP else "nothing-there")


def contents(folder: Path, but: Sequence[str]) -> dict[str, str]:
    """Returns the content of each path, except in the top folders ``but``, of which only the inputs are listed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.split("/")[0] in but and not name.endswith((".jsonl", ".yaml", ".parquet")):
            continue
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else ""
        readable = not kind and os.access(path, os.R_OK)
        found[name] = kind or (hashlib.sha1(path.read_bytes()).hexdigest() if readable else "unreadable")
    return found


def run_case(case: Case, folder: Path, limit_s: float) -> Outcome:
    """Runs one case in a folder; raises AssertionError, or what the command raised, if it fails."""
    folder.mkdir(exist_ok=True)
    write_case(case, folder)
    command = COMMANDS[case.command]
    before = contents(folder, command.writes)
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    WATCH.seen.clear()
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        WATCH.folder = str(folder.resolve())
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with contextlib.chdir(folder), streams[0], streams[1], warnings.catch_warnings():
            warnings.simplefilter("default", RuntimeWarning)
            warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
            status = run_cli(command.main, list(case.words))
    except SystemExit as end:
        status = end.code or 0
    except TooLongError as error:
        raise AssertionError(f"more than {limit_s:g} s") from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        WATCH.folder = None
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    after = contents(folder, command.writes)
    changed = [name for name in before if after.get(name) != before[name]]
    assert not changed, f"an input changed: {changed}"
    new = [name for name in after if name not in before and name.split("/")[0] not in command.writes]
    assert not new, f"written outside {command.writes}: {new}"
    assert not WATCH.seen, f"written outside the folder: {WATCH.seen[:5]}"
    return judge(command, status, err.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]


def judge(command: Command, status: object, said: str) -> Outcome:
    """Returns the outcome of a command that ended by itself; raises AssertionError if it is a failure."""
    trouble = f"status {status}: {said[:3000]}"
    if status != 2:
        assert status in command.accepted, trouble
        assert "Traceback" not in said, trouble
        return Outcome(True, said)
    lines = [line for line in said.split("\n") if line.strip() and not line.startswith(NOTICES)]
    if lines and re.fullmatch(TABLE_HEAD, lines[0]):
        assert all(map(str.isprintable, lines)), trouble
        del lines[:-1]  # the table of the data comes before the error about the rest
    assert len(lines) == 1, f"status 2 with {len(lines)} lines: {said[:3000]}"
    (line,) = lines
    assert line.startswith("error: "), trouble
    assert len(line) <= LONGEST_LINE, f"a line of {len(line)} characters: {line[:300]}"
    assert line.isprintable(), f"a line that does not print: {line!r}"
    assert not PYTHON_WORDS.search(line), f"a line that only a programmer understands: {line}"
    return Outcome(command.last_line is not None and command.last_line in line, line)
