"""Scores the sequences of a dump with an engine; a spec such as ``jax:bfloat16`` names the engine."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.compare.importers import read_tokens
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.model import Remat, param_shardings
from rljax.policy.score import make_scorer
from rljax.record.token_dumps import ColumnSource, TokenDump, after_prompts, common_prefix
from rljax.rollout.build import connect, load_jax_engine
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.injected import CACHES
from rljax.rollout.kinds import can, engines_that
from rljax.rollout.servers.model import ServedModel
from rljax.rollout.servers.requests import ServerInfo
from rljax.rollout.types import ClientLimits, ServerForm
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.exact import ExactPass
from rljax.trainer.measure import Cause
from rljax.trainer.objective import Objective
from rljax.trainer.self_check import other_mesh
from rljax.trainer.state import PrecisionConfig
from rljax.weights.format import weights_hash

T = TypeVar("T")
Vectors = Iterator[np.ndarray]  # the log-probabilities of each sequence, float32 [t], NaN if unknown

DTYPES = ("float32", "bfloat16", "float16")
ON_TPU = "-tpu"  # the end of the name of an engine on a TPU

_SERVER_LIMITS = ClientLimits(request_timeout_s=600.0)
_NONE = np.full(1, np.nan, np.float32)  # position 0 carries no log-probability

_OF_MODEL, _OF_ENGINE = "DTYPE[@DIR]", "DTYPE[/CACHE][@DIR]"
_SERVERS = engines_that("serves")
_DECODERS = tuple(f"{kind}-decode" for kind in engines_that("decodes_given"))  # servers that decode given tokens
_DTYPE = f"({'|'.join(DTYPES)})"
_CACHE = f"(/({'|'.join(CACHES)}))?"
_PATTERNS = {
    "DTYPE": _DTYPE,
    _OF_MODEL: f"{_DTYPE}(@.+)?",
    _OF_ENGINE: f"{_DTYPE}{_CACHE}(@.+)?",
    "URL": "https?://.*",
    "FILE#COLUMN": ".*#.*",
}
_FORMS = (
    dict.fromkeys(("jax", "exact", "hf"), _OF_MODEL)
    | dict.fromkeys(("jax-decode", "jax-prefill"), _OF_ENGINE)
    | dict.fromkeys((*_SERVERS, *_DECODERS), "URL")
    | {"dump": "FILE#COLUMN"}
)


def score_column(
    spec: str,
    dump: TokenDump,
    model: str | os.PathLike[str] | None = None,
    *,
    temperature: float = 1.0,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda count: None,
    cause: Cause = "shape",
) -> tuple[list[np.ndarray], ColumnSource]:
    """Returns the log-probabilities of each sequence of a dump, float32 [t] (nats, NaN if unknown), and their source.

    The forms of a spec are:

    - ``jax:DTYPE``: the forward pass of this library.
    - ``jax-decode:DTYPE``: the embedded engine, one token at a time through its key-value cache; responses only.
    - ``jax-prefill:DTYPE``: the embedded engine, the whole sequence at once as it computes a prompt.
    - ``exact:DTYPE``: the executable with which the exact engine samples and trains.
    - ``hf:DTYPE``: transformers on torch.
    - ``vllm:URL``, ``sglang:URL``: the prompt log-probabilities of a running server.
    - ``vllm-decode:URL``: a running server with rljax's plugin, which decodes the given responses token by token.
    - ``dump:FILE#COLUMN``: a column of a file that ``read_tokens`` can read; sequences are matched by their ids.

    Args:
      spec: The spec of the scorer. A spec with a DTYPE may name a model directory: ``jax:DTYPE@DIR``. A spec of the
        embedded engine may name an 8-bit cache: ``jax-decode:DTYPE/fp8_e5m2``.
      dump: The sequences to score.
      model: The Hugging Face directory for a spec with a DTYPE that names none.
      temperature: The temperature of the distribution, positive; it must be 1 for a server.
      batch_size: The number of sequences in a forward pass, or of requests at a time.
      progress: A function that is called with the number of newly scored sequences.
      cause: The program for ``jax:``. shape: the forward on one device. mesh: the forward on all devices, with weights
        split by ``self_check.other_mesh``. remat: the forward of a program with a backward that recomputes its blocks.

    Raises:
      ValueError: The spec is unknown, a token id is outside the vocabulary, FILE lacks a sequence or has other tokens
        for it, or a server does not accept a sequence.
      ServerError: A server does not answer, or refuses.
    """
    kind, argument = split_spec(spec)
    if kind == "dump":
        vectors, source = _read_column(argument, dump)
        progress(len(vectors))
        return vectors, source
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if kind in (*_SERVERS, *_DECODERS):
        if temperature != 1.0:
            raise ValueError(f"a server's log-probabilities of given tokens are at temperature 1, got {temperature:g}")
        served = kind.removesuffix("-decode")
        with open_server(argument, served) as server:
            if kind in _DECODERS:
                prompts, responses = _split(dump)
                decoded = server.decode(prompts, responses, at_once=batch_size)
                scored: Iterable[np.ndarray] = after_prompts(prompts, counted(decoded, progress))
            else:
                scored = counted(server.score(dump.token_ids, at_once=batch_size), progress)
            return list(scored), server_source(server.info, "decode" if kind in _DECODERS else "", 1.0, served)
    dtype, directory = split_model(spec, model)
    if kind != "hf":  # transformers may read a model that this library cannot
        check_vocabulary(dump, read_config(directory).vocab_size)
    jax_scores: Callable[..., Vectors] = functools.partial(_jax_scores, cause=cause)
    local = {"jax": jax_scores, "jax-decode": _decode_scores, "jax-prefill": _prefill_scores}
    score = (local | {"exact": _exact_scores, "hf": _hf_scores})[kind]
    vectors = list(counted(score(directory, dtype, temperature, dump, batch_size), progress))
    return vectors, local_source(kind, dtype, temperature, directory)


def open_server(url: str, kind: str = "vllm") -> contextlib.closing[ServedModel]:
    """Connects to the server of a kind (vllm or sglang) at ``url``; the end of a ``with`` closes it.

    Raises ServerError if it does not answer, or refuses, and ValueError if it does not serve exactly one model.
    """
    return contextlib.closing(connect([url], _SERVER_LIMITS, kind=kind))


def counted(items: Iterable[T], progress: Callable[[int], object]) -> Iterator[T]:
    """Yields the items and calls ``progress(1)`` after each."""
    for item in items:
        yield item
        progress(1)


def server_label(info: ServerInfo) -> str:
    """Returns the dtype of a server with its 8-bit form, if it has one, or its address if the dtype is unknown."""
    form = f" ({info.form.label})" if info.form.is_rounded else ""
    return f"{info.dtype}{form}" if info.dtype else info.url.partition("://")[2]


def server_kind(info: ServerInfo, kind: str = "vllm") -> str:
    """Returns the kind of a server. vLLM on a TPU is ``vllm-tpu``, as its distribution is named."""
    return kind + ON_TPU if info.platform == "tpu" else kind


def server_source(info: ServerInfo, way: str, temperature: float | None, kind: str = "vllm") -> ColumnSource:
    """Returns the source of a column that a server of ``kind`` computes; ``way`` (decode or "") ends its engine's name.

    The hash of the weights is empty if weights have been published to the server, or if its model's files are not here.
    """
    readable = info.has_first_weights and any(Path(info.root).glob("*.safetensors"))
    known_hash = weights_hash(info.root) if readable else ""
    engine = f"{server_kind(info, kind)} {info.version} {way}".strip()
    return ColumnSource(engine, info.dtype, known_hash, temperature, "rollout", info.form.label)


def local_source(kind: str, dtype: str, temperature: float, model: str | os.PathLike[str]) -> ColumnSource:
    """Returns the source of a column that this process computes.

    ``kind`` is jax, jax-decode, jax-prefill, exact or hf. ``dtype`` may be DTYPE/CACHE for the embedded engine.
    """
    engine = f"transformers {version('transformers')}" if kind == "hf" else f"jax {jax.__version__}"
    if kind in ("jax-decode", "jax-prefill"):
        dtype, cache = _split_cache(dtype)
        engine = f"{engine} {kind.removeprefix('jax-')}"
        form = ServerForm(kv_cache=cache).label
        return ColumnSource(engine, dtype, weights_hash(model), temperature, "rollout", form)
    return ColumnSource(engine, dtype, weights_hash(model), temperature)


def split_spec(spec: str) -> tuple[str, str]:
    """Splits a scorer's spec: ``jax:float32`` becomes ``("jax", "float32")``. Raises ValueError for an unknown form."""
    kind = spec.partition("-decode:")[0]
    if kind in _SERVERS and not can(kind, "decodes_given"):
        reason = f"{spec!r} samples and cannot score, because {kind} decodes no given tokens"
        raise ValueError(f"{reason}; score them with {spec.replace('-decode', '', 1)}, or sample with --sample")
    return parse_spec("scorer", spec, _FORMS)


def split_model(spec: str, model: str | os.PathLike[str] | None) -> tuple[str, Path]:
    """Returns the dtype and the model directory of the spec ``KIND:DTYPE[@DIR]``.

    The directory is ``model`` if the spec names none. Raises ValueError if both name none, or the spec is
    unknown.
    """
    dtype, _, own = split_spec(spec)[1].partition("@")
    if not own and model is None:
        raise ValueError(f"scorer {spec!r} needs a model directory")
    return dtype, Path(own or model or "")


def parse_spec(what: str, spec: str, forms: Mapping[str, str]) -> tuple[str, str]:
    """Splits the spec KIND:ARGUMENT of a "scorer" or "sampler"; raises ValueError for an unknown form.

    ``forms`` has the form of ARGUMENT by kind: "DTYPE", "DTYPE[@DIR]", "DTYPE[/CACHE][@DIR]", "URL" or "FILE#COLUMN".
    """
    kind, _, argument = spec.partition(":")
    if kind in forms and re.fullmatch(_PATTERNS[forms[kind]], argument, re.DOTALL):
        return kind, argument
    known = ", ".join(f"{kind}:{form}" for kind, form in forms.items())
    raise ValueError(f"unknown {what} {spec!r}, expected {known} (DTYPE: {', '.join(DTYPES)})")


def name_columns(specs: Sequence[str]) -> dict[str, str]:
    """Names the column of each spec: the spec itself, or for a server its kind and dtype, such as ``vllm:bfloat16``.

    A server that decodes given tokens has the column ``vllm-forced:bfloat16``, because ``vllm-decode:bfloat16`` is the
    column of a server that samples. If a name is taken already, the spec itself is the name. Raises ValueError if a
    spec is unknown, and ServerError if a server does not answer.
    """
    names: dict[str, str] = {}
    for spec in dict.fromkeys(specs):
        (kind, argument), name = split_spec(spec), spec
        if kind in (*_SERVERS, *_DECODERS):
            with open_server(argument, kind.removesuffix("-decode")) as server:
                name = f"{kind.replace('-decode', '-forced')}:{server_label(server.info)}"
        names[spec] = spec if name in names.values() else name
    return names


def _read_column(argument: str, dump: TokenDump) -> tuple[list[np.ndarray], ColumnSource]:
    file, _, column = argument.rpartition("#")
    other = read_tokens(file)
    if column not in other.logprobs:
        raise ValueError(f"{file} has no column {column!r}, but {sorted(other.logprobs)}")
    rows = dict(zip(other.sequence_ids, zip(other.token_ids, other.logprobs[column], strict=True), strict=True))
    vectors = []
    for name, ids in zip(dump.sequence_ids, dump.token_ids, strict=True):
        if name not in rows:
            raise ValueError(f"{file} has no sequence {name!r}")
        theirs, vector = rows[name]
        at = common_prefix(ids, theirs)
        if at < max(len(ids), len(theirs)):
            got, expected = theirs[at : at + 4].tolist(), ids[at : at + 4].tolist()
            where = f"{file}: sequence {name!r} is tokenised differently: from token {at} on"
            raise ValueError(f"{where} it has {got}, expected {expected}")
        vectors.append(vector)
    return vectors, other.sources[column]


def check_vocabulary(dump: TokenDump, vocab_size: int) -> None:
    """Raises ValueError if a token id of ``dump`` is ``vocab_size``, the model's, or more."""
    for name, ids in zip(dump.sequence_ids, dump.token_ids, strict=True):
        if (top := ids.max()) >= vocab_size:
            said = f"sequence {name!r} has token {top}, but the model knows {vocab_size}"
            raise ValueError(f"{said}; is it another model's?")


def _jax_scores(model: Path, dtype: str, temperature: float, dump: TokenDump, batch_size: int, cause: Cause) -> Vectors:
    config = read_config(model)
    mesh = other_mesh(make_mesh(MeshConfig())) if cause == "mesh" else None
    params = load_params(model, config, None if mesh is None else param_shardings(config, mesh))
    remat: Remat | None = "blocks" if cause == "remat" else None
    score = make_scorer(config, dtype, temperature=temperature, mesh=mesh, remat=remat)
    for start in range(0, len(dump.token_ids), batch_size):
        for vector in score(params, dump.token_ids[start : start + batch_size]):
            yield np.concatenate([_NONE, vector[1:]])


def _decode_scores(model: Path, dtype: str, temperature: float, dump: TokenDump, batch_size: int) -> Vectors:
    """Decodes every token from the first response token on; the tokens before it are the prompt."""
    prompts, responses = _split(dump)
    engine, longest = _load_engine(model, dtype, prompts), max(1, *map(len, responses))
    for start in range(0, len(prompts), batch_size):
        batch = slice(start, start + batch_size)
        scored = engine.score(prompts[batch], responses[batch], temperature=temperature, max_response_tokens=longest)
        yield from after_prompts(prompts[batch], scored)


def _prefill_scores(model: Path, dtype: str, temperature: float, dump: TokenDump, batch_size: int) -> Vectors:
    """Computes every sequence at once, in the way in which the embedded engine computes a prompt."""
    engine = _load_engine(model, dtype, dump.token_ids)
    for start in range(0, len(dump.token_ids), batch_size):
        for vector in engine.score_prefill(dump.token_ids[start : start + batch_size], temperature=temperature):
            yield np.concatenate([_NONE, vector])


def _exact_scores(model: Path, dtype: str, temperature: float, dump: TokenDump, batch_size: int) -> Vectors:
    """Computes every sequence with the exact engine's executable, whose rows are as long as the longest sequence."""
    policy, longest = read_config(model), max(map(len, dump.token_ids))
    exact = ExactPass(
        policy,
        make_mesh(MeshConfig(), jax.devices()[:1]),
        precision=PrecisionConfig(dtype),  # type: ignore[arg-type]
        objective=Objective(LossConfig(), CorrectionConfig(), batch_size, longest),
        rows=batch_size,
        row_tokens=longest,
    )
    params = load_params(model, policy)
    for start in range(0, len(dump.token_ids), batch_size):
        tokens, lengths = np.zeros((batch_size, longest), np.int32), np.zeros(batch_size, np.int32)
        for row, ids in enumerate(dump.token_ids[start : start + batch_size]):
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        after = exact.log_softmax(params, tokens, lengths, temperature)
        picked = np.asarray(jnp.take_along_axis(after[:, :-1], tokens[:, 1:, None], axis=-1))[..., 0]
        for row, length in enumerate(lengths[lengths > 0]):
            yield np.concatenate([_NONE, picked[row, : length - 1]])


def _load_engine(model: Path, dtype: str, prompts: Sequence[np.ndarray]) -> JaxEngine:
    """Makes the embedded engine for a spec's DTYPE or DTYPE/CACHE, and for prompts as long as the longest one."""
    dtype, cache = _split_cache(dtype)
    return load_jax_engine(model, dtype, max(map(len, prompts), default=1), kv_cache_dtype=cache)


def _split_cache(dtype: str) -> tuple[str, str]:
    """Splits a spec's DTYPE/CACHE: ``float32/fp8_e5m2`` becomes ``("float32", "fp8_e5m2")``; no cache is auto."""
    dtype, _, cache = dtype.partition("/")
    return dtype, cache or "auto"


def _split(dump: TokenDump) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Splits each sequence into a prompt and the tokens from its first response token on, which an engine decodes.

    A prompt has at least one token. It is the whole sequence if there is no response token.
    """
    starts = [max(int(np.argmax(mask)), 1) if mask.any() else len(mask) for mask in dump.response_mask]
    pairs = list(zip(dump.token_ids, starts, strict=True))
    return [ids[:start] for ids, start in pairs], [ids[start:] for ids, start in pairs]


def load_hf(directory: Path, dtype: str, attention: str | None = None) -> tuple[Any, Any, str]:
    """Loads a model with transformers and returns the package torch, the model and the name of its device.

    ``attention`` is the ``attn_implementation``; None means the default of transformers. Raises ValueError if torch or
    transformers is not installed.
    """
    try:  # imported here because the other scorers need no torch
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(f"an hf: scorer needs torch and transformers: {error}") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    form = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **form).eval().to(device)
    return torch, model, device


def _hf_scores(directory: Path, dtype: str, temperature: float, dump: TokenDump, batch_size: int) -> Vectors:
    torch, model, device = load_hf(directory, dtype)
    pad_sequence = torch.nn.utils.rnn.pad_sequence
    check_vocabulary(dump, model.config.vocab_size)
    for start in range(0, len(dump.token_ids), batch_size):
        batch = dump.token_ids[start : start + batch_size]
        tokens = pad_sequence([torch.tensor(ids, dtype=torch.long) for ids in batch], batch_first=True).to(device)
        mask = pad_sequence([torch.ones(len(ids), dtype=torch.long) for ids in batch], batch_first=True).to(device)
        with torch.inference_mode():
            logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].float() / temperature
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None])[..., 0].cpu().numpy()
        for row, ids in zip(logprobs, batch, strict=True):
            yield np.concatenate([_NONE, row[: len(ids) - 1]])
