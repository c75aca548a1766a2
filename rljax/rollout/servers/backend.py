"""What the engine asks of one kind of server beyond sampling. A new kind is a class with these methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.wire import ServerInfo, Wire
from rljax.rollout.types import InFlight, VerifyConfig
from rljax.weights.checksum import Checksum
from rljax.weights.directory import WeightDirectory, WeightVersion


@dataclass(frozen=True)
class Expectation:
    """The trainer's side of the handshake.

    Attributes:
      dtype: "bfloat16", "float16" or "float32": of the published weights, so of the server.
      hf_config: the policy's ``config.json`` as a mapping.
      max_tokens: longest prompt plus longest response the run will ask for (tokens).
      verify: how the use of weights is verified; the server must have room for its probes.
      head_dtype: in which the server's LM head must compute, as ``dtype``; None: any.
      needs_routes: whether the server must report the experts of each token.
    """

    dtype: str
    hf_config: Mapping[str, Any]
    max_tokens: int
    verify: VerifyConfig
    head_dtype: str | None = None
    needs_routes: bool = False

    @property
    def routes(self) -> tuple[int, int, int] | None:
        """(layers, experts of a token, experts) of what the server must report, or None."""
        if not self.needs_routes:
            return None
        layers, k, experts = (
            self.hf_config[key] for key in ("num_hidden_layers", "num_experts_per_tok", "num_experts")
        )
        return layers, k, experts


@dataclass(frozen=True)
class Loaded:
    """What one worker of a server was given by the last update.

    Attributes:
      tensors: the checksum of each tensor, or of the worker's part of it, as it stood loaded; None: it was not loaded.
      seconds: that the checksums took (seconds).
      in_place: whether only what changed was written.
    """

    tensors: Mapping[str, Checksum | None]
    seconds: float
    in_place: bool = False


class Backend(Wire, Protocol):
    """One kind of server: its wire, and how weights come into it.

    Attributes:
      start_command: the command that starts a server, for messages.
      logprobs_hint: what to do about one whose log-probabilities are not of the distribution that it samples from.
    """

    start_command: str
    logprobs_hint: str

    def describe(self, client: ServerClient, url: str) -> ServerInfo:
        """What the server says of itself; sets the client to its model's name and its route.

        Raises:
          ServerGoneError: it does not answer.
          ValueError: it is not a server of this kind with one model, or it is paused.
        """

    def handshake(self, client: ServerClient, url: str, expected: Expectation, files: WeightDirectory) -> ServerInfo:
        """Checks that trainer and server fit together and readies the weight transfer; nothing is sampled.

        Raises:
          HandshakeError: something differs.
          ServerGoneError: it does not answer.
        """

    def prepare(self, client: ServerClient, url: str, version: WeightVersion) -> Mapping[str, Any]:
        """Brings one version's weights to the server's machine, while the server goes on; what ``push`` then loads.

        Returns:
          What was done there (``pull.Pulled``); {} where servers read the version where it was written.

        Raises:
          ServerGoneError: it does not answer, or its machine could not read the version.
        """

    def push(self, client: ServerClient, url: str, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """Gives the server one version's weights. It is not proof that they arrived.

        Args:
          client: of the server.
          url: its own.
          version: that its machine has.
          in_flight: what becomes of the responses that it samples. No key and no value of the weights before is used
            for a token after.

        Raises:
          ServerGoneError: it does not answer.
          RuntimeError: it refused a step; it stays paused, because it may hold half of the weights.
        """

    def sleep(self, client: ServerClient, url: str) -> None:
        """Has the server give back the memory of its devices, weights and caches, once its requests are answered.

        Raises:
          ServerGoneError: it does not answer.
          RuntimeError: it refused.
        """

    def wake(self, client: ServerClient, url: str) -> None:
        """Has a server that sleeps take its memory again. It holds no weights then. Raises as :meth:`sleep`."""

    def serves(self, client: ServerClient, url: str, version: WeightVersion) -> bool:
        """Whether the server says that it holds ``version``.

        Raises:
          ServerGoneError: it does not answer.
        """

    def loaded(self, client: ServerClient, url: str, version: WeightVersion) -> Sequence[Loaded]:
        """What each worker of the server holds of ``version``, by its own account.

        Raises:
          ServerGoneError: it does not answer.
          VerificationError: the last update of a worker was another version.
        """
