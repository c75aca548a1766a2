"""New responses to the prompts of a dump, sampled by an engine, with the log-probabilities it sampled them at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rljax.compare.report import SECOND_RUN
from rljax.compare.scorers import counted, local_source, open_server, parse_spec, server_label, server_source
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.errors import check_at_least
from rljax.policy.families import read_config
from rljax.record.token_dumps import TokenDump, common_prefix, dump_of_responses, make_dump
from rljax.rollout.build import load_jax_engine
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.servers.model import ServedModel
from rljax.rollout.types import SERVED, Response, SamplingParams


@dataclass(frozen=True)
class SampleConfig:
    """How responses are sampled.

    Attributes:
      responses: a prompt; named ``<sequence id>/<number>``.
      max_response_tokens: a response ends here or with an end-of-sequence token of the model (tokens).
      temperature: of sampling; positive.
      seed: of sampling.
      batch_size: requests at a server at a time; the embedded engine samples all responses at once.
      second_run: whether a server samples a second time, at half the batch size and with the same seeds, for its noise
        floor: up to the first token that differs the two sampled from the same prefix.
    """

    responses: int = 1
    max_response_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    batch_size: int = 8
    second_run: bool = False

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
) -> TokenDump:
    """Samples responses to each prompt of ``dump`` and returns them as a dump with one column, or two.

    Args:
      dump: its prompts are what stands before the first response token; its columns are not carried over.
      model: Hugging Face directory; of a server's only the end-of-sequence tokens and the vocabulary are read.
      spec: ``jax-decode:DTYPE`` (the embedded engine) or ``vllm-decode:URL`` or
        ``sglang-decode:URL`` (a running server).
      config: how; None takes the defaults.
      progress: called with a number of responses when so many have been sampled.

    Returns:
      A dump with the column ``jax-decode:DTYPE``, or ``vllm-decode:DTYPE`` and, of a second run, ``...@2``; its
      ``sampling`` names the column.

    Raises:
      ValueError: an unknown spec, a sequence without a prompt or with a token outside the vocabulary.
      ServerError: the server does not answer, or refuses.
    """
    how = config or SampleConfig()
    kind, argument = split_sampler(spec)
    served = kind.removesuffix("-decode")
    shape = read_config(model)
    prompts = [
        _prompt(name, ids, mask, shape.vocab_size)
        for name, ids, mask in zip(dump.sequence_ids, dump.token_ids, dump.response_mask, strict=True)
    ]
    sampling = SamplingParams(how.max_response_tokens, how.temperature, shape.stop_token_ids)
    opened: contextlib.AbstractContextManager[ServedModel | JaxEngine] = (
        open_server(argument, served)
        if served in SERVED
        else contextlib.closing(load_jax_engine(model, argument, max(map(len, prompts))))
    )
    with opened as engine:
        if isinstance(engine, JaxEngine):
            column, source = spec, local_source(kind, argument, how.temperature, model)
            runs = [engine.generate(prompts, how.responses, sampling, seed=how.seed)]
        else:
            column, temperature = f"{kind}:{server_label(engine.info)}", engine.logprobs_temperature(how.temperature)
            source = server_source(engine.info, "decode", temperature, served)
            runs = [
                engine.generate(prompts, how.responses, sampling, seed=how.seed, at_once=size)
                for size in (how.batch_size, how.batch_size // 2 or 2)[: 1 + how.second_run]
            ]
        first, *more = [
            sorted(counted(run, progress), key=lambda response: (response.prompt_index, response.sample_index))
            for run in runs
        ]
    columns = {column: [response.logprobs for response in first]}
    for second in more:
        columns[column + SECOND_RUN] = [_on_common_prefix(a, b) for a, b in zip(first, second, strict=True)]
    return dump_of_responses(
        [f"{dump.sequence_ids[response.prompt_index]}/{response.sample_index}" for response in first],
        [prompts[response.prompt_index] for response in first],
        [response.token_ids for response in first],
        columns,
        dict.fromkeys(columns, source),
        {"column": column} | {name: getattr(how, name) for name in ("temperature", "max_response_tokens", "seed")},
    )


def split_sampler(spec: str) -> tuple[str, str]:
    """``("jax-decode", "float32")`` of ``jax-decode:float32``.

    Raises:
      ValueError: it is none of the forms ``sample_responses`` takes.
    """
    return parse_spec("sampler", spec, {"jax-decode": "DTYPE"} | {f"{kind}-decode": "URL" for kind in SERVED})


def toy_prompts(count: int, model: str | Path) -> TokenDump:
    """The first problems of the toy task's eval split in the tokens of ``model``'s tokenizer, and no responses.

    Raises:
      ValueError: there is no tokenizer, or there are fewer problems.
    """
    if count < 1:
        raise ValueError(f"the number of toy prompts must be at least 1, got {count}")
    tokenizer, problems = load_tokenizer(model), addition_problems("eval", count)
    prompts = [tokenizer.encode(problem["prompt"]).tolist() for problem in problems]
    return make_dump([f"held/{i}" for i in range(count)], prompts, [[False] * len(ids) for ids in prompts], {})


def _prompt(name: str, ids: np.ndarray, mask: np.ndarray, vocab_size: int) -> np.ndarray:
    prompt = ids[: int(np.argmax(mask))] if mask.any() else ids
    if len(prompt) < 1 or prompt.max() >= vocab_size:
        raise ValueError(f"sequence {name!r} has no prompt of tokens below {vocab_size}, got {prompt[:8]}")
    return prompt


def _on_common_prefix(first: Response, second: Response) -> np.ndarray:
    """Of the second response's log-probabilities those of tokens that it shares with the first; NaN after them."""
    shared = common_prefix(first.token_ids, second.token_ids)
    return np.concatenate([second.logprobs[:shared], np.full(first.length - shared, np.nan, np.float32)])
