"""The interface of one kind of server: its replies, its handshake, and the loading of weights."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np

from rljax.errors import HandshakeError, ReplyError, ServerGoneError, ServerRefusedError, VerificationError
from rljax.rollout.servers import handshake
from rljax.rollout.servers.handshake import Expectation
from rljax.rollout.servers.replies import without_ties
from rljax.rollout.servers.requests import Completion, Remote, Request, Retries, ServerInfo
from rljax.rollout.types import InFlight
from rljax.weights.format import PROTOCOL, Checksum
from rljax.weights.pull import Pulled
from rljax.weights.store import WeightDirectory, WeightVersion
from rljax.weights.sums import describe_differences, differences

UPDATE_S = 600.0
"""The longest time of one step of an update (seconds)."""
_POLL_S = 0.05  # The time between two questions whether the workers have pulled a version (seconds).


class _LoadedAnswer(msgspec.Struct):
    tag: str  # the tag of the version that the last update brought to the worker
    # The ``Checksum`` of each tensor, or of the worker's part of it, as it was loaded; None where it was not loaded.
    tensors: dict[str, tuple[int, int, int, int] | None]
    seconds: float  # the time that the checksums took


class Backend(ABC):
    """One kind of server. A new kind is a subclass.

    Every method that takes a server raises ServerGoneError if the server does not answer, and ReplyError if its answer
    cannot be read.
    """

    name: str  # the name of the kind in messages
    model = "policy"  # the name of the model at servers that rljax starts
    route: str  # the path that samples a response
    own_route = ""  # the better path of rljax's plugin, which a server may lack, or "" if there is none
    without_route = ""  # the remedy if a server lacks ``route``
    retries = Retries()  # the attempts at a request that a server refuses or answers wrongly
    logprobs_hint: str  # the remedy if log-probabilities belong to another distribution than the server samples from
    without_plugin: str  # the meaning of a refusal of a question to rljax's plugin
    version_route: str  # the path at which a server says which weights it holds
    without_version: str  # the meaning of a refusal at ``version_route``

    @abstractmethod
    def body(self, route: str, request: Request, model: str, platform: str = "") -> dict[str, Any]:
        """Returns the JSON body of ``request`` for ``route``, at a server that calls its model ``model``.

        ``platform`` is the server's ``Remote.platform``.
        """

    @abstractmethod
    def read(self, route: str, reply: bytes, request: Request) -> Completion:
        """Returns the completion in a reply, by ``make_completion``.

        It may also raise ValueError, ArithmeticError or RecursionError if the reply is not a completion.
        """

    @abstractmethod
    async def ask_plugin(self, server: Remote, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of rljax's plugin in each worker, and returns the answers.

        It raises ServerRefusedError, with the reason, if there is no plugin or the method failed.
        """

    @abstractmethod
    async def describe(self, server: Remote) -> ServerInfo:
        """Returns the server's description of itself, and sets the server's ``model``, ``route`` and ``platform``.

        It raises ValueError if the server is of another kind, does not serve exactly one model, or is paused.
        """

    @abstractmethod
    async def resume(self, server: Remote) -> None:
        """Resumes a server that an earlier run left paused."""

    @abstractmethod
    def differences(self, described: Mapping[str, Any], expected: Expectation) -> list[str]:
        """Returns one line for each difference between ``expected`` and the plugin's answer ``described``."""

    @abstractmethod
    async def show(self, server: Remote, probe: Mapping[str, Any]) -> None:
        """Tells the plugin where the run's weights will be. Raises ServerRefusedError if the plugin cannot read there.

        ``probe`` has the arguments of ``WorkerWeights.show``.
        """

    @abstractmethod
    async def push(self, server: Remote, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """Makes the server load a version that its machine can read. It does not check that the weights arrived.

        ``in_flight`` is the fate of the responses under way, as ``RolloutConfig.update``. A token of the new weights
        never uses keys and values of the old ones. It raises RuntimeError if the server refuses a step. The server then
        stays paused, because it may hold half of the weights.
        """

    async def force(self, server: Remote, name: str) -> Callable[[np.ndarray], Mapping[str, Any]]:
        """Makes the server decode the tokens that a request gives, until :meth:`end_force` with this ``name``.

        Returns a function from these tokens, int32 [t], to ``Request.forced``. It raises ValueError if the server
        cannot decode given tokens.
        """
        said = f"{self.name} decodes no given tokens; {self.name.lower()}:URL scores them by prefill"
        raise ValueError(f"{server.url}: {said}")

    async def end_force(self, server: Remote, name: str) -> None:
        """Ends the decoding of given tokens. Raises ReplyError if the server gave it up before."""
        errors = await self.ask_plugin(server, "rljax_end_force", name)
        if any(errors):
            raise ReplyError(f"{server.url} gave up decoding given tokens: {next(filter(None, errors))}")

    async def sleep(self, server: Remote) -> None:
        """Makes the server free its devices' memory, with weights and caches. Raises RuntimeError if it cannot."""
        raise RuntimeError(f"{server.url}: rollout.colocated works with vLLM servers")

    async def wake(self, server: Remote) -> None:
        """Makes a sleeping server allocate its memory again, but load no weights. Raises RuntimeError if it cannot."""
        raise RuntimeError(f"{server.url}: rollout.colocated works with vLLM servers")

    def completion(self, route: str, reply: bytes, request: Request) -> Completion:
        """Reads the bytes of a reply of ``route`` to ``request``, which have a log-probability for each token.

        It runs on the event loop or on another thread, once for each response. So no Python may run for each token
        of the response. It raises ReplyError if the reply is not a completion. The message begins with ``route``.
        """
        try:
            completion = self.read(route, reply, request)
            is_cut = request.sampling.top_k and "top_ids" in completion.columns
            return without_ties(completion) if is_cut else completion
        except (ValueError, ArithmeticError, RecursionError) as error:
            said = f"{type(error).__name__} {error}"
            shown = " ".join(reply[:300].decode(errors="replace").split())
            raise ReplyError(f"{route} answered with no completion, {said}: {shown}") from error

    async def find_route(self, server: Remote) -> None:
        """Sets ``server.route`` to the best path that the server has. Nothing is sampled.

        It raises HandshakeError if the server has none, and ServerRefusedError for another refusal than "not found".
        """
        for route in filter(None, (self.own_route, self.route)):
            server.route = route
            try:
                await server.call("GET", route)
                return
            except ServerRefusedError as error:
                if error.status == HTTPStatus.METHOD_NOT_ALLOWED:  # it is there, and takes only POST
                    return
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
        raise HandshakeError(f"{server.url} has no {self.route}: {self.without_route}")

    async def handshake(self, server: Remote, expected: Expectation, files: WeightDirectory) -> ServerInfo:
        """Compares a server with the trainer, and tells it where the run's weights will be. Nothing is sampled.

        It raises HandshakeError if they differ, with one line for each difference.
        """
        await self.resume(server)
        with handshake.refusals(server.url, self.without_plugin):
            answers = await self.ask_plugin(server, "rljax_describe")
        try:
            described = answers[0]
            if (theirs := described.get("protocol")) != PROTOCOL:
                said = (
                    f"the plugin speaks protocol {theirs}, the trainer {PROTOCOL}: install the same rljax beside both"
                )
                raise HandshakeError(f"{server.url}: {said}")
            server.platform = described.get("platform", "")
            differing = self.differences(described, expected)
        except (LookupError, TypeError, AttributeError) as error:
            raise ReplyError(f"{server.url}: the plugin answered without {error}: {str(answers)[:300]}") from error
        if differing:
            raise HandshakeError("\n".join(f"{server.url}: {line}" for line in differing))
        with handshake.refusals(server.url, self.without_version):
            await server.call("GET", self.version_route)
        await self.find_route(server)
        unread = f"the server cannot read the weight directory {files.root}; set transfer_dir to one that both see"
        unread += ", and publish.readable_by where the server runs as another user"
        if files.source:
            unread = f"the server's machine cannot read weights from {files.source}"
        path, text = files.probe()
        with handshake.refusals(server.url, unread):
            probe = {"probe_path": str(path), "probe_text": text, "protocol": PROTOCOL, "source": files.source}
            await self.show(server, probe | {"version_bytes": expected.version_bytes})
        return handshake.server_info(server.url, described, self.name.lower())

    async def ask(self, server: Remote, wanted: Any, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the plugin in each worker, and returns the answers, of the type ``wanted`` each."""
        answers = await self.ask_plugin(server, method, *arguments)
        try:
            return [msgspec.convert(answer, wanted) for answer in answers]
        except msgspec.ValidationError as error:
            raise ReplyError(f"{server.url} answered {method} with {str(answers)[:300]}: {error}") from error

    async def prepare(self, server: Remote, version: WeightVersion) -> Pulled | None:
        """Makes the workers pull a version into their machine's mirror while they sample. :meth:`push` loads it later.

        Returns the work of the slowest worker, or None if servers read the version in the directory of the trainer.
        It raises ServerGoneError if a worker could not pull the version in time.
        """
        if not version.source:
            return None
        name, begun = version.path.name, time.monotonic()
        await self.ask_plugin(server, "rljax_pull", name)
        while time.monotonic() - begun < UPDATE_S:
            answers: list[Pulled | None] = await self.ask(server, Pulled | None, "rljax_pulled", name)
            done = [answer for answer in answers if answer is not None]
            if failed := [answer.error for answer in done if answer.error]:
                raise ServerGoneError(f"{server.url} could not pull {version.tag}: {failed[0]}")
            if len(done) == len(answers):
                return max(done, key=lambda answer: answer.seconds)
            await asyncio.sleep(_POLL_S)
        raise ServerGoneError(f"{server.url} did not pull {version.tag} within {UPDATE_S:g} s")

    async def serves(self, server: Remote, version: WeightVersion) -> bool:
        """Returns whether the server says that it holds ``version``. Raises ServerGoneError also after a refusal."""
        try:
            answer = await server.call("GET", self.version_route, timeout_s=10.0)
        except ServerRefusedError as error:
            raise ServerGoneError(str(error)) from error
        return answer.get("weight_version") == version.tag

    async def check_serves(self, server: Remote, version: WeightVersion) -> None:
        """Raises ServerGoneError unless the server says that it holds ``version``."""
        if not await self.serves(server, version):
            raise ServerGoneError(f"{server.url} does not hold {version.tag}: it was restarted or updated by others")

    async def check_bits(self, server: Remote, version: WeightVersion, sums: Mapping[str, Checksum]) -> float:
        """Compares the weights that each worker loaded with the trainer's ``sums``.

        Returns the time of the slowest worker's checksums (seconds). It raises VerificationError if a tensor differs,
        or a worker's last update brought another version.
        """
        await self.check_serves(server, version)
        workers: list[_LoadedAnswer] = await self.ask(server, _LoadedAnswer, "rljax_checksums")
        tags = {worker.tag for worker in workers}
        if tags != {version.tag}:
            raise VerificationError(f"{server.url} was last given the weights {sorted(tags)}, not {version.tag!r}")
        loaded = [{name: found and Checksum(*found) for name, found in worker.tensors.items()} for worker in workers]
        if found := await asyncio.to_thread(differences, sums, loaded):
            raise VerificationError(f"{server.url} does not hold the trainer's weights: {describe_differences(found)}")
        return max(worker.seconds for worker in workers)
