"""Publishes 0.6B parameters over a link of 1 Gbit/s, also while the link is cut or the trainer is killed.

    python tests/harness/publish_over_link.py --json benchmarks/publish_link.json

Two network namespaces of this machine act as two machines (this needs root). On one side is a trainer that only
publishes, on the other a real vLLM server. The policy has the shape of Qwen3-0.6B and random weights, 1.2 GB in
bfloat16. The trainer publishes all of it (dense), then 1% changed (a delta), then all changed (dense again). It then
publishes all changed while the link is cut for some seconds. During the next publish the trainer is killed with
SIGKILL. The server must then have the version before, and sample from it. At last a new trainer publishes. Each publish
is verified as always.

Next to the load time of the first publishes is the time of vLLM's own reload of the model's files (``reload_weights``).
It reads from the page cache, without checksums. The exit status is 1 if anything differs from this description.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from network_link import Side, linked
from publishing_trainer import MAX_TOKENS
from tqdm import tqdm

from rljax.errors import ConfigError, run_cli
from rljax.policy.config import PolicyConfig
from rljax.rollout.servers.vllm.server import vllm_python

HERE = Path(__file__).resolve().parent
TRAINER, SERVER = Side("rljax-trainer", "rljax-lt", "10.203.1.1"), Side("rljax-server", "rljax-ls", "10.203.1.2")
PORT = 18732
GIGABIT = 125e6  # bytes in a second
SHAPES = {
    "0.6B": PolicyConfig(151936, 1024, 3072, 28, 16, 8, 128, rope_theta=1e6, tie_word_embeddings=True),
    "tiny": PolicyConfig(4096, 256, 512, 2, 4, 2, 64, rope_theta=1e6, tie_word_embeddings=True),
}
LONGEST_S = 580.0  # the limit for a start of a server, or for a publish
ASK = """
import json, sys, urllib.request
url, key, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"Content-Type": "application/json",
                                 "Authorization": "Bearer " + key})
print(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300).read().decode())
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B", help="of the policy (default: 0.6B)")
    parser.add_argument("--deltas", type=int, default=3, help="publishes of 1%% changed (default: 3)")
    parser.add_argument("--cut-s", type=float, default=8.0, help="how long the link is cut (default: 8)")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        raise ConfigError("network namespaces need root")
    found: dict[str, Any] = {"command": f"python tests/harness/publish_over_link.py {' '.join(argv)}".strip()}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name, linked(TRAINER, SERVER):
        directory = Path(name)
        model = directory / "model"
        made = multiprocessing.get_context("spawn").Process(target=make_model, args=(model, options.shape))
        made.start()
        made.join(LONGEST_S)
        found["model_bytes"] = (model / "model.safetensors").stat().st_size
        with serve(directory) as server, tqdm(total=options.deltas + 5, unit="publish", disable=None) as progress:
            with Trainer(directory, "first") as trainer:
                found["publishes"] = []
                for kind, share in [("dense, the first", 0.0), *[("delta", 0.01)] * options.deltas, ("dense", 1.0)]:
                    published = {"kind": kind, **trainer.publish(share)}
                    found["publishes"].append({**published, "reload_s": round(server.reload(model), 2)})
                    progress.update()
                cut = found["link_cut"] = cut_in_mid_pull(trainer, options.cut_s, found["model_bytes"])
                progress.update()
                before = server.held()
                trainer.begin(1.0)
                trainer.wait_for_bytes(found["model_bytes"] // 3)
                trainer.end()
            after = server.held()
            found["trainer_killed"] = {"before": before, "after": after}
            progress.update()
            if after != before:
                problems.append(f"the trainer was ended in mid-publish, and the server has {after}, not {before}")
            with Trainer(directory, "second") as trainer:
                found["publishes"].append({"kind": "dense, by the next trainer", **trainer.publish(0.0)})
                progress.update()
            if server.held()["weight_version"] == before["weight_version"]:
                problems.append("the next trainer's weights are not in the server")
    problems += judged(found["publishes"], cut, options.cut_s)
    found["problems"] = problems
    print(table([*found["publishes"], {"kind": f"dense, link cut for {options.cut_s:g} s", **cut}]))
    print("\n".join(problems) or "when the trainer was ended, the server kept its version; it took the next trainer's")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(bool(problems))


def make_model(directory: Path, shape: str) -> None:
    """Writes random weights; it runs in its own process, so that the memory is free afterwards."""
    from rljax.policy.hf import save_params
    from rljax.policy.model import init_params

    save_params(directory, init_params(SHAPES[shape], 0), SHAPES[shape], "bfloat16")


@dataclass(frozen=True)
class Server:
    """The vLLM server on the other side of the link."""

    url: str
    key: str

    def held(self) -> dict[str, Any]:
        """Returns the version that the server reports, and what it generates greedily from a prompt."""
        sampling = {"max_tokens": 8, "temperature": 0.0, "logprobs": 1, "return_tokens_as_token_ids": True}
        body = {"model": "policy", "prompt": list(range(40, 60)), **sampling}
        version = self._ask("/weight_info")["weight_version"]
        (choice,) = self._ask("/v1/completions", body)["choices"]
        return {"weight_version": version, "tokens": choice["logprobs"]["tokens"]}

    def reload(self, directory: Path) -> float:
        """Reloads a model directory by vLLM's own means; returns the time (seconds).

        The next publish replaces the weights.
        """
        began = time.monotonic()
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        return time.monotonic() - began

    def _ask(self, path: str, body: Any = None) -> dict[str, Any]:
        words = (sys.executable, "-c", ASK, self.url + path, self.key, "" if body is None else json.dumps(body))
        done = subprocess.run([*SERVER.inside, *words], capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[Server]:
    """Starts a bfloat16 server of ``directory``/model. Raises RuntimeError if it does not become healthy."""
    key, url, printed = directory / "key", directory / "url", directory / "server.out"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    words = [str(vllm_python()), "-m", "rljax.cli", "serve", "vllm", str(directory / "model"), "--dtype", "bfloat16"]
    words += ["--host", SERVER.address, "--port", str(PORT), "--max-model-len", str(MAX_TOKENS)]
    words += ["--api-key-file", str(key), "--url-file", str(url), "--log", str(directory / "server.log")]
    with printed.open("wb") as out:
        environment = {**os.environ, "RLJAX_API_KEY_FILE": str(key)}
        process = subprocess.Popen([*SERVER.inside, *words], stdout=out, stderr=out, env=environment)
    try:
        wait_until(lambda: url.exists() or process.poll() is not None)
        if not url.exists():
            raise RuntimeError(f"the server ended: {printed.read_text()[-2000:]}")
        yield Server(url.read_text().strip(), key.read_text())
    finally:
        process.terminate()
        process.wait(60)


class Trainer:
    """A process of ``publishing_trainer.py`` on its side of the link, in its own process group."""

    def __init__(self, directory: Path, name: str) -> None:
        words = [sys.executable, str(HERE / "publishing_trainer.py"), str(directory / "model")]
        words += [f"http://{SERVER.address}:{PORT}", str(directory / "key"), TRAINER.address]
        self._log = directory / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*TRAINER.inside, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._began = self._sent = 0.0

    def begin(self, share: float) -> None:
        """Begins to publish with a share of the elements changed."""
        assert self._process.stdin is not None
        self._sent = TRAINER.sent_bytes()
        print(f"{share}", file=self._process.stdin, flush=True)

    def done(self) -> dict[str, Any]:
        """Waits for the publish that has begun, and returns its costs. Raises RuntimeError if the trainer ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the trainer ended: {self._log.read_text()[-2000:]}")
        metrics = json.loads(line)
        crossed = TRAINER.sent_bytes() - self._sent
        return {
            "changed_fraction": metrics.get("publish/changed_fraction"),
            "bytes": int(metrics["publish/bytes"]),
            "pulled_bytes": int(metrics["publish/pulled_bytes"]),
            "bytes_over_the_link": int(crossed),
            "encode_s": round(metrics["publish/encode_s"], 2),
            "fetch_s": round(metrics["publish/fetch_s"], 2),
            "check_s": round(metrics["publish/check_s"], 2),
            "pull_s": round(metrics["publish/pull_s"], 2),
            "least_s_of_the_link": round(metrics["publish/pulled_bytes"] / GIGABIT, 2),
            "load_s": round(metrics["publish/load_s"], 2),
            "stall_s": round(metrics["publish/stall_s"], 2),
            "seconds": round(metrics["publish/seconds"], 2),
        }

    def publish(self, share: float) -> dict[str, Any]:
        """Calls :meth:`begin` and :meth:`done`."""
        self.begin(share)
        return self.done()

    def wait_for_bytes(self, count: int) -> None:
        """Waits until this number of bytes has left since the publish began."""
        wait_until(lambda: TRAINER.sent_bytes() - self._sent > count)

    def end(self) -> None:
        """Kills the trainer and its descendants with SIGKILL; may be called twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def cut_in_mid_pull(trainer: Trainer, seconds: float, model_bytes: int) -> dict[str, Any]:
    """Publishes with all weights changed, and cuts the link when a third of the bytes has crossed it."""
    trainer.begin(1.0)
    trainer.wait_for_bytes(model_bytes // 3)
    TRAINER.set_up(False)
    time.sleep(seconds)
    TRAINER.set_up(True)
    return trainer.done()


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits until ``holds()`` is true. Raises RuntimeError after a time limit."""
    deadline = time.monotonic() + LONGEST_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {LONGEST_S:g} s in vain")
        time.sleep(0.02)


def judged(publishes: Sequence[dict[str, Any]], cut: dict[str, Any], cut_s: float) -> list[str]:
    """Returns a line for each result that is not as it should be."""
    dense = [each for each in publishes if each["kind"].startswith("dense")]
    deltas = [each for each in publishes if each["kind"] == "delta"]
    found = [
        f"a delta of {each['changed_fraction']:.2%} took {each['pulled_bytes']} bytes, dense {dense[0]['pulled_bytes']}"
        for each in deltas
        if each["pulled_bytes"] > 0.05 * dense[0]["pulled_bytes"]
    ]
    if cut["pull_s"] < cut_s:
        found.append(f"the link was cut for {cut_s:g} s, and the pull took {cut['pull_s']} s")
    if cut["bytes_over_the_link"] > 1.2 * dense[-1]["bytes_over_the_link"]:
        found.append("after the link was cut, more than a fifth was sent again")
    return found


def table(publishes: Sequence[dict[str, Any]]) -> str:
    names = ("fetch_s", "check_s", "pull_s", "encode_s", "load_s", "reload_s", "stall_s", "seconds")
    lines = [f"{'':28}{'MB':>8}{'link at least':>15}{''.join(f'{name:>10}' for name in names)}"]
    for each in publishes:
        rest = "".join(f"{each[name]:10.2f}" if name in each else f"{'':10}" for name in names)
        lines.append(f"{each['kind']:28}{each['pulled_bytes'] / 1e6:8.1f}{each['least_s_of_the_link']:15.2f}{rest}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_cli(main))
