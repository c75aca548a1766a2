"""The interface of one kind of server: how it is asked, described and given weights, and how its replies are read."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np

from rljax.errors import HandshakeError, ReplyError, ServerRefusedError
from rljax.rollout.servers.handshake import Expectation
from rljax.rollout.servers.replies import without_ties
from rljax.rollout.servers.requests import Completion, Remote, Request, ServerInfo
from rljax.rollout.types import InFlight
from rljax.weights.store import WeightVersion

UPDATE_S = 600.0
"""The longest time of one step of an update of a server's weights (seconds)."""


class Backend(ABC):
    """The base class of the kinds of servers.

    A new kind is an entry of ``kinds.ENGINES`` and a package ``servers/<engine>``: its ``client.py`` has the subclass,
    named as ``VllmBackend`` for "vllm", and ``rljax serve`` needs its ``server.py`` with ``CONFIG`` and ``start``. Each
    method that takes a server raises ServerGoneError if it does not answer, and ReplyError for an unreadable answer.
    """

    name: str  # the name of the kind in messages; in lower case it is the name of the engine in ``kinds.ENGINES``
    model = "policy"  # the name of the model at servers that rljax starts
    route: str  # the path at which a server samples a response
    own_route = ""  # the better path of rljax's plugin, which a server may lack, or "" if there is none
    without_route = ""  # the remedy if a server lacks ``route``
    attempts = 6  # the most attempts at a request that a server refuses or answers wrongly
    first_wait_s = 0.25  # the wait before the second attempt, which is doubled before each further one (seconds)
    longest_wait_s = 8.0  # the longest wait (seconds)
    logprobs_hint: str  # the remedy if log-probabilities belong to another distribution than the server samples from
    without_plugin: str  # the cause and the remedy if a server refuses a question to rljax's plugin
    version_route: str  # the path at which a server says which weights it holds

    @abstractmethod
    def body(self, route: str, request: Request, model: str, platform: str = "") -> dict[str, Any]:
        """Returns the JSON body of ``request`` for ``route``. ``model`` and ``platform`` are those of ``Remote``."""

    @abstractmethod
    def read(self, route: str, reply: bytes, request: Request) -> Completion:
        """Returns the completion in a reply of ``route`` to ``request``, by ``make_completion``.

        It has the array ``rollout_logprobs``. If ``request.sampling.reported`` is above 0, it has the arrays of
        ``make_tops``. If ``request.routes`` is given, it has ``routes``. If the reply is not a completion, ValueError,
        ArithmeticError or RecursionError may be raised besides ReplyError.
        """

    @abstractmethod
    async def ask_plugin(self, server: Remote, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of rljax's plugin in each worker, and returns the answers.

        It raises ServerRefusedError, with the reason, if there is no plugin or the method failed.
        """

    @abstractmethod
    async def describe(self, server: Remote) -> ServerInfo:
        """Returns the server's description of itself, and sets those attributes of ``server`` that requests need.

        It raises ValueError if the server is of another kind, does not serve exactly one model, or is paused.
        """

    @abstractmethod
    async def resume(self, server: Remote) -> None:
        """Resumes the server if an earlier run left it paused."""

    @abstractmethod
    def differences(self, described: Mapping[str, Any], expected: Expectation) -> list[str]:
        """Returns one line for each difference between ``expected`` and ``described``, the plugin's description."""

    @abstractmethod
    async def show(self, server: Remote, probe: Mapping[str, Any]) -> None:
        """Tells the plugin where the run's weights will be. Raises ServerRefusedError if the plugin cannot read there.

        ``probe`` has the arguments of ``WorkerWeights.show``.
        """

    @abstractmethod
    async def push(self, server: Remote, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """Makes the server load a version that its machine can read. It does not check that the weights arrived.

        ``in_flight`` is the fate of the responses under way, as in ``RolloutConfig.update``. Tokens that new weights
        sample never use keys and values of old ones. RuntimeError is raised if the server refuses a step. The server
        then stays paused, because it may hold half of the weights.
        """

    async def force(self, server: Remote) -> Callable[[np.ndarray], Mapping[str, Any]]:
        """Makes the server decode the tokens that a request gives, in place of its own. By default it raises.

        Returns a function from these tokens, int32 [t], to ``Request.forced``. ValueError is raised if the server
        cannot decode given tokens.
        """
        said = f"{self.name} decodes no given tokens; {self.name.lower()}:URL scores them by prefill"
        raise ValueError(f"{server.url}: {said}")

    async def sleep(self, server: Remote) -> None:
        """Makes the server drop weights and caches from its devices' memory. By default it raises RuntimeError."""
        raise RuntimeError(f"{server.url}: rollout.colocated works with vLLM servers")

    async def wake(self, server: Remote) -> None:
        """Makes a sleeping server allocate its memory again, without weights. By default it raises RuntimeError."""
        raise RuntimeError(f"{server.url}: rollout.colocated works with vLLM servers")

    def wait_s(self, failures: int) -> float:
        """Returns the time to wait after a request's failure number ``failures`` (seconds). It is random in part."""
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)

    def completion(self, route: str, reply: bytes, request: Request) -> Completion:
        """Returns the completion in a reply of ``route`` to ``request``, after ``without_ties`` if ``top_k`` is set.

        It runs on the event loop, once for each response. So no Python may run for each token of the response. It
        raises ReplyError if the reply is not a completion. The error's message begins with ``route``.
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
        """Sets ``server.route`` to the best path for sampling that the server has. Nothing is sampled.

        It raises HandshakeError if the server has none, and ServerRefusedError for a status other than 404 and 405.
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

    async def ask(self, server: Remote, wanted: Any, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the plugin in each worker, and returns the answers as values of the type ``wanted``."""
        answers = await self.ask_plugin(server, method, *arguments)
        try:
            return [msgspec.convert(answer, wanted) for answer in answers]
        except msgspec.ValidationError as error:
            raise ReplyError(f"{server.url} answered {method} with {str(answers)[:300]}: {error}") from error
