"""Real processes that publish the shards that they hold, and checks of a mirror of the shards."""

import json
import sys
from pathlib import Path

import numpy as np
from process_runs import Group
from safetensors.numpy import load_file
from toy_runs import ROOT
from waiting import free_port, until

from rljax.weights.pull import pull
from rljax.weights.source import open_source
from rljax.weights.sums import bits_of

ANSWER_S = 240


class Publishers(Group):
    def __init__(self, root, count, store="http", host="127.0.0.1", heartbeat_s=10.0, coordinator=None, inside=None):
        coordinator, inside = coordinator or "127.0.0.1", inside or (lambda index: ())
        self.root, self.answered = root, 0
        root.mkdir(exist_ok=True)
        program = [sys.executable, ROOT / "tests/support/publishing_processes.py"]
        told = [count, f"{coordinator}:{free_port()}", store, host, root, heartbeat_s]
        super().__init__(root / "said", [[*inside(index), *program, index, *told] for index in range(count)])

    def ask(self, share):
        leader = self.processes[0]
        leader.stdin.write(f"{share}\n")
        leader.stdin.flush()

    def answer(self):
        """Returns the answer of process 0 to the oldest request without one."""
        path = self.root / f"answers/{self.answered}.json"
        until(path.exists, ANSWER_S, said=self.printed, may_come=lambda: self.processes[0].poll() is None)
        self.answered += 1
        return json.loads(path.read_text())

    def publish(self, share=0.05):
        self.ask(share)
        told = self.answer()
        assert "error" not in told, told
        return told

    def end(self):
        self.processes[0].stdin.close()
        return [process.wait(120) for process in self.processes]

    def own(self, index):
        (found,) = (self.root / f"process_{index}").glob("rljax-weights-*")
        return found

    def truth(self, number):
        return np.load(self.root / f"truth/{number}.npz")


def take(told, mirror):
    return pull(open_source(told["source"]), Path(told["path"]).name, mirror)


def assert_holds(mirror, truth):
    """Checks that a mirror equals, bit for bit, what was gathered from the devices of all processes."""
    found = {}
    for file in json.loads((mirror.root / "version.json").read_text())["files"]:
        found |= load_file(mirror.root / file)
    assert found.keys() == set(truth.files)
    for name, array in found.items():
        np.testing.assert_array_equal(bits_of(array).reshape(truth[name].shape), truth[name], err_msg=name)
