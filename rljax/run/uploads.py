"""An object store's part in a run: what is downloaded when it starts, what is uploaded while it goes on."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax.errors import ConfigError, OwnedError
from rljax.run.config import Config
from rljax.run.directory import check_same_run, saved_steps
from rljax.run.store import DamagedCopyError, StoppedUploadError, Store, StoreError

CHECKPOINT = "checkpoint"  # folder of a copy
RECORD = ("config.yaml", "metrics.jsonl")  # what else a resume needs
_LOOK_S = 1.0  # between two looks at the checkpoints
_AGAIN_S = 60.0  # before an upload that failed is tried again
_FINISH_S = 3.0  # of the grace, for what a run does after its last upload


def start_from_store(config: Config, run_dir: Path, moved: Callable[[], None] = lambda: None) -> Store | None:
    """The store of ``checkpoint.upload``, None without; a later copy than the run directory holds is put there.

    Args:
      config: of the run.
      run_dir: this process's.
      moved: called after each file that is downloaded.

    Raises:
      StoreError: the store cannot be used.
      ConfigError: it holds another run, or copies of which none is whole while the run directory holds no checkpoint.
    """
    if not config.checkpoint.upload:
        return None
    store = Store(config.checkpoint.upload)
    store.begin()
    here, there = max(saved_steps(run_dir), default=0), store.steps()
    if there and not here and config.run.resume != "auto":
        raise ConfigError(
            f"run.resume: {store.url} already holds a run, to step {there[-1]}, and run.resume = {config.run.resume}; "
            "give another checkpoint.upload, or run.resume = auto to go on"
        )
    # What was put aside as damaged is not taken back from a copy of the same damage.
    later = [step for step in there if step > here and not (run_dir / "damaged" / str(step)).exists()]
    for step in reversed(later):
        try:
            fetch(store, step, config, run_dir, moved)
        except DamagedCopyError as error:
            print(f"warning: {error}; the one before it is tried", file=sys.stderr)
            continue
        print(f"going on from checkpoint {step} of {store.url}")
        return store
    if later and not here:
        raise ConfigError(f"no checkpoint in {store.url} is whole; give another checkpoint.upload")
    return store


def fetch(store: Store, step: int, config: Config, run_dir: Path, moved: Callable[[], None]) -> None:
    """Puts a copy into the run directory; after an interrupted download nothing of it counts there.

    Raises:
      DamagedCopyError, StoreError: as ``Store.download``.
      ConfigError: it is of a run with other settings.
    """
    partial = run_dir / "checkpoints.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        store.download(step, partial, RECORD, moved)
        check_same_run(config, partial, store.url)
        store.download(step, partial, moved=moved)
        for name in RECORD:
            (partial / name).replace(run_dir / name)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        (partial / CHECKPOINT).rename(run_dir / "checkpoints" / str(step))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class Uploads:
    """Uploads the newest complete checkpoint of a run directory, in a thread. A context manager.

    Leaving it waits, within limits, until the newest one is uploaded. What fails is said in one line on stderr, and
    again only after an upload that did not fail.
    """

    def __init__(
        self,
        store: Store,
        run_dir: Path,
        *,
        keep: int,
        wait_s: float,
        check_owner: Callable[[], None] = lambda: None,
        left_s: Callable[[], float] = lambda: math.inf,
        waiting: Callable[[], None] = lambda: None,
    ):
        """Nothing happens before the context is entered.

        Args:
          store: takes the copies.
          run_dir: has ``checkpoints``, in which a folder whose name is a number is complete.
          keep: copies to keep.
          wait_s: longest time that leaving the context takes (seconds).
          check_owner: raises OwnedError once the directory is another process's; nothing is uploaded then.
          left_s: what is left of the time to end in (seconds).
          waiting: called while the end waits.
        """
        self._store, self._run_dir, self._keep, self._wait_s = store, run_dir, keep, wait_s
        self._check_owner, self._left_s, self._waiting = check_owner, left_s, waiting
        self._links = run_dir / "checkpoints.upload"
        self._ending = threading.Event()
        self._uploaded: int | None = None
        self._failed, self._failed_at, self._is_failing = -1, -math.inf, False
        self._thread = threading.Thread(target=self._work, name="rljax-uploads", daemon=True)

    def __enter__(self) -> Uploads:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._ending.set()
        wait_s = 0.0 if kind is not None and issubclass(kind, KeyboardInterrupt) else self._wait_s
        deadline = time.monotonic() + wait_s
        while self._thread.is_alive() and (left := min(deadline - time.monotonic(), self._left_s() - _FINISH_S)) > 0:
            self._waiting()
            self._thread.join(min(left, 0.2))
        newest = self._newest()
        if self._thread.is_alive() and newest != self._uploaded:
            print(f"warning: no time was left to upload checkpoint {newest} to {self._store.url}", file=sys.stderr)
        elif newest is not None and newest == self._uploaded:
            print(f"checkpoint {newest} is in {self._store.url}", file=sys.stderr)

    def _newest(self) -> int | None:
        return max(saved_steps(self._run_dir), default=None)

    def _work(self) -> None:
        is_last = False
        with contextlib.suppress(OwnedError):  # of which the loop of the run tells
            while not is_last:
                is_last = self._ending.wait(_LOOK_S)
                step = self._newest()
                again = step != self._failed or is_last or time.monotonic() - self._failed_at > _AGAIN_S
                if step is not None and step != self._uploaded and again:
                    is_last &= self._upload(step)
        shutil.rmtree(self._links, ignore_errors=True)

    def _upload(self, step: int) -> bool:
        """Returns whether it was tried to the end: False when a later one is wanted instead."""

        def check() -> None:
            if self._ending.is_set() and self._newest() != step:
                raise StoppedUploadError
            try:
                self._check_owner()
            except OwnedError as error:
                raise StoppedUploadError from error

        self._check_owner()
        try:
            link_files(self._run_dir, step, self._links)
            self._store.upload(step, self._links, self._keep, check)
        except StoppedUploadError:
            return False
        except OSError as error:
            if step not in saved_steps(self._run_dir):  # it was deleted, or put aside, while it was linked
                return False
            if not self._is_failing:
                why = error if isinstance(error, StoreError) else f"checkpoint {step} could not be uploaded: {error}"
                print(f"\nwarning: {why}; it is tried again", file=sys.stderr)
            self._failed, self._failed_at, self._is_failing = step, time.monotonic(), True
        else:
            self._uploaded, self._is_failing = step, False
        return True


def link_files(run_dir: Path, step: int, folder: Path) -> None:
    """Makes ``folder`` what is uploaded of a step: its files, linked since the run deletes old ones, and the record."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run_dir / "checkpoints" / str(step), folder / CHECKPOINT, copy_function=_link)
    shutil.copyfile(run_dir / "config.yaml", folder / "config.yaml")
    with (run_dir / "metrics.jsonl").open("rb") as rows, (folder / "metrics.jsonl").open("wb") as kept:
        kept.writelines(itertools.islice(rows, step))  # line n is the row of step n


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


@contextlib.contextmanager
def uploading(
    store: Store | None,
    config: Config,
    check_owner: Callable[[], None],
    left_s: Callable[[], float],
    waiting: Callable[[], None],
) -> Iterator[None]:
    """Inside it, the complete checkpoints of the run are uploaded; nothing happens without a store. See ``Uploads``."""
    if store is None:
        yield
        return
    wanted = config.checkpoint
    limits = {"keep": wanted.keep, "wait_s": wanted.upload_wait_s}
    hooks = {"check_owner": check_owner, "left_s": left_s, "waiting": waiting}
    with Uploads(store, Path(config.run.dir), **limits, **hooks):  # type: ignore[arg-type]
        yield
