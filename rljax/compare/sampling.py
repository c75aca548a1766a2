"""Samples new responses to the prompts of a dump, with the log-probabilities of the engine that sampled."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rljax.compare.scorers import counted, local_source, open_server, parse_spec, server_label, server_source
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.errors import check_at_least
from rljax.policy.families import read_config
from rljax.record.token_dumps import SECOND_RUN, TokenDump, after_prompts, common_prefix, make_dump
from rljax.rollout.build import load_jax_engine
from rljax.rollout.kinds import engines_that
from rljax.rollout.types import Response, SamplingParams


@dataclass(frozen=True)
class SampleConfig:
    """The settings of the sampling.

    In a second run a server samples again with the same seeds at half the batch size, to measure its noise floor. The
    log-probabilities of both runs are compared up to the first token that differs.
    """

    responses: int = 1
    """The number of responses sampled for each prompt. They are named SEQUENCE/NUMBER."""
    max_response_tokens: int = 256
    """The longest sampled response (tokens)."""
    temperature: float = 1.0
    """The temperature of sampling and of scoring."""
    seed: int = 0
    """The seed of the sampling."""
    batch_size: int = 8
    """The number of sequences that are scored, or requested of a server, at the same time."""
    second_run: bool = False
    """Whether a server samples again, to measure its noise floor."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "responses", "batch_size")
        if not self.temperature > 0.0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")


def sample_responses(
    dump: TokenDump,
    model: str | Path,
    spec: str,
    config: SampleConfig | None = None,
    *,
    progress: Callable[[int], object] = lambda count: None,
    full_length: bool = False,
) -> TokenDump:
    """Samples responses to each prompt of ``dump`` and returns them as a dump.

    The sampler's column is ``jax-decode:DTYPE``, ``vllm-decode:DTYPE`` or ``sglang-decode:DTYPE``; the dump's
    ``sampling`` names it. A second run has a further column with the suffix ``@2``.

    Args:
      dump: The dump with the prompts, which end before the first response token. Its columns are not copied.
      model: The Hugging Face directory of the model. For a server only its configuration is read, not its weights.
      spec: The sampler: ``jax-decode:DTYPE`` (the embedded engine), ``vllm-decode:URL`` or ``sglang-decode:URL``.
      progress: A function that is called with the number of newly sampled responses.
      full_length: Whether no end-of-sequence token ends a response, so that each has ``max_response_tokens`` tokens.

    Raises:
      ValueError: The spec is unknown, or a sequence has no prompt or a token outside the vocabulary.
      ServerError: The server does not answer, or refuses.
    """
    how, policy = config or SampleConfig(), read_config(model)
    rows = zip(dump.sequence_ids, dump.token_ids, dump.response_mask, strict=True)
    prompts = [_prompt(name, ids, mask, policy.vocab_size) for name, ids, mask in rows]
    stops = () if full_length else policy.stop_token_ids
    kind, argument = split_sampler(spec)
    served = kind.removesuffix("-decode")
    sampling = SamplingParams(how.max_response_tokens, how.temperature, tuple(stops))
    if served in engines_that("serves"):
        with open_server(argument, served) as server:
            column, temperature = f"{kind}:{server_label(server.info)}", server.logprobs_temperature(how.temperature)
            source = server_source(server.info, "decode", temperature, served)
            sizes = (how.batch_size, how.batch_size // 2 or 2)[: 1 + how.second_run]
            found = [server.generate(prompts, how.responses, sampling, seed=how.seed, at_once=size) for size in sizes]
            runs = [list(counted(run, progress)) for run in found]
    else:
        column, source = spec, local_source(kind, argument, how.temperature, model)
        with contextlib.closing(load_jax_engine(model, argument, max(map(len, prompts)))) as engine:
            runs = [list(counted(engine.generate(prompts, how.responses, sampling, seed=how.seed), progress))]
    for run in runs:
        run.sort(key=operator.attrgetter("prompt_index", "sample_index"))
    first = runs[0]
    columns = {column: [response["rollout_logprobs"] for response in first]}
    for second in runs[1:]:
        columns[column + SECOND_RUN] = [_on_common_prefix(a, b) for a, b in zip(first, second, strict=True)]
    return make_dump(
        [f"{dump.sequence_ids[response.prompt_index]}/{response.sample_index}" for response in first],
        [response.ids for response in first],
        [np.arange(len(response.ids)) >= response.prompt_length for response in first],
        {name: after_prompts([one.prompt for one in first], vectors) for name, vectors in columns.items()},
        dict.fromkeys(columns, source),
        {"column": column} | {name: getattr(how, name) for name in ("temperature", "max_response_tokens", "seed")},
    )


def split_sampler(spec: str) -> tuple[str, str]:
    """Splits a sampler's spec: ``jax-decode:float32`` becomes ``("jax-decode", "float32")``.

    Raises ValueError if the spec has an unknown form.
    """
    served = {f"{kind}-decode": "URL" for kind in engines_that("serves")}
    return parse_spec("sampler", spec, {"jax-decode": "DTYPE"} | served)


def toy_prompts(count: int, model: str | Path) -> TokenDump:
    """Returns a dump of the first ``count`` prompts of the toy task's eval split, in tokens of ``model``, no responses.

    Raises ValueError if the model has no tokenizer, ``count`` is below 1, or the split has fewer problems.
    """
    if count < 1:
        raise ValueError(f"the number of toy prompts must be at least 1, got {count}")
    tokenizer, problems = load_tokenizer(model), addition_problems("eval", count)
    prompts = [tokenizer.encode_prompt(problem["prompt"]).tolist() for problem in problems]
    return make_dump([f"held/{i}" for i in range(count)], prompts, [[False] * len(ids) for ids in prompts], {})


def _prompt(name: str, ids: np.ndarray, mask: np.ndarray, vocab_size: int) -> np.ndarray:
    prompt = ids[: int(np.argmax(mask))] if mask.any() else ids
    if len(prompt) < 1 or prompt.max() >= vocab_size:
        raise ValueError(f"sequence {name!r} has no prompt of tokens below {vocab_size}, got {prompt[:8]}")
    return prompt


def _on_common_prefix(first: Response, second: Response) -> np.ndarray:
    """Returns the second response's log-probabilities on the tokens it shares with the first, and NaN after them."""
    shared = common_prefix(first.response, second.response)
    return np.concatenate([second["rollout_logprobs"][:shared], np.full(first.length - shared, np.nan, np.float32)])
