"""A receiver of trajectories that runs, with its queue and a client, and the rubbish that strangers may send to it."""

import json

import httpx
from external_rows import make_row

from rljax.rollout.external.queue import TrajectoryQueue
from rljax.rollout.external.receiver import MOST_ROWS, Receiver
from rljax.rollout.external.rows import RowLimits
from rljax.rollout.types import SamplingParams

LIMITS = RowLimits(16, 4, SamplingParams(8))
FACTS = {"group_size": 2, "batch_size": 1, "max_staleness": 9}


class Served:
    """A receiver on a free port, its queue, and a client; ``max_groups`` is 2."""

    def __init__(self, spool, url="http://127.0.0.1:0", **options):
        spool.mkdir(exist_ok=True)
        self.spool = spool
        self.queue = TrajectoryQueue(spool, LIMITS, group_size=2, max_staleness=9)
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
