"""Two network namespaces of this machine that act as two machines, with a shaped link between them; needs root."""

import contextlib
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Side:
    name: str
    device: str
    address: str

    @property
    def inside(self):
        """The words that run a command there, when they stand before it."""
        return "ip", "netns", "exec", self.name

    def sent_bytes(self):
        return int(_run(*self.inside, "cat", f"/sys/class/net/{self.device}/statistics/tx_bytes"))

    def set_up(self, up):
        """Brings this side of the link up, or cuts the link."""
        _run(*self.inside, "ip", "link", "set", self.device, "up" if up else "down")


@contextlib.contextmanager
def linked(first, second, rate="1gbit"):
    """Makes both namespaces for the block, or raises CalledProcessError; what each sends is shaped to ``rate`` (tc)."""
    sides = (first, second)
    try:
        for side in sides:
            _run("ip", "netns", "add", side.name)
        peer = ("type", "veth", "peer", "name", second.device, "netns", second.name)
        _run("ip", "link", "add", first.device, "netns", first.name, *peer)
        for side in sides:
            _run(*side.inside, "ip", "addr", "add", f"{side.address}/30", "dev", side.device)
            side.set_up(True)
            _run(*side.inside, "ip", "link", "set", "lo", "up")
            shaped = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            _run(*side.inside, "tc", "qdisc", "add", "dev", side.device, "root", *shaped)
        yield
    finally:
        for side in sides:
            subprocess.run(["ip", "netns", "del", side.name], capture_output=True, check=False)


def _run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
