"""Rows of trajectories as another program makes them (at least 16 tokens), rubbish, and a receiver that gets both."""

import json

import httpx

from rljax.rollout.external.queue import TrajectoryQueue
from rljax.rollout.external.receiver import MOST_ROWS, Receiver
from rljax.rollout.external.rows import RowLimits
from rljax.rollout.types import SamplingParams

LIMITS = RowLimits(16, 4, SamplingParams(8))
FACTS = {"group_size": 2, "batch_size": 1, "max_staleness": 9}


def make_row(group, reward, version=0, tokens=(3, 4, 5), **more):
    """Returns a row of one turn whose tokens all have log-probability -1."""
    row = {"group": group, "prompt_ids": [1, 2], "token_ids": list(tokens), "mask": [True] * len(tokens)}
    return row | {"logprobs": [-1.0] * len(tokens), "reward": reward, "version": version} | more


def write_file(path, rows):
    """Writes JSONL as a writer should: first under another name, which it then renames."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.rename(path)


class Served:
    def __init__(self, spool, url="http://127.0.0.1:0", **options):
        spool.mkdir(exist_ok=True)
        self.spool, self.queue = spool, TrajectoryQueue(spool, LIMITS, group_size=2, max_staleness=9)
        self.queue.start(0, 0)
        self.receiver = Receiver(url, self.queue, max_groups=2, facts=FACTS, **options)

    def __enter__(self):
        self.receiver.start()
        self.client = httpx.Client(base_url=self.receiver.url, timeout=20)
        return self

    def __exit__(self, *exception):
        self.client.close()
        self.receiver.close()

    def post(self, *rows, **headers):
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post("/trajectories", json=list(rows), headers=names)

    def files(self):
        return sorted(path.name for path in self.spool.iterdir())

    def rewards(self, step=1):
        groups = self.queue.take(1, step)
        return groups and [[one.reward for one in group] for group in groups]


def rubbish(size):
    """Yields the content type and the body of requests of about ``size`` bytes that hold no row."""
    row = json.dumps(make_row("a", 1)).encode()
    yield "application/msgpack", b"\xdd" + (MOST_ROWS - 1).to_bytes(4, "big") + b"\x80" * size
    yield "application/msgpack", b"\xdd" + size.to_bytes(4, "big") + b"\x80" * size
    yield "application/json", b"[" + b"{}," * (size // 3) + b"{}]"
    yield "application/json", b"[" + row + b"," + b"{}," * (size // 3) + b"{}]"
    yield "application/json", b"[" + row + b',{"reward": NaN},' + b"{}," * (size // 3) + b"{}]"
    yield "application/json", b'{"group":' + b"[]," * (size // 3) + b"[]}"
    yield "application/json", row[:-1] + b', "more": [' + b"{}," * (size // 3) + b"{}], 3}"
    yield "application/jsonl", b"{}\n" * (size // 3)
