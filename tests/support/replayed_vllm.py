"""Keeps what a real vLLM server answered in one run, and gives it to another, whose publishes stay real.

Of two runs the weights may differ in a last bit, which changes what a server samples. A process that imports this at
its start (``sitecustomize``) writes its responses to ``RLJAX_RECORD``, or takes them from ``RLJAX_REPLAY``, a folder.
"""

import os
import pickle
from pathlib import Path

from rljax.rollout.servers.engine import ServedEngine


def install():
    recorded, replayed = os.environ.get("RLJAX_RECORD"), os.environ.get("RLJAX_REPLAY")
    plain, calls = ServedEngine.generate, iter(range(10**6))

    def record(self, prompts, n, sampling, *, seed):
        responses = list(plain(self, prompts, n, sampling, seed=seed))
        (Path(recorded) / f"{next(calls)}.pickle").write_bytes(pickle.dumps((list(prompts), responses)))
        return iter(responses)

    def replay(self, prompts, n, sampling, *, seed):
        asked, responses = pickle.loads((Path(replayed) / f"{next(calls)}.pickle").read_bytes())
        assert [list(prompt) for prompt in asked] == [list(prompt) for prompt in prompts]
        if self._config.colocated:  # the server samples all the same, and sleeps then
            list(plain(self, prompts, n, sampling, seed=seed))
        return iter(responses)

    ServedEngine.generate = record if recorded else replay
