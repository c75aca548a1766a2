"""The protocol of one kind of server beyond sampling, and the questions to its workers that every kind shares.

A new kind of server is a class with the methods of :class:`Backend`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rljax.errors import ReplyError, ServerGoneError, ServerRefusedError, VerificationError
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.wire import ServerInfo, Wire
from rljax.rollout.types import InFlight, VerifyConfig
from rljax.weights.format import Checksum
from rljax.weights.store import WeightDirectory, WeightVersion

_POLL_S = 0.05  # The time between two questions to workers whether they have pulled a version (seconds).

AskWorkers = Callable[..., Sequence[Any]]
"""A function of (method of rljax's plugin, its arguments) that returns the answer of each worker."""


@dataclass(frozen=True)
class Expectation:
    """The trainer's side of the handshake.

    Attributes:
      dtype: The dtype of the published weights and so of the server: "bfloat16", "float16" or "float32".
      hf_config: The policy's ``config.json`` as a mapping.
      max_tokens: The longest prompt plus response that the run will ask for (tokens).
      verify: The settings of the verification, for whose probes the server must have room.
      head_dtype: The dtype in which the server's LM head must compute, or None for any.
      needs_routes: Whether the server must report the experts of each token.
    """

    dtype: str
    hf_config: Mapping[str, Any]
    max_tokens: int
    verify: VerifyConfig
    head_dtype: str | None = None
    needs_routes: bool = False

    @property
    def routes(self) -> tuple[int, int, int] | None:
        """The (layers, experts of a token, experts) of the routes that the server must report, or None."""
        if not self.needs_routes:
            return None
        layers, k, experts = (
            self.hf_config[key] for key in ("num_hidden_layers", "num_experts_per_tok", "num_experts")
        )
        return layers, k, experts


@dataclass(frozen=True)
class WorkerChecksums:
    """The checksums of the weights that one worker of a server was given by the last update.

    Attributes:
      tensors: The checksum of each tensor, or of the worker's part of it, as it stood loaded; None where a tensor was
        not loaded.
      seconds: The time that the checksums took (seconds).
      in_place: Whether only the changed elements were written.
    """

    tensors: Mapping[str, Checksum | None]
    seconds: float
    in_place: bool = False


class Backend(Wire, Protocol):
    """One kind of server: its wire, and how weights come into it.

    Attributes:
      start_command: The command that starts a server, for messages.
      logprobs_hint: The remedy where a server's log-probabilities are not of the distribution that it samples from.
    """

    start_command: str
    logprobs_hint: str

    def describe(self, client: ServerClient, url: str) -> ServerInfo:
        """Returns the server's description of itself, and sets the client to its model's name and its route.

        Raises:
          ServerGoneError: The server does not answer.
          ValueError: It is not a server of this kind with one model, or it is paused.
        """

    def handshake(self, client: ServerClient, url: str, expected: Expectation, files: WeightDirectory) -> ServerInfo:
        """Checks that trainer and server fit together, and shows the server the run's weights. Nothing is sampled.

        Raises:
          HandshakeError: Something differs. The message has one line for each thing that does.
          ServerGoneError: The server does not answer.
          ReplyError: The server's answer cannot be read.
        """

    def prepare(self, client: ServerClient, url: str, version: WeightVersion) -> Mapping[str, Any]:
        """Brings one version's weights to the server's machine while the server goes on, for ``push`` to load.

        Returns:
          The figures of the pull (``pull.Pulled``), or {} where servers read the version where it was written.

        Raises:
          ServerGoneError: The server does not answer, or its machine could not read the version.
        """

    def push(self, client: ServerClient, url: str, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """Has the server load one version's weights. It is not proof that they arrived.

        Args:
          client: The client of the server.
          url: The server.
          version: The version, which the server's machine has.
          in_flight: The fate of the responses that the server samples (``RolloutConfig.update``). No key and no value
            of the old weights is used for a token of the new ones.

        Raises:
          ServerGoneError: The server does not answer.
          RuntimeError: The server refused a step. It stays paused, because it may hold half of the weights.
        """

    def sleep(self, client: ServerClient, url: str) -> None:
        """Has the server give back its devices' memory, weights and caches, once its requests are answered.

        Raises:
          ServerGoneError: The server does not answer.
          RuntimeError: The server refused.
        """

    def wake(self, client: ServerClient, url: str) -> None:
        """Has a sleeping server take its memory again. It holds no weights then. Raises as :meth:`sleep`."""

    def serves(self, client: ServerClient, url: str, version: WeightVersion) -> bool:
        """Returns whether the server says that it holds ``version``. Raises ServerGoneError if it does not answer."""

    def loaded(self, client: ServerClient, url: str, version: WeightVersion) -> Sequence[WorkerChecksums]:
        """Returns what each worker of the server holds of ``version``, by its own account.

        Raises:
          ServerGoneError: The server does not answer.
          VerificationError: The last update of a worker was another version.
        """


def pull_version(
    ask: AskWorkers, url: str, version: WeightVersion, timeout_s: float, *, keep_delta: bool = False
) -> Mapping[str, Any]:
    """Has the workers pull a version and waits for it; the common part of ``Backend.prepare``.

    The workers only start the pull and are then asked how far it is, so that no request waits for it.

    Args:
      ask: The function that asks the workers.
      url: The server, for messages.
      version: The version to pull.
      timeout_s: The longest that the pull may take (seconds).
      keep_delta: Whether the workers keep what changed, to write it in place.

    Returns:
      The figures of the slowest worker's pull, or {} where the version is read where it was written.

    Raises:
      ServerGoneError: A worker could not pull the version, or not in time.
      ReplyError: A worker's answer cannot be read.
    """
    if not version.source:
        return {}
    name, begun = version.path.name, time.monotonic()
    ask("rljax_pull", name, *([True] if keep_delta else []))
    while time.monotonic() - begun < timeout_s:
        answers = ask("rljax_pulled", name)
        try:
            done = [worker for worker in answers if worker is not None]
            failed = [worker["error"] for worker in done if worker["error"]]
        except (KeyError, TypeError) as error:
            raise ReplyError(f"{url} answered without {error}: {str(answers)[:300]}") from error
        if failed:
            raise ServerGoneError(f"{url} could not pull {version.tag}: {failed[0]}")
        if len(done) == len(answers):
            return max(done, key=lambda worker: worker["seconds"])
        time.sleep(_POLL_S)
    raise ServerGoneError(f"{url} did not pull {version.tag} within {timeout_s:g} s")


def names_version(client: ServerClient, url: str, route: str, version: WeightVersion) -> bool:
    """Returns whether a server names the version; the common part of ``Backend.serves``.

    Args:
      client: The client of the server.
      url: The server.
      route: The path at which the server says which weights it holds.
      version: The version that is asked for.

    Raises:
      ServerGoneError: The server does not answer, or refuses the question.
    """
    try:
        answer = client.call(url, "GET", route, timeout_s=10.0)
    except ServerRefusedError as error:
        raise ServerGoneError(str(error)) from error
    return answer.get("weight_version") == version.tag


def read_checksums(ask: AskWorkers, url: str, version: WeightVersion) -> Sequence[WorkerChecksums]:
    """Asks the workers for the checksums of what they loaded; the common part of ``Backend.loaded``.

    Raises:
      VerificationError: The last update of a worker was another version.
      ReplyError: A worker's answer cannot be read.
    """
    answers = ask("rljax_checksums")
    try:
        tags = {worker["tag"] for worker in answers}
        if tags != {version.tag}:
            raise VerificationError(f"{url} was last given the weights {sorted(tags)}, not {version.tag!r}")
        return [
            WorkerChecksums(
                {name: sums and Checksum(*sums) for name, sums in each["tensors"].items()},
                each["seconds"],
                bool(each.get("in_place")),
            )
            for each in answers
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ReplyError(f"{url} answered without {error}: {str(answers)[:300]}") from error
