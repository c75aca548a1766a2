"""Trackers for ``record.trackers``: one keeps what it receives in a file, and some fail or hang."""

import json
import sys
import threading
import time


class Kept:
    """A tracker that appends each call to a file in its directory; the file is named after the class."""

    def __init__(self, run):
        self.path = run.directory / f"{type(self).__name__}.jsonl"
        self.where = str(self.path)
        begun = {"id": run.id, "name": run.name, "project": run.project}
        self.keep(begun=begun, seed=run.config.get("seed"), nested=run.settings.get("a.b"))

    def keep(self, **entry):
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def log(self, row):
        self.keep(row=row)

    def finish(self, summary, figures, failed):
        self.keep(summary=summary, figures=[*figures], failed=failed)

    @classmethod
    def abandon(cls):
        print(f"{cls.__name__} is abandoned", file=sys.stderr)


class FailsToStart(Kept):
    def __init__(self, run):
        raise OSError("no\nserver")


class FailsToLog(Kept):
    def log(self, row):
        if row["step"] == 3:
            sys.exit("out of quota")
        super().log(row)


class FailsToFinish(Kept):
    def finish(self, summary, figures, failed):
        raise ValueError


def hang(*told):
    threading.Event().wait()


class HangsAtStart(Kept):
    __init__ = hang


class HangsAtLog(Kept):
    def log(self, row):
        if row["step"] == 3:
            hang()
        super().log(row)


class HangsAtFinish(Kept):
    finish = hang


class Slow(Kept):
    def log(self, row):
        time.sleep(0.1)
        super().log(row)


class Refuses(Kept):
    @staticmethod
    def check():
        raise ValueError("not logged in")


def read(run_dir, kind="*"):
    """Returns the calls that the trackers of one class, or of all classes, wrote down."""
    lines = [line for path in run_dir.glob(f"trackers/{kind}.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]
