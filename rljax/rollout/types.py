"""The configuration of rollouts, the requests to an engine and its responses: token ids both ways, never text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from rljax.errors import check_at_least, check_finite, check_positive
from rljax.rollout.form import ServerForm


@dataclass(frozen=True)
class InjectConfig:
    """Mismatch that is put into the rollouts on purpose. By default there is none, and its kinds may be combined."""

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
        """Whether rollouts use other weights than those that were published."""
        return self.staleness > 0 or self.weight_noise > 0 or self.quantize != "none" or self.dtype != "same"

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not the defaults, by name."""
        defaults = vars(InjectConfig())
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


@dataclass(frozen=True)
class ClientLimits:
    """The limits of time and of requests of the HTTP client."""

    request_timeout_s: float = 3600.0
    """The longest that one response may take, its wait at the server included (seconds)."""
    connect_timeout_s: float = 10.0
    """The longest that a connection may take to open (seconds)."""
    max_outstanding: int = 512
    """The most requests at one server at a time. The others wait in the client, so a faster server gets more."""
    max_attempts: int = 6
    """The number of attempts at one response before the run gives up."""
    backoff_s: float = 0.25
    """The wait before the first retry, which is doubled for each further one (seconds)."""
    max_backoff_s: float = 8.0
    """The longest wait before a retry (seconds)."""

    def __post_init__(self) -> None:
        check_positive(self, "request_timeout_s", "connect_timeout_s", "max_backoff_s")
        check_at_least(self, 1, "max_outstanding", "max_attempts")
        check_at_least(self, 0, "backoff_s")


@dataclass(frozen=True)
class VerifyFloors:
    """The lowest bands of mean |server - trainer| per token (nats), because a policy's own mismatch moves as it learns.

    A tiny random model with equal weights showed 1.2e-2 in bfloat16, 1.6e-3 in float16 and 9e-7 in float32.
    """

    bfloat16: float = 2e-2
    """The lowest band of a server in bfloat16 (nats)."""
    float16: float = 2.5e-3
    """The lowest band of a server in float16 (nats)."""
    float32: float = 1e-5
    """The lowest band of a server in float32 (nats)."""


@dataclass(frozen=True)
class VerifyCeilings:
    """The highest bands of mean |server - trainer| per token (nats). A calibration above them is refused."""

    bfloat16: float = 8e-2
    """The highest band of a server in bfloat16 (nats)."""
    float16: float = 1e-2
    """The highest band of a server in float16 (nats)."""
    float32: float = 1e-3
    """The highest band of a server in float32 (nats)."""


@dataclass(frozen=True)
class VerifyConfig:
    """The settings of the verification that a server uses the published weights.

    The server generates from probe prompts, and the trainer scores the same tokens. The bits of the weights are
    verified at every publish, too, and need no settings.
    """

    prompts: int = 4
    """The number of probe prompts of one look. They are made from prompts of the run."""
    tokens: int = 32
    """The number of tokens generated from each prompt. The statistic is a mean over ``prompts * tokens`` tokens."""
    rounds: int = 3
    """The number of times that the probes are sampled for calibration."""
    factor: float = 4.0
    """The band is ``factor`` times the worst calibration round, between floor and ceiling of the dtype."""
    floors: VerifyFloors = field(default_factory=VerifyFloors)
    """The lowest band of each dtype."""
    ceilings: VerifyCeilings = field(default_factory=VerifyCeilings)
    """The highest band of each dtype."""
    mixture_factor: float = 3.0
    """The highest bands of a mixture of experts, as a multiple of ``ceilings``. Some tokens go to other experts where
    server and trainer round differently."""
    rounded_floor: float = 0.1
    """The lowest band of a server that rounds to 8 bits as ``rollout.server_form`` says, in every dtype (nats)."""
    rounded_ceiling: float = 0.6
    """The highest band of a server that rounds to 8 bits as ``rollout.server_form`` says, in every dtype (nats)."""
    seed: int = 0
    """The seed of the choice of the probe prompts."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompts", "tokens", "rounds", "factor", "mixture_factor")
        check_at_least(self, 0, "seed")

    def limits(self, dtype: str, *, mixture: bool, rounded: bool = False) -> tuple[float, float]:
        """Returns the lowest and highest band (nats) of a server in ``dtype``.

        ``mixture``: Whether it serves a mixture of experts. ``rounded``: Whether it rounds weights or cache to 8 bits.
        """
        wider = self.mixture_factor if mixture else 1.0
        if rounded:
            return self.rounded_floor, self.rounded_ceiling * wider
        return getattr(self.floors, dtype), getattr(self.ceilings, dtype) * wider


@dataclass(frozen=True)
class PublishConfig:
    """The way in which new weights come to servers."""

    store: str = "shared"
    """The place that servers get weights from. shared: servers read each version in ``rollout.transfer_dir``, which
    they and the trainer see. Otherwise each server's machine pulls what changed into its own memory: from that
    directory (directory), from the trainer's machines (http), or from the object store at this URL (s3://..., gs://...)."""
    straggler_s: float = 30.0
    """The longest that a publish waits for the other servers once one is ready, if that one did not take longer itself
    (seconds). A server that is not ready by then is left out until it is."""
    anchor_every: int = 16
    """The number of versions from one that is written whole to the next. Those between are written as what changed."""
    in_place: bool = False
    """Whether vLLM servers write what changed into their weights, instead of loading all of them. Workers whose layers
    hold something else than what was loaded, as on a CPU, still load all of them. It has not run on a GPU yet."""
    host: str = "127.0.0.1"
    """The address of process 0's machine that ``store: http`` binds to: one of loopback, or a private one with
    ``rollout.api_key_file``. Each other process serves its part of the weights at the address from which its machine
    reaches this one."""
    port: int = 0
    """The port of ``store: http`` on process 0; 0 takes a free one. Process i has ``port`` + i."""

    def __post_init__(self) -> None:
        if self.store not in ("shared", "directory", "http") and "://" not in self.store:
            raise ValueError(f"store must be shared, directory, http or a URL, got {self.store!r}")
        if self.store.startswith(("http://", "https://")):
            raise ValueError(f"store must be http, with host and port, for weights that are served, got {self.store!r}")
        if self.in_place and self.store == "shared":
            raise ValueError("in_place is for weights that servers pull: store must be directory, http or a URL")
        check_at_least(self, 1, "anchor_every")
        check_positive(self, "straggler_s")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in 0..65535, got {self.port}")


SERVED = ("vllm", "sglang")
"""The names of the engines that are servers over HTTP."""

RouterReplay = Literal["none", "r2", "r3"]

InFlight = Literal["wait", "keep", "abort"]


@dataclass(frozen=True)
class RolloutConfig:
    """The settings of sampling the responses of a step."""

    engine: Literal["jax", "vllm", "sglang", "exact"] = "jax"
    """The engine that samples. jax: the embedded engine. vllm, sglang: servers of that kind over HTTP. exact: the
    trainer's own executable, with zero mismatch but slow."""
    urls: tuple[str, ...] = ()
    """The base URLs of the servers."""
    discovery: str | None = None
    """The list of servers that may join and leave while the run goes on: a file with a URL in each line, a directory
    of files ``*.url``, or dns://HOST:PORT for a server at each address of HOST. ``urls`` is not used then."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The dtype that the engine computes in. It must be the dtype of the weights published to it."""
    weight_quantization: Literal["none", "int8", "fp8"] = "none"
    """Rounds the matrices of the transformer blocks, as they are published in ``dtype``, to 8 bits: symmetric, with one
    scale for each output channel; fp8 is float8_e4m3fn. Embedding, LM head, norms and activations stay in ``dtype``.
    Only for the embedded engine."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """The dtype of the cached keys and values, with scale 1. auto: ``dtype``. Only for the embedded engine."""
    decode_tokens: int = 0
    """The most tokens of prompts and responses whose keys and values the embedded engine holds at once, on all devices
    together. Responses that do not fit wait for the places of those that end. 0: as many as fit into the free memory of
    the devices."""
    max_staleness: int = 0
    """The most policy versions from the one that samples a batch to the one that is trained on it. 0: a batch is
    sampled when its step begins. k: while one step trains, the next batches are sampled, up to k steps ahead."""
    update: InFlight = "wait"
    """The fate of the responses that servers sample ahead when new weights come. wait: they are finished first. keep:
    they are held, and go on with the new weights after their keys and values are computed again. abort: the servers
    hand back what they have of them, and the rest is asked of whichever server has room."""
    group_size: int = 16
    """The number of responses to each prompt, at least 2 for the leave-one-out baseline."""
    refill: bool = False
    """Whether groups whose rewards are all equal are replaced by groups of new prompts. They carry no loss. A further
    round of sampling asks for as many prompts as groups are missing."""
    refill_limit: int = 4
    """The most further rounds of a step with ``refill``, at least 1. After them the earliest groups without signal fill
    the batch up. So a step samples up to 1 + ``refill_limit`` batches."""
    max_response_tokens: int = 8192
    """The longest response, the end-of-sequence token included (tokens)."""
    temperature: float = 1.0
    """The sampling temperature. It must be positive."""
    top_logprobs: int = 0
    """The number of likeliest tokens at each position that the engine reports with their log-probabilities. Score
    centering and the regions over the likeliest tokens need them. 0: none, or ``top_k`` where that is set."""
    max_top_bytes: int = 8 * 2**30
    """The most bytes that the likeliest tokens of one step may take on the host. A run that could need more is
    refused."""
    top_p: float = 1.0
    """Sampling is cut to the smallest set of likeliest tokens that has at least this probability. 1: no cut. It needs
    ``top_k``."""
    top_k: int = 0
    """Sampling is cut to this number of likeliest tokens. The trainer normalises over the tokens that are left. 0: no
    cut."""
    min_p: float = 0.0
    """Sampling is cut to the tokens with at least this share of the likeliest token's probability. 0: no cut. It needs
    ``top_k``."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, in training and evaluation, besides those of the model's files. A base model with
    a chat template needs the template's end token here."""
    router_replay: RouterReplay = "none"
    """The experts of a mixture that the trainer's forward uses. none: the choice of its own router. r3: the experts
    that each token went to in the engine, with gates of the trainer's router; a vLLM server is started with
    --enable-return-routed-experts. r2: in all updates of a batch, the choice of the forward before the first one."""
    max_route_bytes: int = 8 * 2**30
    """The most bytes that the routes of one step may take on the host. A run that could need more is refused."""
    transfer_dir: str | None = None
    """The directory for weights. The servers must see it where ``publish.store`` is shared or directory, and all
    trainer processes where it is directory. None: a memory-backed directory on this machine."""
    router: str | None = None
    """The URL of a vllm-router that spreads rollouts over the servers, by its own policy. It is told of the verified
    servers and of no others. Weights and checks go to each server itself. None: rollouts do, too."""
    colocated: bool = False
    """Whether the vLLM servers are on the trainer's own devices. After sampling they sleep, which gives the memory of
    weights and caches back. For sampling they wake, load the weights and are verified."""
    offload_state: bool = True
    """Whether, with ``colocated``, all that the trainer keeps is in the host's memory between updates, so that the
    servers have the devices' memory. That is masters or adapters, moments, base and merged weights, and a reference
    policy. Each process keeps its shards; of the state it needs up to twice their bytes for a moment."""
    server_wait_s: float = 900.0
    """The longest that the run waits while no server answers (seconds)."""
    seeded: bool = True
    """Whether a seed is sent for each response, so that equal weights sample alike as far as the server can. vLLM does,
    and SGLang on its own settings does not. With another ``update`` than wait no seed is sent."""
    server_form: ServerForm = field(default_factory=ServerForm)
    """The form in which the servers hold weights and cache. It is for engines vllm and sglang."""
    batch_invariant: bool = False
    """Whether the servers must compute each token with bits that do not depend on the batch around it. They are started
    with --batch-invariant (``rljax serve vllm --batch-invariant``), and a server without it is refused."""
    api_key_file: str | None = None
    """The file with the key that the servers ask for, readable by its owner alone. None: the file that
    ``$RLJAX_API_KEY_FILE`` names, and no key where that is not set."""
    limits: ClientLimits = field(default_factory=ClientLimits)
    """The limits of the client that talks to servers."""
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """The settings of the verification that each server uses the published weights."""
    dump_every: int = 0
    """The number of steps between token dumps (``rollouts/step_*.parquet``, for ``rljax compare``). 0: no dumps."""
    transcript_every: int = 0
    """The number of steps between readable transcripts (``rollouts/step_*.jsonl``). 0: no transcripts."""
    inject: InjectConfig = field(default_factory=InjectConfig)
    """The mismatch that is put into the rollouts on purpose."""

    def __post_init__(self) -> None:
        check_at_least(self, 2, "group_size")
        check_at_least(self, 1, "refill_limit")
        check_at_least(self, 1, "max_response_tokens", "max_route_bytes")
        check_finite(self, "temperature")
        check_positive(self, "temperature", "server_wait_s")
        if min(self.stop_token_ids, default=0) < 0:
            raise ValueError(f"stop_token_ids must be at least 0, got {list(self.stop_token_ids)}")
        check_at_least(self, 0, "max_staleness", "decode_tokens", "dump_every", "transcript_every")
        check_at_least(self, 0, "top_logprobs", "top_k")
        check_at_least(self, 1, "max_top_bytes")
        if not 0.0 < self.top_p <= 1.0 or not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1), got {self.top_p} and {self.min_p}")
        if self.top_k == 0 and (self.top_p < 1.0 or self.min_p > 0.0):
            raise ValueError("top_p and min_p need top_k, which bounds the number of tokens that are reported")
        if self.top_k and self.top_logprobs > self.top_k:
            raise ValueError(f"top_logprobs must be at most top_k = {self.top_k}, got {self.top_logprobs}")

    @property
    def reported(self) -> int:
        """The number of likeliest tokens that the engine reports at each position."""
        return self.top_k or self.top_logprobs

    @property
    def reported_key(self) -> str:
        """The configuration key that sets ``reported``, and its value."""
        return f"rollout.{'top_k' if self.is_cut else 'top_logprobs'} = {self.reported}"

    @property
    def is_cut(self) -> bool:
        """Whether some tokens cannot be sampled, so that the trainer normalises over those that can."""
        return self.top_k > 0

    @property
    def engine_form(self) -> ServerForm:
        """The form in which the engine holds weights and cache, whichever engine it is."""
        own = ServerForm(self.weight_quantization, self.kv_cache_dtype)
        return own if self.engine == "jax" else self.server_form


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one request for responses."""

    max_response_tokens: int  # the longest response, the stop token included
    # 0 for greedy. Log-probabilities are of the distribution that is sampled from, and at temperature 1 for greedy.
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()  # a response ends with the first of them that is sampled
    top_p: float = 1.0  # the smallest set of likeliest tokens with at least this probability is sampled from
    top_k: int = 0  # no more than this number of likeliest tokens is sampled from; 0 for no such bound
    min_p: float = 0.0  # tokens below this share of the likeliest token's probability are not sampled
    reported: int = 0  # the number of likeliest tokens that are reported at each position

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_response_tokens")
        check_finite(self, "temperature")


class Tops(NamedTuple):
    """The likeliest tokens at each position of a response, likeliest first, with the sampler's log-probabilities.

    The sampled token is among them only where it is one of the likeliest. Where the distribution is cut (``top_p``,
    ``top_k``, ``min_p``), these are all tokens that could be sampled.
    """

    ids: np.ndarray  # the token ids, int32 [t, k]; -1 where fewer than k tokens could be sampled
    logprobs: np.ndarray  # of the distribution that is sampled from (nats), float32 [t, k]; -inf where the id is -1


@dataclass(frozen=True)
class VersionSpan:
    """The response tokens from ``start`` up to but not including ``end``, which policy ``version`` sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    prompt_index: int  # the position of the prompt in the request's list
    sample_index: int  # the position among the responses to that prompt, 0 .. n-1
    token_ids: np.ndarray  # int32 [t], the stop token included when one was sampled
    logprobs: np.ndarray  # the engine's log-probability *of* each of these tokens (``rollout_logprobs``), float32 [t]
    truncated: bool  # whether the length limit ended the response (finish_reason "length")
    versions: tuple[VersionSpan, ...]  # the policy versions that sampled the tokens, in order and without gaps
    # The experts of each token of prompt (s) and response but the last, uint8 or uint16 [s + t - 1, layers, k].
    routes: np.ndarray | None = None
    tops: Tops | None = None  # the likeliest tokens at each position, where they were asked for

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.shape != self.logprobs.shape:
            shapes = f"{self.token_ids.shape} and {self.logprobs.shape}"
            raise ValueError(f"token_ids and logprobs must be vectors of one length, got {shapes}")

    @property
    def length(self) -> int:
        """The length of the response, the stop token included (tokens)."""
        return int(self.token_ids.shape[0])

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled any of the tokens."""
        return min(span.version for span in self.versions)
