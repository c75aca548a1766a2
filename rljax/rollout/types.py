"""What goes to a rollout engine and what comes back: token ids both ways, never text (DESIGN: the data)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rljax.errors import check_at_least, check_finite, check_positive


@dataclass(frozen=True)
class InjectConfig:
    """Mismatch put into the rollouts on purpose; everything off at its default, and free to combine."""

    weight_noise: float = 0.0
    """Standard deviation of the Gaussian noise on each weight tensor, relative to the tensor's root mean square."""
    quantize: Literal["none", "int8", "fp8"] = "none"
    """Rounds the matrices of the transformer blocks as a quantized engine stores them, with one scale for each output
    channel."""
    dtype: Literal["same", "bfloat16", "float16"] = "same"
    """Rounds the weights to this dtype. same: the weights stay as published."""
    logit_noise: float = 0.0
    """Standard deviation of the Gaussian noise on each logit before sampling. Only for the exact engine."""
    staleness: int = 0
    """Number of policy versions by which the weights that sample are older than the published ones."""
    seed: int = 0
    """Seed of the noise. A version, or a token, gets the same noise each time it is sampled."""

    def __post_init__(self) -> None:
        check_finite(self, "weight_noise", "logit_noise")
        check_at_least(self, 0, "staleness", "seed")

    @property
    def changes_weights(self) -> bool:
        """Whether rollouts use other weights than those published."""
        return self.staleness > 0 or self.weight_noise > 0 or self.quantize != "none" or self.dtype != "same"


@dataclass(frozen=True)
class ClientLimits:
    """How long the HTTP client waits, and how much it sends."""

    request_timeout_s: float = 3600.0
    """Longest one response may take, queueing at the server included (seconds)."""
    connect_timeout_s: float = 10.0
    """Longest a connection may take to open (seconds)."""
    max_outstanding: int = 512
    """Requests at one server at a time; the others wait in the client, so a faster server gets more of them."""
    max_attempts: int = 6
    """Times one response is tried before the run gives up."""
    backoff_s: float = 0.25
    """Wait before the first retry, doubled for each further one (seconds)."""
    max_backoff_s: float = 8.0
    """Longest wait before a retry (seconds)."""

    def __post_init__(self) -> None:
        check_positive(self, "request_timeout_s", "connect_timeout_s", "max_backoff_s")
        check_at_least(self, 1, "max_outstanding", "max_attempts")
        check_at_least(self, 0, "backoff_s")


@dataclass(frozen=True)
class VerifyFloors:
    """Mean |server - trainer| per token (nats) below which no band goes: a policy's own mismatch moves as it learns.

    Seen with equal weights on a tiny random model: bfloat16 1.2e-2, float16 1.6e-3, float32 9e-7.
    """

    bfloat16: float = 2e-2
    """Lowest band (nats) of a server in bfloat16."""
    float16: float = 2.5e-3
    """Lowest band (nats) of a server in float16."""
    float32: float = 1e-5
    """Lowest band (nats) of a server in float32."""


@dataclass(frozen=True)
class VerifyCeilings:
    """Mean |server - trainer| per token (nats) above which calibration is refused."""

    bfloat16: float = 8e-2
    """Highest band (nats) of a server in bfloat16."""
    float16: float = 1e-2
    """Highest band (nats) of a server in float16."""
    float32: float = 1e-3
    """Highest band (nats) of a server in float32."""


@dataclass(frozen=True)
class VerifyConfig:
    """How the use of published weights is verified: the server generates from probe prompts, and the trainer scores the
    same tokens. The bits of the weights are verified at every publish, too, and have no settings."""

    prompts: int = 4
    """Number of probe prompts."""
    tokens: int = 16
    """Tokens generated from each; the statistic is a mean over ``prompts * tokens`` of them."""
    rounds: int = 3
    """Times the probes are sampled for calibration."""
    factor: float = 4.0
    """The band is ``factor`` times the worst calibration round, between floor and ceiling of the dtype."""
    floors: VerifyFloors = field(default_factory=VerifyFloors)
    """Lowest band by dtype."""
    ceilings: VerifyCeilings = field(default_factory=VerifyCeilings)
    """Highest band by dtype."""
    mixture_factor: float = 3.0
    """The highest bands of a mixture of experts are this many times ``ceilings``: some tokens go to other experts
    where server and trainer round differently."""
    seed: int = 0
    """Seed of the probe prompts."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompts", "tokens", "rounds", "factor", "mixture_factor")
        check_at_least(self, 0, "seed")

    def limits(self, dtype: str, *, mixture: bool) -> tuple[float, float]:
        """Lowest and highest band (nats) of a server in ``dtype``; ``mixture``: of a mixture of experts."""
        wider = self.mixture_factor if mixture else 1.0
        return getattr(self.floors, dtype), getattr(self.ceilings, dtype) * wider

    def looks(self, *, mixture: bool) -> int:
        """Rounds of probes after a publish, of which one must be in the band."""
        return 2 if mixture else 1


@dataclass(frozen=True)
class PublishConfig:
    """How new weights come to servers."""

    store: str = "shared"
    """shared: servers read each version in ``rollout.transfer_dir``, which they and the trainer see. Otherwise each
    server's machine pulls what changed into its own memory, from there (directory), from the trainer's
    machines (http), or from the object store at this URL (s3://..., gs://...)."""
    straggler_s: float = 30.0
    """Longest that a publish waits for the other servers once one is ready, if that one did not take longer itself
    (seconds). One that is not ready by then is left out until it is."""
    anchor_every: int = 16
    """Versions from one that is written whole to the next; those between are written as what changed."""
    in_place: bool = False
    """Whether vLLM servers write what changed into their weights as they stand, instead of loading all of them. Workers
    whose layers hold something else than what was loaded, as on a CPU, load all of them still. Not run on a GPU yet."""
    host: str = "127.0.0.1"
    """Address of this machine that ``store: http`` binds to: of loopback, or a private one with
    ``rollout.api_key_file``. Of several processes that of process 0; each other one serves its part of the weights at
    the address from which its machine reaches this one."""
    port: int = 0
    """Port of ``store: http``; 0: a free one. Of several processes that of process 0; process i has ``port`` + i."""

    def __post_init__(self) -> None:
        if self.store not in ("shared", "directory", "http") and "://" not in self.store:
            raise ValueError(f"store must be shared, directory, http or a URL, got {self.store!r}")
        if self.store.startswith(("http://", "https://")):
            raise ValueError(
                f"store must be http, with host and port, for weights that this machine serves, got {self.store!r}"
            )
        if self.in_place and self.store == "shared":
            raise ValueError("in_place is for weights that servers pull: store must be directory, http or a URL")
        check_at_least(self, 1, "anchor_every")
        check_positive(self, "straggler_s")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in 0..65535, got {self.port}")


SERVED = ("vllm", "sglang")
"""The engines that are servers over HTTP."""

RouterReplay = Literal["none", "r2", "r3"]

InFlight = Literal["wait", "keep", "abort"]


@dataclass(frozen=True)
class RolloutConfig:
    """How a step's responses are sampled."""

    engine: Literal["jax", "vllm", "sglang", "exact"] = "jax"
    """jax: the embedded engine. vllm, sglang: servers of that kind over HTTP. exact: the trainer's own executable, with
    zero mismatch but slow."""
    urls: tuple[str, ...] = ()
    """Base URLs of the servers."""
    discovery: str | None = None
    """Where servers are listed that may join and leave while the run goes on: a file with a URL in each line, a
    directory of files ``*.url``, or dns://HOST:PORT for a server at each address of HOST. ``urls`` is not used then."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype that the engine computes in. It must be the dtype of the weights published to it."""
    weight_quantization: Literal["none", "int8", "fp8"] = "none"
    """Rounds the matrices of the transformer blocks, as they are published in ``dtype``, to 8 bits: symmetric, with one
    scale for each output channel; fp8 is float8_e4m3fn. Embedding, LM head, norms and activations stay in ``dtype``.
    Only for the embedded engine."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Dtype of the cached keys and values, with scale 1. auto: ``dtype``. Only for the embedded engine."""
    max_staleness: int = 0
    """Most policy versions from the one that samples a batch to the one that is trained on it. 0: a batch is sampled
    when its step begins. k: while one step trains, the next batches are sampled, up to k steps ahead."""
    update: InFlight = "wait"
    """What becomes of the responses that servers sample ahead when new weights come. wait: they are finished first.
    keep: they are held, and go on with the new weights; their keys and values are computed again. abort: the servers
    hand back what they have of them, and the rest is asked of whichever server has room."""
    group_size: int = 16
    """Responses per prompt: at least 2, for the leave-one-out baseline."""
    max_response_tokens: int = 8192
    """Longest response (tokens), the end-of-sequence token included."""
    temperature: float = 1.0
    """Sampling temperature. It must be positive."""
    router_replay: RouterReplay = "none"
    """Which experts the trainer's forward takes, of a mixture. none: those of its own router. r3: those that each token
    went to in the engine, with gates of the trainer's router; a vLLM server is started with
    --enable-return-routed-experts. r2: in all updates of a batch those of the forward before the first."""
    max_route_bytes: int = 8 * 2**30
    """Most bytes that the routes of one step may take on the host; a run that could need more is refused."""
    transfer_dir: str | None = None
    """Directory for weights: one that the servers see where ``publish.store`` is shared or directory, and all trainer
    processes where it is directory. None: a memory-backed directory on this machine."""
    router: str | None = None
    """URL of a vllm-router that spreads rollouts over the servers, by its own policy. It is told which of them are
    verified, and of no others; weights and checks go to each server itself. None: rollouts do, too."""
    colocated: bool = False
    """Whether the vLLM servers are on the trainer's own devices: after sampling they sleep, which gives the memory of
    weights and caches back, and for sampling they wake, load the weights and are verified."""
    offload_state: bool = True
    """With ``colocated``: whether all that the trainer keeps is in the host's memory from one update to the next, so
    that the servers have the devices' memory: masters or adapters, moments, the weights under adapters and with them,
    and a reference policy. Each process keeps its shards, and of the state up to twice their bytes for a moment."""
    server_wait_s: float = 900.0
    """Longest time the run waits while no server answers (seconds)."""
    seeded: bool = True
    """Whether a seed is sent with each response to a server, so that equal weights sample alike as far as the server
    can: vLLM does, SGLang on its own settings does not. With another ``update`` than wait none is sent."""
    api_key_file: str | None = None
    """File with the key that the servers ask for, readable by its owner alone. None: the file that
    ``$RLJAX_API_KEY_FILE`` names, and no key where it names none."""
    limits: ClientLimits = field(default_factory=ClientLimits)
    """Limits of the client that talks to servers."""
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """How the use of published weights is verified on each server."""
    dump_every: int = 0
    """Steps between token dumps (``rollouts/step_*.parquet``, which rljax compare reads). 0: no dumps."""
    transcript_every: int = 0
    """Steps between readable transcripts (``rollouts/step_*.jsonl``). 0: no transcripts."""
    inject: InjectConfig = field(default_factory=InjectConfig)
    """Mismatch that is put into the rollouts on purpose."""

    def __post_init__(self) -> None:
        check_at_least(self, 2, "group_size")
        check_at_least(self, 1, "max_response_tokens", "max_route_bytes")
        check_finite(self, "temperature")
        check_positive(self, "temperature", "server_wait_s")
        check_at_least(self, 0, "max_staleness", "dump_every", "transcript_every")


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled.

    Attributes:
      max_response_tokens: most tokens a response may have, the stop token included (tokens).
      temperature: 0 means greedy. ``logprobs`` are always those of the distribution sampled from; greedy ones are at
        temperature 1.
      stop_token_ids: a response ends with, and includes, the first of these that is sampled.
    """

    max_response_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_response_tokens")
        check_finite(self, "temperature")


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens ``start`` (inclusive) to ``end`` (exclusive) were sampled under policy ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
      prompt_index: position of its prompt in the request's list.
      sample_index: 0 .. n-1 among the responses to that prompt.
      token_ids: int32 [t], the stop token included when one was sampled.
      logprobs: float32 [t], ``rollout_logprobs``: the engine's log-probability **of** each of these tokens.
      truncated: True when the length limit ended it (finish_reason "length").
      versions: the policy versions that sampled its tokens, in order; they cover the response without gaps.
      routes: uint8 or uint16 [s + t - 1, layers, k], the experts that each token of prompt (s) and response but the
        last went to; None where they are not reported.
    """

    prompt_index: int
    sample_index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool
    versions: tuple[VersionSpan, ...]
    routes: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.shape != self.logprobs.shape:
            raise ValueError(
                f"token_ids and logprobs must be vectors of one length, got {self.token_ids.shape} and "
                f"{self.logprobs.shape}"
            )

    @property
    def length(self) -> int:
        """Response length in tokens, the stop token included."""
        return int(self.token_ids.shape[0])

    @property
    def oldest_version(self) -> int:
        """The oldest policy version any of its tokens was sampled under."""
        return min(span.version for span in self.versions)
