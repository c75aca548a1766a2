"""The configuration of rollouts, the requests to an engine and its responses: token ids both ways, never text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rljax.errors import check_at_least, check_finite, check_positive
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.kinds import Engine, can
from rljax.tokens import TokenRecord


@dataclass(frozen=True)
class ServerForm:
    """The number formats in which servers hold weights and key-value cache. By default nothing is rounded.

    A server with other formats is refused. The weights are published in ``rollout.dtype``, and their bits are verified
    before the server rounds them.
    """

    weights: str = "none"
    """The quantization that the servers are started with, by vLLM's name, such as fp8_per_channel or
    int8_per_channel_weight_only. none: weights in ``rollout.dtype``."""
    kv_cache: str = "auto"
    """The dtype of the servers' cached keys and values, such as fp8_e4m3 or fp8_e5m2. auto: ``rollout.dtype``."""

    @property
    def is_rounded(self) -> bool:
        """Whether weights or cache are rounded to another form than the rollout dtype."""
        return self != ServerForm()

    def __str__(self) -> str:
        return f"weights {self.weights}, key-value cache {self.kv_cache}"

    @property
    def label(self) -> str:
        """The name of the form in a comparison, such as "fp8_e5m2 cache"; empty if nothing is rounded."""
        plain = ServerForm()
        parts = [f"{self.weights} weights"] if self.weights != plain.weights else []
        parts += [f"{self.kv_cache} cache"] if self.kv_cache != plain.kv_cache else []
        return ", ".join(parts)


@dataclass(frozen=True)
class VerifyConfig:
    """The settings of the check that a server computes with the published weights.

    The server generates from probe prompts, and the trainer scores the same tokens. The bits of the weights are
    verified at every publish, too, and need no settings.
    """

    prompts: int = 4
    """The number of probe prompts of one measurement, made from prompts of the run. The first measurement of a publish
    has half of them. Each measurement has all of them, and at least 16, for a mixture of experts, for a server that
    rounds to 8 bits (``rollout.server_form``), and where no run gives prompts."""
    tokens: int = 12
    """The number of tokens generated from each prompt; at least 16 for a server that rounds to 8 bits."""
    factor: float = 4.0
    """The largest mean difference of log-probabilities that passes, as a multiple of the worst one at the first
    publish. Each dtype has a lowest and a highest limit for it."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompts", "tokens", "factor")
        check_finite(self, "factor")


NOISE_SEED = 0
"""The seed of the noise on weights and logits."""


@dataclass(frozen=True)
class InjectConfig:
    """The mismatch that is put into the rollouts on purpose. By default there is none. Its kinds may be combined."""

    weight_noise: float = 0.0
    """The standard deviation of the Gaussian noise on each weight tensor, relative to the tensor's root mean square."""
    quantize: Literal["none", "int8", "fp8"] = "none"
    """The format that the matrices of the transformer blocks are rounded to, with one scale for each output channel, as
    a quantized engine stores them. none: no rounding."""
    dtype: Literal["same", "bfloat16", "float16"] = "same"
    """The dtype that the weights are rounded to. same: the weights stay as published."""
    logit_noise: float = 0.0
    """The standard deviation of the Gaussian noise on each logit before sampling. A response that is sampled again
    from the same seed gets the same noise. Greedy sampling, as in an evaluation, has none."""
    staleness: int = 0
    """The number of policy versions by which the sampling weights are older than the published ones."""

    def __post_init__(self) -> None:
        check_finite(self, "weight_noise", "logit_noise")
        check_at_least(self, 0, "staleness")

    @property
    def changes_weights(self) -> bool:
        """Whether rollouts use other weights than the published ones."""
        return self.staleness > 0 or self.weight_noise > 0 or self.quantize != "none" or self.dtype != "same"

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not the defaults, by name."""
        defaults = vars(InjectConfig())
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


@dataclass(frozen=True)
class ClientLimits:
    """The limits of the HTTP client."""

    request_timeout_s: float = 3000.0
    """The longest that one response may take, its wait at the server included (seconds)."""
    max_outstanding: int = 512
    """The most requests at one server at a time. The others wait in the client, so a faster server gets more."""

    def __post_init__(self) -> None:
        check_positive(self, "request_timeout_s")
        check_at_least(self, 1, "max_outstanding")


InFlight = Literal["wait", "keep", "abort"]


@dataclass(frozen=True)
class RolloutConfig:
    """The settings of sampling the responses of a step."""

    engine: Engine = "jax"
    """The engine that samples. jax: the embedded engine. vllm, sglang: servers of that kind over HTTP. exact: the
    trainer's own executable, with zero mismatch but slow."""
    urls: tuple[str, ...] = ()
    """The base URLs of the servers."""
    discovery: str | None = None
    """The list of servers that may join and leave while the run goes on: a file with a URL in each line, a directory
    of files ``*.url``, or dns://HOST:PORT for a server at each address of HOST. ``urls`` is not used then."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The dtype that the engine computes in. It must be the dtype of the weights published to it."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """The dtype of the cached keys and values, with scale 1. auto: ``dtype``. Only for the embedded engine."""
    decode_tokens: int = 0
    """The most tokens of prompts and responses whose keys and values the embedded engine holds at once, on all devices
    together. Responses that do not fit wait until others end. 0: as many tokens as fit into the free memory of the
    devices."""
    max_staleness: int = 0
    """The most versions by which the policy that samples a batch may be older than the policy that trains on it. 0: a
    batch is sampled when its step begins. k: while one step trains, the next batches are sampled, up to k steps ahead.
    With ``trajectories``, groups with older tokens are dropped."""
    update: InFlight = "wait"
    """The fate of the responses that servers sample ahead when new weights come. wait: they are finished first. keep:
    they are held, and go on with the new weights after their keys and values are computed again. abort: the servers
    return their tokens so far, and any server with room samples the rest."""
    group_size: int = 16
    """The number of responses to each prompt, at least 2 for the leave-one-out baseline."""
    refill: bool = False
    """Whether groups whose rewards are all equal, which carry no loss, are replaced by groups of new prompts. A further
    round of sampling asks for as many prompts as groups are missing. After four such rounds the first groups without
    signal fill the batch up."""
    max_response_tokens: int = 8192
    """The longest response, the end-of-sequence token included (tokens). With an ``environment``: the longest
    trajectory behind its prompt, all turns and replies included."""
    temperature: float = 1.0
    """The sampling temperature. It must be positive."""
    top_logprobs: int = 0
    """The number of likeliest tokens at each position that the engine reports with their log-probabilities. Score
    centering and the regions over the likeliest tokens need them. 0: none, or ``top_k`` where that is set."""
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
    router_replay: Literal["none", "r2", "r3"] = "none"
    """The experts of a mixture that the trainer's forward uses. none: the choice of its own router. r3: the experts
    that each token went to in the engine, with gates of the trainer's router; a vLLM server is started with
    --enable-return-routed-experts. r2: in all updates of a batch, the choice of the forward before the first one."""
    transfer_dir: str | None = None
    """The directory for weights. The servers must see it where ``publish.store`` is shared or directory, and all
    trainer processes where it is directory. None: a memory-backed directory on this machine."""
    colocated: bool = False
    """Whether the vLLM servers are on the trainer's own devices. After sampling they sleep, which frees the memory of
    their weights and caches. Before sampling they wake, load the weights and are verified. Between updates the
    trainer's arrays are in the host's memory: masters or adapters, moments, base and merged weights, and a reference
    policy. Each process keeps its own shards. For a moment the state needs up to twice the bytes of its shards."""
    server_wait_s: float = 900.0
    """The longest that the run waits while no server answers (seconds)."""
    server_form: ServerForm = field(default_factory=ServerForm)
    """The form in which the servers hold weights and cache. Only for engines vllm and sglang."""
    batch_invariant: bool = False
    """Whether the servers must compute each token with bits that do not depend on the batch around it. They are started
    with --batch-invariant (``rljax serve vllm --batch-invariant``), and a server without it is refused."""
    api_key_file: str | None = None
    """The file with the key that the servers ask for, readable only by its owner. None: the file that
    ``$RLJAX_API_KEY_FILE`` names. Where that is not set, servers are asked with the key in ``~/.rljax.key``, if it is
    there (``rljax serve`` makes it)."""
    limits: ClientLimits = field(default_factory=ClientLimits)
    """The limits of the client that talks to servers."""
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """The settings of the verification, which proves that each server uses the published weights."""
    environment: str | None = None
    """The environment of trajectories of several turns: a class ``package.module:Class`` or ``FILE.py:Class``. It
    replies to each turn and rewards the trajectory. None: each prompt has one response,
    which ``data.reward`` scores."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """The limits of trajectories with an ``environment``."""
    trajectories: str | None = None
    """The source of trajectories that another program makes and the run trains on: a directory of Parquet or JSONL
    files, or the address http://HOST:PORT at which the trainer receives them (PORT 0: a free one). ``engine`` then gets
    the weights only for evaluations. None: ``engine`` samples the training data."""
    dump_every: int = 0
    """The number of steps between token dumps, ``rollouts/step_*.parquet``, for ``rljax compare`` and ``rljax view``.
    0: no dumps."""
    transcript_every: int = 0
    """The number of steps between readable transcripts (``rollouts/step_*.jsonl``). 0: no transcripts."""
    inject: InjectConfig = field(default_factory=InjectConfig)
    """The mismatch that is put into the rollouts on purpose."""

    def __post_init__(self) -> None:
        check_at_least(self, 2, "group_size")
        check_at_least(self, 1, "max_response_tokens")
        check_finite(self, "temperature")
        check_positive(self, "temperature", "server_wait_s")
        if min(self.stop_token_ids, default=0) < 0:
            raise ValueError(f"stop_token_ids must be at least 0, got {list(self.stop_token_ids)}")
        check_at_least(self, 0, "max_staleness", "decode_tokens", "dump_every", "transcript_every")
        check_at_least(self, 0, "top_logprobs", "top_k")
        if not 0.0 < self.top_p <= 1.0 or not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1), got {self.top_p} and {self.min_p}")
        if self.top_k == 0 and (self.top_p < 1.0 or self.min_p > 0.0):
            raise ValueError("top_p and min_p need top_k, which bounds the number of tokens that are reported")
        if self.top_k and self.top_logprobs > self.top_k:
            raise ValueError(f"top_logprobs must be at most top_k = {self.top_k}, got {self.top_logprobs}")
        if self.episode.max_turn_tokens > self.max_response_tokens:
            longest = f"at most max_response_tokens = {self.max_response_tokens}"
            raise ValueError(f"episode.max_turn_tokens must be {longest}, got {self.episode.max_turn_tokens}")

    @property
    def reported(self) -> int:
        """The number of likeliest tokens that the engine reports at each position."""
        return self.top_k or self.top_logprobs

    @property
    def is_cut(self) -> bool:
        """Whether some tokens cannot be sampled, so that the trainer normalises over the other ones."""
        return self.top_k > 0

    @property
    def engine_form(self) -> ServerForm:
        """The form in which the engine holds weights and cache, for every kind of engine."""
        own = ServerForm(self.inject.quantize, self.kv_cache_dtype)
        return self.server_form if can(self.engine, "serves") else own


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one request for responses."""

    max_response_tokens: int  # the longest response, the stop token included
    # The temperature, or 0 for greedy sampling. Log-probabilities are those of the distribution that is sampled from;
    # with greedy sampling they are those at temperature 1.
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()  # a response ends with the first of them that is sampled
    top_p: float = 1.0  # the smallest set of likeliest tokens with at least this probability; top_k must be given
    top_k: int = 0  # no more than this number of likeliest tokens is sampled from; 0 for no such bound
    min_p: float = 0.0  # the least share of the likeliest token's probability that is sampled; top_k must be given
    reported: int = 0  # the number of likeliest tokens that are reported at each position

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_response_tokens")
        check_finite(self, "temperature")


@dataclass(frozen=True, eq=False)
class Response(TokenRecord):
    """One sampled response behind its prompt, or a trajectory of several turns.

    The tokens of a trajectory come from the policy and from its environment, in the order in which the engine saw
    them.
    """

    prompt_index: int = 0  # the position of the prompt in the request's list
    sample_index: int = 0  # the position among the responses to that prompt, 0 .. n-1
    truncated: bool = False  # whether the length limit ended the response (finish_reason "length")
    # The other rows of the trajectory, which begin where a turn's prompt did not extend the tokens before it.
    further: tuple[Response, ...] = ()

    @property
    def rows(self) -> tuple[Response, ...]:
        """The rows of tokens: this response, and the responses in ``further``."""
        return self, *self.further

    @property
    def trained_rows(self) -> tuple[Response, ...]:
        """The rows that have at least one token behind their prompt."""
        return tuple(row for row in self.rows if len(row.response))

    @property
    def length(self) -> int:
        """The number of sampled tokens, stop tokens included, over all rows."""
        return sum(int(np.count_nonzero(row.sampled)) for row in self.rows)

    @property
    def versions(self) -> np.ndarray:
        """The policy versions that sampled any of the tokens, int32, in rising order. Empty if they are not known."""
        known = [row["version"] for row in self.rows if "version" in row.columns]
        return np.unique(np.concatenate([np.zeros(0, np.int32), *known]))
