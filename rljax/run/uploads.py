"""The copies of a run in an object store: downloaded when the run starts, uploaded while it goes on."""

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
from functools import partial
from pathlib import Path
from typing import Any

from rljax.distributed.ownership import Ownership
from rljax.errors import ConfigError, OwnedError
from rljax.run.config import Config
from rljax.run.directory import check_owner, check_same_run, saved_steps
from rljax.run.stop import StopRequest
from rljax.run.store import DamagedCopyError, StoppedUploadError, Store, StoreError

CHECKPOINT = "checkpoint"
"""The folder of a copy that holds the checkpoint."""
RECORD = ("config.yaml", "metrics.jsonl")
"""The other files of a copy, which a resume needs."""
_LOOK_S = 1.0  # between two looks at the checkpoints
_AGAIN_S = 60.0  # before a failed upload is tried again
_FINISH_S = 3.0  # the part of the grace that a run needs after its last upload


def start_from_store(config: Config, run_dir: Path, stop: StopRequest | None = None) -> Store | None:
    """Opens the store of ``checkpoint.upload``; a copy later than the run directory's checkpoints is put there.

    Args:
      config: The configuration of the run.
      run_dir: The run directory, which this process owns.
      stop: The stop request of the run, which is told of each file that is downloaded. None: nobody is told.

    Returns:
      The store. None: the run has none.

    Raises:
      StoreError: The store cannot be used.
      ConfigError: The store holds another run; or no copy in it is whole, and the run directory has no checkpoint.
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
    # A copy of a checkpoint that was set aside may have the same damage.
    later = [step for step in there if step > here and not (run_dir / "damaged" / str(step)).exists()]
    for step in reversed(later):
        try:
            fetch(store, step, config, run_dir, stop)
        except DamagedCopyError as error:
            print(f"warning: {error}; the one before it is tried", file=sys.stderr)
            continue
        print(f"going on from checkpoint {step} of {store.url}")
        return store
    if later and not here:
        raise ConfigError(f"no checkpoint in {store.url} is whole; give another checkpoint.upload")
    return store


def fetch(store: Store, step: int, config: Config, run_dir: Path, stop: StopRequest | None) -> None:
    """Puts a copy into the run directory; the files of an interrupted download do not count there.

    Raises:
      DamagedCopyError: The copy does not read back as it was written.
      StoreError: The store cannot be reached, or refuses.
      ConfigError: The copy is one of a run with other settings.
    """
    partial = run_dir / "checkpoints.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        store.download(step, partial, RECORD, stop)
        check_same_run(config, partial, store.url)
        store.download(step, partial, stop=stop)
        for name in RECORD:
            (partial / name).replace(run_dir / name)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        (partial / CHECKPOINT).rename(run_dir / "checkpoints" / str(step))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class Uploads:
    """The uploads of a run, a context manager: a thread copies each newest complete checkpoint to the store.

    Leaving the context waits, within limits, until the newest one is uploaded. A failure is said in one line on
    stderr, and the next one only after an upload that succeeded.
    """

    def __init__(
        self,
        store: Store,
        run_dir: Path,
        *,
        keep: int,
        wait_s: float,
        check_owner: Callable[[], None] = lambda: None,
        stop: StopRequest | None = None,
    ) -> None:
        """Prepares the thread, which starts when the context is entered.

        Args:
          store: The store that takes the copies.
          run_dir: The run directory; a folder of its ``checkpoints`` whose name is a number is complete.
          keep: The number of copies to keep.
          wait_s: The longest time that leaving the context takes, in seconds.
          check_owner: A function that raises OwnedError once another process owns the directory, which ends uploads.
          stop: The stop request of the run. None: the run is never asked to stop.
        """
        self._store, self._run_dir, self._keep, self._wait_s = store, run_dir, keep, wait_s
        self._check_owner, self._stop = check_owner, stop or StopRequest()
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
        while self._thread.is_alive():
            left_s = min(deadline - time.monotonic(), self._stop.left_s() - _FINISH_S)
            if left_s <= 0:
                break
            self._stop.at("upload")
            self._thread.join(min(left_s, 0.2))
        newest = self._newest()
        if self._thread.is_alive() and newest != self._uploaded:
            print(f"warning: no time was left to upload checkpoint {newest} to {self._store.url}", file=sys.stderr)
        elif newest is not None and newest == self._uploaded:
            print(f"checkpoint {newest} is in {self._store.url}", file=sys.stderr)

    def _newest(self) -> int | None:
        return max(saved_steps(self._run_dir), default=None)

    def _work(self) -> None:
        is_last = False
        with contextlib.suppress(OwnedError):  # the loop of the run says so
            while not is_last:
                is_last = self._ending.wait(_LOOK_S)
                step = self._newest()
                again = step != self._failed or is_last or time.monotonic() - self._failed_at > _AGAIN_S
                if step is not None and step != self._uploaded and again:
                    is_last &= self._upload(step)
        shutil.rmtree(self._links, ignore_errors=True)

    def _upload(self, step: int) -> bool:
        """Uploads the checkpoint of ``step``; returns False if a later one is wanted instead."""

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
            if step not in saved_steps(self._run_dir):  # it was deleted or moved aside while it was linked
                return False
            if not self._is_failing:
                why = error if isinstance(error, StoreError) else f"checkpoint {step} could not be uploaded: {error}"
                print(f"\nwarning: {why}; it is tried again", file=sys.stderr)
            self._failed, self._failed_at, self._is_failing = step, time.monotonic(), True
        else:
            self._uploaded, self._is_failing = step, False
        return True


def link_files(run_dir: Path, step: int, folder: Path) -> None:
    """Fills ``folder`` with the files to upload for a step: links to its checkpoint's files, and the record so far.

    The run may delete the checkpoint meanwhile; the links keep its files.
    """
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
def uploading(store: Store | None, config: Config, owner: Ownership, stop: StopRequest) -> Iterator[None]:
    """Uploads the complete checkpoints of the run inside the block; without a store it does nothing."""
    if store is None:
        yield
        return
    limits: dict[str, Any] = {"keep": config.checkpoint.keep, "wait_s": config.checkpoint.upload_wait_s}
    with Uploads(store, Path(config.run.dir), **limits, check_owner=partial(check_owner, owner), stop=stop):
        yield
