"""Records what a real vLLM server answered in one run, and replays it in another run, which publishes for real.

The weights of two runs may differ in a last bit, and this changes what a server samples. A process that imports this at
its start writes its responses to the folder ``RLJAX_RECORD``, or takes them from the folder ``RLJAX_REPLAY``.
"""

import os
import pickle
from pathlib import Path

from rljax.rollout.engine import Samples
from rljax.rollout.servers.engine import ServedEngine


def install():
    recorded, replayed = os.environ.get("RLJAX_RECORD"), os.environ.get("RLJAX_REPLAY")
    plain, calls = ServedEngine.generate, iter(range(10**6))

    def record(self, prompts, n, sampling, *, seed):
        samples = plain(self, prompts, n, sampling, seed=seed)
        kept = list(prompts), list(samples.responses), samples.metrics
        (Path(recorded) / f"{next(calls)}.pickle").write_bytes(pickle.dumps(kept))
        return Samples(iter(kept[1]), samples.metrics)

    def replay(self, prompts, n, sampling, *, seed):
        asked, responses, metrics = pickle.loads((Path(replayed) / f"{next(calls)}.pickle").read_bytes())
        assert [list(prompt) for prompt in asked] == [list(prompt) for prompt in prompts]
        if self._config.colocated:  # the server samples nevertheless, and sleeps afterwards
            metrics = (samples := plain(self, prompts, n, sampling, seed=seed)).metrics
            list(samples.responses)
        return Samples(iter(responses), metrics)

    ServedEngine.generate = record if recorded else replay
