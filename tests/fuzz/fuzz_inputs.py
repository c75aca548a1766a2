"""Gives malformed inputs to the commands, and counts what each made of them.

    python tests/fuzz/fuzz_inputs.py --examples 10000 --seed 1
    python tests/fuzz/fuzz_inputs.py --kinds yaml log --examples 500 --failures /tmp/failures

Each input is a sound file or command line with its values, structure or bytes damaged (``malformed_inputs.py``).
The commands run in this process, each in a folder of its own. An input is *refused* when the command ends with status 2
and one line on stderr, *accepted* when it does what it is for, and *failed* otherwise: a traceback, another status,
several lines, a line that is too long to read, more than the time limit, a file written outside the folder that the
command may write to, or an input changed. The exit status is 1 when any failed. An interrupt ends it early, with the
counts so far. Needs the extra ``test``.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import hypothesis
import sound_run
from hypothesis import HealthCheck, Phase
from malformed_inputs import KINDS, Case, Special
from sound_models import LORA, POLICIES
from tqdm import tqdm

from rljax import train
from rljax.commands import compare, plot, prepare, replay
from rljax.errors import caller_errors, run_cli
from rljax.evaluate import find_policy
from rljax.policy.peft import load_adapters
from rljax.sharding import MeshConfig, make_mesh

LONGEST_LINE = 2500  # characters of an error
# What Python says to a programmer: not what a user should read of an input.
PYTHON_WORDS = re.compile(
    r"not supported between|has no attribute|unhashable type|is not iterable|indices must be|unsupported operand|"
    r"is not subscriptable|positional argument|keyword argument|expected Invalid|object is not|codec can't|"
    r"recursion depth|has no len|must be real number|cannot be interpreted|cannot unpack|^error: :|Errno"
)
NOTICES = ("\r", "warning: ", "waiting for ")  # lines before the last one; \r: a progress bar
INTERRUPTED = 130  # what run_cli returns then
SHARES = {
    "yaml": 5,
    "arguments": 4,
    "problems": 4,
    "model": 4,
    "weights": 4,
    "adapters": 2,
    "tokens": 2,
    "log": 2,
    "record": 1,
    "resume": 2,
    "checkpoints": 2,
}
"""How many of the examples each kind gets."""


def load(words: Sequence[str]) -> int:
    """Reads shape and weights of a model directory, as the start of a run does."""
    with caller_errors():
        find_policy(words[0]).load(make_mesh(MeshConfig(1, 1)))
    return 0


def load_tiny_adapters(words: Sequence[str]) -> int:
    """Reads a directory of adapters on a tiny policy, as the start of a run with ``lora.adapter`` does."""
    with caller_errors():
        load_adapters(words[0], POLICIES["qwen3"], LORA)
    return 0


@dataclass(frozen=True)
class Command:
    """How a command is called and what it may do.

    Attributes:
      main: gets the words, returns the status.
      writes: top folders of the case that it may write into.
      accepted: statuses that mean that it did what it is for.
      last_line: part of the one line by which a command is stopped on purpose after all its inputs were read.
    """

    main: Callable[[Sequence[str]], int]
    writes: tuple[str, ...] = ()
    accepted: tuple[int, ...] = (0,)
    last_line: str | None = None


COMMANDS = {
    "dry run": Command(train.main),
    "train": Command(train.main, ("held",), (), "run.resume = never; give another run.dir"),
    "prepare": Command(prepare.main, ("out",)),
    "load": Command(load),
    "adapters": Command(load_tiny_adapters),
    "compare": Command(compare.main, ("out",), (0, 1)),
    "replay": Command(replay.main, ("out",)),
    "plot": Command(plot.main, ("run",)),
    "go on": Command(sound_run.go_on, ("run",)),
}


class Outcome(NamedTuple):
    """What a command made of a case: refused, accepted or failed; and what it said."""

    verdict: str
    detail: str


class TooLongError(BaseException):
    """The time limit is over; no handler of errors may catch it."""


def stop(signum: int, frame: FrameType | None) -> None:
    """The handler of the timer."""
    raise TooLongError


class Watch:
    """Notes every file that Python opens for writing, makes, moves or removes outside a folder."""

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
        names = given[:2] if event in ("os.rename", "os.link", "os.symlink") else given[:1]
        for name in names:
            if isinstance(name, str | bytes | os.PathLike):
                path = os.path.abspath(os.fsdecode(name))
                if not path.startswith((self.folder, *self._free)) and "__pycache__" not in path:
                    self.seen.append(f"{event} {path}")


WATCH = Watch()


def write_case(case: Case, folder: Path) -> None:
    """Writes the files of a case."""
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
    """Path -> what stands there, without the top folders of ``but``, whose own inputs are still listed."""
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
    """Runs one case in an empty folder."""
    write_case(case, folder)
    command = COMMANDS[case.command]
    before = contents(folder, command.writes)
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    here, trouble, status = Path.cwd(), "", -1
    WATCH.seen.clear()
    os.chdir(folder)
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        WATCH.folder = str(folder.resolve())
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run_cli(command.main, list(case.words))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        trouble = "" if end.code is None or isinstance(end.code, int) else f"sys.exit({end.code!r})"
    except TooLongError:
        trouble = f"more than {limit_s:g} s\n{traceback.format_exc()}"
    except BaseException as error:  # a panic of a Rust library is none of Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        trouble = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        WATCH.folder = None
        os.chdir(here)
    said = err.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]
    if not trouble:
        after = contents(folder, command.writes)
        inputs = {name: after.get(name) for name in before}
        if inputs != before:
            trouble = f"an input changed: {[name for name in before if inputs[name] != before[name]]}"
        elif new := [name for name in after if name not in before and name.split("/")[0] not in command.writes]:
            trouble = f"written outside {command.writes}: {new}"
        elif WATCH.seen:
            trouble = f"written outside the folder: {WATCH.seen[:5]}"
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return Outcome("failed", trouble) if trouble else judge(command, status, said)


def judge(command: Command, status: int, said: str) -> Outcome:
    """The outcome of a command that ended by itself."""
    lines = [line for line in said.split("\n") if line.strip() and not line.startswith(NOTICES)]
    if status == 2:
        if len(lines) != 1 or not lines[0].startswith("error: "):
            return Outcome("failed", f"status 2 with {len(lines)} lines: {said[:3000]}")
        if len(lines[0]) > LONGEST_LINE:
            return Outcome("failed", f"a line of {len(lines[0])} characters: {said[:300]}")
        if not lines[0].isprintable():
            return Outcome("failed", f"a line that does not print: {lines[0]!r}")
        if PYTHON_WORDS.search(lines[0]):
            return Outcome("failed", f"a line that only a programmer understands: {lines[0]}")
        meant = command.last_line is not None and command.last_line in lines[0]
        return Outcome("accepted" if meant else "refused", lines[0])
    if status not in command.accepted or "Traceback" in said:
        return Outcome("failed", f"status {status}: {said[:3000]}")
    return Outcome("accepted", said)


def signature(outcome: Outcome) -> str:
    """What failures of one cause have in common: the error and the place in this repository where it arose."""
    lines = [line for line in outcome.detail.splitlines() if line.strip()]
    frames = [
        line.split('"')[1].rpartition("/")[2] + line.split('"')[2]
        for line in lines
        if line.startswith("  File") and ("/rljax/" in line or "/fuzz/" in line) and "/site-packages/" not in line
    ]
    return f"{lines[-1][:60]} {frames[-1] if frames else ''}"


def inputs(kind: str, count: int, seed: int, visit: Callable[[Case], None]) -> None:
    """Calls ``visit`` with ``count`` cases of a kind; the same seed gives the same ones."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(KINDS[kind])
    def each(case: Case) -> None:
        visit(case)

    each()


@contextlib.contextmanager
def bounded_memory(gib: int) -> Iterator[None]:
    """At most so much more address space than now, so that an input that asks for more fails instead of the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + gib * 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Failures:
    """The failing inputs: of each cause the smallest one, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.causes = folder, dict[tuple[str, str], int]()

    def add(self, kind: str, case: Case, outcome: Outcome) -> None:
        """Keeps a case if it is the smallest of its cause so far."""
        cause = kind, signature(outcome)
        size = sum(len(content) if isinstance(content, bytes) else 1 for content in case.files.values())
        size += sum(map(len, case.words))
        if size >= self.causes.get(cause, size + 1):
            return
        self.causes[cause] = size
        folder = self._folder / f"{kind}-{list(self.causes).index(cause):03d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_case(case, folder)
        told = f"{case.command}: {case.words!r}\n\n{outcome.detail}\n"
        (folder / "outcome.txt").write_text(told, encoding="utf-8", errors="backslashreplace")


def fuzz(
    kind: str,
    count: int,
    seed: int,
    limit_s: float,
    failures: Failures,
    counts: Counter[str],
    progress: tqdm | None = None,
) -> None:
    """Tries ``count`` inputs of a kind; adds to ``counts`` how many were refused, accepted and failed."""

    def visit(case: Case) -> None:
        with tempfile.TemporaryDirectory(prefix="rljax-fuzz-") as folder:
            faulthandler.dump_traceback_later(
                10 * limit_s, exit=True, file=sys.__stderr__
            )  # no signal reaches some hangs
            outcome = run_case(case, Path(folder), limit_s)
            faulthandler.cancel_dump_traceback_later()
        counts[outcome.verdict] += 1
        if outcome.verdict == "failed":
            failures.add(kind, case, outcome)
        if progress is not None:
            progress.update()
            progress.set_postfix_str(f"{kind}, failed {counts['failed']}", refresh=False)

    inputs(kind, count, seed, visit)


def shares(kinds: Sequence[str], examples: int) -> dict[str, int]:
    """How many of the examples each kind gets, at least one."""
    whole = sum(SHARES[kind] for kind in kinds)
    return {kind: max(1, -(-examples * SHARES[kind] // whole)) for kind in kinds}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000, help="inputs in all (default: 10000)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of inputs (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="longest one input may take (seconds; default: 60)")
    parser.add_argument(
        "--failures",
        type=Path,
        default=Path("fuzz-failures"),
        help="folder for failing inputs (default: fuzz-failures)",
    )
    options = parser.parse_args(argv)
    wanted, failures = shares(options.kinds, options.examples), Failures(options.failures.absolute())
    total: Counter[str] = Counter()
    form = "{:<12} {:>7} {:>20} {:>9} {:>7} {:>8}"
    table = [form.format("kind", "tried", "refused in one line", "accepted", "failed", "seconds")]
    start, stopped = time.monotonic(), False
    with bounded_memory(8), tqdm(total=sum(wanted.values()), unit="input") as bar:
        for kind, count in wanted.items():
            began = time.monotonic()
            counts: Counter[str] = Counter()
            try:
                fuzz(kind, count, options.seed, options.limit_s, failures, counts, bar)
            except KeyboardInterrupt:
                stopped = True
            numbers = (counts.total(), counts["refused"], counts["accepted"], counts["failed"])
            table.append(form.format(kind, *numbers, round(time.monotonic() - began)))
            total += counts
            if stopped:
                break
    numbers = (total.total(), total["refused"], total["accepted"], total["failed"])
    table.append(form.format("all", *numbers, round(time.monotonic() - start)))
    print("\n".join(table))
    for (kind, cause), size in failures.causes.items():
        print(f"{kind}: {cause} (smallest: {size} bytes)")
    if total["failed"]:
        print(f"failing inputs: {options.failures}")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
