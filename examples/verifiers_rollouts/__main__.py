"""Plays environments of the package verifiers on the servers of a run, and sends the trajectories to its trainer.

python examples/verifiers_rollouts RUN_DIR ENVIRONMENT

RUN_DIR is the directory of a run with rollout.trajectories = http://HOST:PORT and rollout.engine = vllm. Its
config.yaml names the servers, the model and the limits. ENVIRONMENT is the module of a taskset, or a YAML or TOML file
in the form of verifiers' own env settings. The key renderer of the file has settings of the chat's renderer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if not __package__:  # The files beside this one would hide modules of the environments.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import aiohttp
import numpy as np
from verifiers_rollouts.client import POLL_S, Client, RefusedError
from verifiers_rollouts.player import Player
from verifiers_rollouts.settings import EndError, read_run, settings_of

from rljax.weights.access import KEY_FILE, find_client_key_file, read_api_key

IDLE_S = 300.0  # the time without a group under way after which the waiting groups are counted anew (seconds)


class Sender:
    """Plays groups of trajectories and sends them, as many as the trainer has room for."""

    def __init__(self, player: Player, client: Client, trainer: str) -> None:
        """Asks and sends nothing yet. ``trainer`` is the URL of the trainer."""
        self._player, self._client, self._trainer = player, client, trainer
        self._names = (f"{time.time_ns():x}-{number}" for number in itertools.count())

    async def run(self, groups: int) -> None:
        """Sends ``groups`` groups, or groups until the trainer ends if that is 0.

        A group is begun for each place that was free when the trainer's policy became new. So with
        ``rollout.max_staleness = 0`` no group is begun while the trainer trains: its policy would be too old.

        Raises EndError if the trainer does not answer or refuses a group, or no group can be sent.
        """
        tasks, running = tasks_of(self._player.environment.taskset), set[asyncio.Task[bool]]()
        begun = sent = lost = 0
        version, busy = None, time.monotonic()
        while not groups or sent < groups:
            told = await self._client.ask(f"{self._trainer}/policy")
            now = time.monotonic()
            busy = now if running else busy
            if told["policy_version"] != version or now - busy > IDLE_S:
                version, busy, begun = told["policy_version"], now, told["waiting_groups"] + len(running)
            while begun < told["max_waiting_groups"] and (not groups or sent + len(running) < groups):
                running.add(asyncio.create_task(self._send_group(next(tasks), told["group_size"])))
                begun += 1
            if not running:
                await asyncio.sleep(POLL_S)
                continue
            done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for is_sent in [task.result() for task in done]:
                sent, begun, lost = (sent + 1, begun, 0) if is_sent else (sent, begun - 1, lost + 1)
            if lost > told["max_waiting_groups"]:
                raise EndError(f"each of the last {lost} groups had a trajectory that failed before its first token")

    async def _send_group(self, task: Any, size: int) -> bool:
        """Plays and sends a group. Returns False if a trajectory has no row, so that the group cannot be sent."""
        name = next(self._names)
        played = await asyncio.gather(*(self._player.play(task) for _ in range(size)))
        rows = [{"group": name, "trajectory": i, **row} for i, one in enumerate(played) for row in one.rows]
        is_whole = all(one.rows for one in played)
        if is_whole:
            await self._client.ask(f"{self._trainer}/trajectories", rows, **{"idempotency-key": name})
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        mean = f"mean reward {np.mean(rewards):.3f}" if rewards else "no reward"
        tools = sum((Counter(one.tools) for one in played), Counter[str]())
        said = "".join(f", {count} {kind} of tools" for kind, count in sorted(tools.items()))
        if failures := [one.failure for one in played if one.failure]:
            said += f", {len(failures)} of {size} failed, such as {failures[0]}"
        print(f"{'sent' if is_whole else 'left out'} group {name}: {len(rows)} rows, {mean}{said}", flush=True)
        return is_whole


def tasks_of(taskset: Any) -> Iterator[Any]:
    """Yields the tasks of a taskset. A bounded one yields them again and again, each time in a new order."""
    if not taskset.bounded:
        yield from taskset
    tasks = list(taskset)
    while tasks:
        yield from random.sample(tasks, len(tasks))
    raise EndError("the environment has no task")


async def send(run: Mapping[str, Any], name: str, trainer: str, groups: int, wait_s: float) -> None:
    """Plays groups of trajectories of the environment ``name`` and sends them. Raises EndError or RefusedError."""
    key = find_client_key_file(os.environ.get(KEY_FILE) or run["rollout"]["api_key_file"])
    headers = {"authorization": f"Bearer {read_api_key(key)}"} if key else {}
    connections, unlimited = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connections, timeout=unlimited, headers=headers) as http:
        client, settings = Client(http, wait_s), settings_of(run, name)
        try:
            player = Player(run, settings, client)
        except Exception as error:  # an environment may raise anything while it is loaded
            raise EndError(f"the environment {name} cannot be loaded: {' '.join(str(error).split())}") from error
        async with player.serving():
            await Sender(player, client, trainer).run(groups)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("environment", help="the module of a taskset, or a file of settings")
    parser.add_argument("--trainer", help="the URL of the trainer, if it is not rollout.trajectories")
    parser.add_argument("--model", help="the directory of the model, if it is not model.path")
    parser.add_argument("--groups", type=int, default=0, help="the number of groups to send; 0: until the trainer ends")
    parser.add_argument("--wait-s", type=float, default=300.0, help="the longest time without an answer (seconds)")
    wanted = parser.parse_args()
    here = os.getcwd()
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join([*filter(None, [os.environ.get(name)]), "127.0.0.1", "localhost"])
    logging.getLogger("verifiers").setLevel(logging.ERROR)
    try:
        run = read_run(wanted.run, wanted.model)
        trainer = wanted.trainer or run["rollout"]["trajectories"]
        asyncio.run(send(run, wanted.environment, trainer.rstrip("/"), wanted.groups, wanted.wait_s))
    except (EndError, RefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
