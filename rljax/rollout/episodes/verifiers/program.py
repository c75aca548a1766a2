"""The program that runs the environments of ``verifiers``, in a process and with a Python of its own.

Standard input is one end of a pair of sockets, and the trainer holds the other. Messages are JSON in frames. The first
message has the settings. The program answers ``{"ready": ...}`` or ``{"error": ...}``. Then the trainer sends the
trajectories to run. The program asks for each turn, and reports the end of each trajectory. It ends when the trainer
closes the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljax.distributed.frames import Frames
    from rljax.rollout.episodes.verifiers.shim import Asking

_PACKAGE = Path(__file__).parents[3]
_LONGEST = 1 << 40  # The trainer's messages need no bound.
_ALIVE_S = 1.0  # the time between two signs of life (seconds)
_SETUP_S = 300.0  # the longest time before the first turn, in which processes of tools are started (seconds)
_END_S = 5.0  # the longest time that trajectories may take to end once they are cancelled (seconds)


def load_package() -> None:
    """Makes the package ``rljax`` of this file importable, but no other package from the same directory.

    The directory may be the trainer's ``site-packages``, whose other packages are not made for this Python.
    """
    if "rljax" in sys.modules:
        return
    file = _PACKAGE / "__init__.py"
    spec = importlib.util.spec_from_file_location("rljax", file, submodule_search_locations=[str(_PACKAGE)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rljax"] = module
    spec.loader.exec_module(module)


class Program:
    """The environment, and the trajectories that run in it."""

    def __init__(self, frames: Frames, settings: dict[str, Any]) -> None:
        """Loads the environment. ``verifiers`` and the environment may raise any error."""
        from rljax.rollout.episodes.verifiers import environment, shim

        self._frames = frames
        self._environment = environment.load(settings)
        self._shim = shim.Shim(self._ask)
        self._settings, self._asked = settings, dict[int, asyncio.Future[dict[str, Any]]]()
        self._numbers = iter(range(1 << 62))
        self._running: dict[Asking, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Runs trajectories until the trainer closes the socket."""
        from rljax.rollout.episodes.verifiers import environment, shim

        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        threading.Thread(target=self._read, args=(messages, asyncio.get_running_loop()), daemon=True).start()
        alive = asyncio.create_task(self._watch())
        url = await self._shim.start()
        async with self._environment.serving():
            self.send({"ready": True})
            while (message := await messages.get()) is not None:
                if "run" in message:
                    room = shim.Room(**message["room"])
                    context = environment.model_context(self._settings, url, room.temperature)
                    for key, index in message["run"]:
                        asking = shim.Asking(key, room)
                        self._running[asking] = asyncio.create_task(self._play(asking, index, context))
                elif (waiting := self._asked.pop(message["answer"], None)) is not None and not waiting.done():
                    waiting.set_result(message)
            for task in self._running.values():
                task.cancel()
            await asyncio.wait(self._running.values(), timeout=_END_S) if self._running else None
        alive.cancel()
        await self._shim.close()

    def tell_tasks(self, limit: int) -> None:
        """Sends the first prompt of each task. An endless taskset gives its first ``limit`` tasks."""
        from rljax.rollout.episodes.verifiers import environment

        self.send({"tasks": environment.first_prompts(self._environment, self._settings, limit)})

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message to the trainer, from any thread."""
        self._frames.send(0, json.dumps(message).encode())

    def _read(self, messages: asyncio.Queue[dict[str, Any] | None], loop: asyncio.AbstractEventLoop) -> None:
        """Puts each message of the trainer into the queue, and None once the socket is closed. It runs on a thread."""
        message: dict[str, Any] | None = {}
        while message is not None:
            try:
                message = json.loads(self._frames.receive()[1])
            except (EOFError, OSError):
                message = None
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(messages.put_nowait, message)

    async def _watch(self) -> None:
        """Gives a sign of life each second, and ends trajectories whose environment takes too long."""
        while True:
            await asyncio.sleep(_ALIVE_S)
            if self._running:
                self.send({"alive": True})
            now = time.monotonic()
            for asking, task in self._running.items():
                limit = self._settings["call_timeout_s"] if asking.turns else _SETUP_S
                if asking.since is not None and now - asking.since > limit:
                    asking.is_late = True
                    task.cancel()

    async def _ask(self, asking: Asking, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        """Returns the engine's answer to a turn. The wait does not count as time of the environment."""
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        asking.since = None
        turn = {"key": asking.key, "turn": asking.turns, "tokens": tokens, "max_tokens": max_tokens}
        self.send({"ask": number, **turn})
        try:
            return await self._asked[number]
        finally:
            asking.since = time.monotonic()
            self._asked.pop(number, None)

    async def _play(self, asking: Asking, index: int, context: Any) -> None:
        from rljax.rollout.episodes.verifiers import environment

        traces: list[Any] = []

        def begin(trace: Any) -> None:
            traces.append(trace)
            self._shim.sessions[trace.id] = asking

        told: dict[str, Any]
        try:
            told = await environment.play(self._environment, index, context, begin)
        except environment.UnfitError as error:
            told = {"unfit": str(error)}
        except asyncio.CancelledError:
            if not asking.is_late:
                raise
            limit = self._settings["call_timeout_s"]
            told = environment.ended("timeout", f"the environment took more than {limit:g} s", traces)
        except Exception as error:  # an environment may raise anything
            told = environment.ended("environment", f"{type(error).__name__}: {error}", traces)
        finally:
            del self._running[asking]
            for trace in traces:
                self._shim.sessions.pop(trace.id, None)
        self.send({"episode": asking.key, "is_full": asking.is_full, **told})


def main() -> None:
    """Serves the trainer. With ``tasks`` in the settings it only sends the tasks."""
    load_package()
    from rljax.distributed.frames import Frames, take_stdin

    frames = Frames(take_stdin(), _LONGEST)
    settings = json.loads(frames.receive()[1])
    for path in reversed(settings["paths"]):
        sys.path.insert(0, path)
    os.environ["PYTHONPATH"] = os.pathsep.join([*settings["paths"], *filter(None, [os.environ.get("PYTHONPATH")])])
    logging.getLogger("verifiers").setLevel(logging.ERROR)
    try:
        program = Program(frames, settings)
        if settings.get("tasks"):
            program.tell_tasks(settings["tasks"])
            return
    except Exception as error:  # an environment may raise anything while it is loaded
        frames.send(0, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    asyncio.run(program.serve())


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, EOFError, KeyboardInterrupt):
        os._exit(1)  # The trainer has ended, so nobody can get a report.
