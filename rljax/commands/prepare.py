r"""Makes a training file: reads problems, drops repeated and unsuitable ones, writes Parquet with its provenance.

    rljax prepare dapo-math-17k.parquet runs/data/dapo.parquet --model MODEL --max-prompt-tokens 1024
    rljax prepare BytedTsinghua-SIA/AIME-2024 runs/data/aime-24.parquet
    rljax prepare runs/data/dapo.parquet runs/data/perfectible.parquet --model MODEL \
        --urls http://127.0.0.1:8000 --samples 16 --min-pass-rate 0.2 --max-pass-rate 0.8

SOURCE is a Parquet, JSONL, JSON or CSV file, in verl's form, with prompt and answer, or of a known data set. It may
also be a directory of shards, or the id of a data set on the Hugging Face hub (OWNER/NAME, or OWNER/NAME:FILE). A row
without a prompt is an error that names it; a row whose right answer is empty is dropped. A sample of the right answers
is scored as responses, and a table shows the counts. With --samples the pass rate of each problem is measured. The
scores are kept beside OUT, so that the same command continues after an interruption. Give --chat-template,
--enable-thinking and --chat-template-kwargs the values of the training run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from rljax.data.files import (
    CHAT_TOOLS,
    PASS_RATE,
    FileRow,
    Problem,
    Tally,
    answered_rows,
    prompt_text,
    read_provenance,
    read_rows,
    write_rows,
)
from rljax.data.forms import DataForm, Form, OwnKeys
from rljax.data.gym_problems import task_names
from rljax.data.prompts import (
    FILE_REWARD,
    ProblemsConfig,
    is_own,
    prompt_ids,
    prompt_key,
    render_problem,
    say_marks,
    template_arguments,
)
from rljax.data.shards import FILE_SUFFIXES, SHARD, one_set, source_files
from rljax.data.tokenizer import Tokenizer, load_tokenizer
from rljax.distributed.files import write_whole
from rljax.errors import ConfigError, caller_errors, describe, name_changes, parse_json
from rljax.evaluate import find_policy, in_batches, open_engine, response_limit
from rljax.rewards.pool import RewardPool
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.run.data_check import check_answers, refuse_placeholders, table
from rljax.run.evaluation import SOLVED
from rljax.run.options import Positional, parse_arguments
from rljax.run.sampling import Sampler, SingleTurn

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::(.+))?")


@dataclass(frozen=True)
class PrepareArguments(ProblemsConfig):
    """The arguments of the preparation."""

    source: Positional[str]
    """A Parquet, JSONL, JSON or CSV file, a directory of shards, or a data set of the hub."""
    out: Positional[Path]
    """The Parquet file to write."""
    form: DataForm | None = None
    """The form of the source; None: the keys of a row tell it."""
    model: str | None = None
    """A model, a run directory or a checkpoint. Its tokenizer counts tokens, and its policy samples with --samples."""
    max_prompt_tokens: int | None = None
    """The longest prompt that is kept (tokens, the chat template included); None: any length."""
    check_answers: int = 1000
    """The number of right answers that are scored as responses; 0: none."""
    hold_out: int = 0
    """The number of problems that go into ``...-held.parquet`` beside OUT instead, for evaluation."""
    samples: int = 0
    """The number of responses to each problem, from which its pass rate is measured; 0: no measurement."""
    min_pass_rate: float = 0.0
    """The lowest pass rate of a problem that is kept. A problem that is never solved is always dropped."""
    max_pass_rate: float = 1.0
    """The highest pass rate of a problem that is kept. A problem that is always solved is dropped, too."""
    urls: tuple[str, ...] = ()
    """The URLs of vLLM servers, which get the weights of a run; empty: the embedded engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """The dtype of the embedded engine, and of a run's weights that servers get."""
    temperature: float = 1.0
    """The temperature of the sampling."""
    max_response_tokens: int | None = None
    """The longest response (tokens); None: 8192, or less if the model has fewer positions."""
    batch_size: int | None = None
    """The number of problems sampled at a time; None: 64 with the embedded engine, 1024 with servers."""
    reward: str = FILE_REWARD
    """The function that scores a response, as in ``data.reward``."""
    scores: Path | None = None
    """The JSONL file of the scores so far; None: ``OUT.scores.jsonl``."""
    seed: int = 0
    """The seed of the sampling and of the choice of ``hold_out``."""

    def __post_init__(self) -> None:
        if self.out.suffix != ".parquet":
            raise ValueError(f"OUT must end in .parquet, got {self.out}")
        if self.model is None and (self.samples or self.max_prompt_tokens is not None):
            raise ValueError("--model is needed: its tokenizer counts prompt tokens, its policy is sampled")
        if min(self.hold_out, self.samples, self.check_answers) < 0 or (self.max_prompt_tokens or 1) < 1:
            counts = "--hold-out, --samples and --check-answers must not be negative"
            raise ValueError(f"{counts}, --max-prompt-tokens at least 1")
        low, high = self.min_pass_rate, self.max_pass_rate
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"pass rates must be 0 <= min <= max <= 1, got {low} and {high}")
        if self.form is not None and self.own_form != self.form:
            raise ValueError("--form names the keys already: leave out --prompt-key and --answer-key")
        if self.samples == 1 or (self.samples and not self.temperature > 0.0):
            raise ValueError("a pass rate needs at least 2 samples and a positive temperature")
        if not self.samples and (low, high) != (0.0, 1.0):
            raise ValueError("pass rates are bounded but not measured: give --samples")

    @property
    def own_form(self) -> Form:
        """The names of the source's keys if some are given, or else the name of its form."""
        keys = OwnKeys(self.prompt_key, self.answer_key)
        return keys if any(keys) else self.form


@dataclass
class KeptRows:
    """The rows that are kept so far, and how many rows each filter kept and dropped."""

    rows: list[FileRow]  # the rows as they were read
    problems: list[Problem]  # the problem of each row, in the same order
    steps: list[dict[str, Any]] = field(default_factory=list)  # the entries of the provenance, one for each filter

    def keep(self, step: str, kept: Sequence[bool], **facts: Any) -> None:
        """Keeps the rows with a true entry in ``kept``, and records the step. Raises ConfigError if none is left."""
        before = len(self.rows)
        self.rows = [row for row, keep in zip(self.rows, kept, strict=True) if keep]
        self.problems = [problem for problem, keep in zip(self.problems, kept, strict=True) if keep]
        self.note(step, before - len(self.rows), **facts)
        if not self.rows:
            raise ConfigError(f"no problem is left after the step {step!r}")

    def note(self, step: str, dropped: int, **facts: Any) -> None:
        """Records and prints how many rows a step dropped and how many are left, with further ``facts``."""
        self.steps.append({"step": step, "dropped": dropped, "kept": len(self.rows), **facts})
        shown = "".join(f", {name.replace('_', ' ')} {value}" for name, value in facts.items())
        print(f"{step}: {dropped} dropped, {len(self.rows)} kept{shown}")


class ScoreFile:
    """The rewards of each problem's responses, in a JSONL file that survives an interruption."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Reads the scores so far. Raises ConfigError if the file holds no scores, or scores of other settings."""
        self._path, self.rewards = path, dict[str, list[float]]()
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
            try:
                lines = [parse_json(line) for line in whole.splitlines()]
                changes = name_changes(lines[0], settings) if lines else ""
                self.rewards = {line["key"]: list(line["rewards"]) for line in lines[1:]}
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise ConfigError(f"{path} does not hold scores: {describe(error)}") from error
            if lines:
                if changes:
                    said = f"{path} was scored with other settings: {changes}"
                    raise ConfigError(f"{said}; delete it or give another --scores")
                if whole != text:
                    write_whole(path, whole)
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")

    def add(self, key: str, rewards: list[float]) -> None:
        """Keeps one problem's rewards. They are written unless one is NaN, so a failed scoring is tried again."""
        self.rewards[key] = rewards
        if any(map(math.isnan, rewards)):
            return
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"key": key, "rewards": rewards}) + "\n")


def find_source(source: str) -> Path:
    """Returns the local path of a source. Raises ConfigError if a download fails, or a task makes its problems."""
    match = _HUB_ID.fullmatch(source)
    is_file_name = ":" not in source and source.endswith(FILE_SUFFIXES)
    if task_names(source):
        raise ConfigError(f"{source} needs no preparation: a run with data.task = {source} makes its problems")
    if Path(source).exists() or not match or is_file_name:
        return Path(source)
    from huggingface_hub import HfApi, hf_hub_download  # heavy, and used only here

    repository, name = match.groups()
    try:
        names = [name]
        if name is None or "*" in name:
            files = HfApi().list_repo_files(repository, repo_type="dataset")
            with caller_errors():
                names = one_set((file for file in files if Path(file).match(name or "*")), f"{repository}:")
        first, *others = [Path(hf_hub_download(repository, each, repo_type="dataset")) for each in names]
        return first.with_name(SHARD.sub("-*", first.name)) if others else first
    except ConfigError:
        raise
    except Exception as error:  # the client raises errors of many types
        raise ConfigError(f"{source} is not a local file and the Hugging Face hub does not give it: {error}") from error


def content_of(problem: Problem) -> str:
    """Returns all that a chat template may write of a problem: its texts, further keys of its messages, its tools."""
    prompt = problem["prompt"]
    further = [] if isinstance(prompt, str) else [message for message in prompt if len(message) > 2]
    more = [*further, *problem.get(CHAT_TOOLS, [])]
    return prompt_text(prompt) + (json.dumps(more, default=str) if more else "")


def read_distinct(path: Path, form: Form, tally: Tally, *, whole: bool) -> KeptRows:
    """Reads the first row of each prompt, by ``prompt_key``, and counts rows and repeats in ``tally``.

    ``form`` and ``whole`` say how a row is read, as in ``data.files.parse_row``.
    """
    seen: dict[bytes, str] = {}
    selection, contradicting = KeptRows([], []), 0
    tally.repeats = 0
    rows = tqdm(read_rows(path), desc="reading", unit="row", mininterval=1.0)
    for row, problem in answered_rows(path, tally, form, rows, whole=whole):
        key = prompt_key(content_of(problem))
        if key in seen:
            contradicting += seen[key] != problem["answer"]
            tally.repeats += 1
            continue
        seen[key] = problem["answer"]
        selection.rows.append(row)
        selection.problems.append(problem)
    if tally.unanswered:
        selection.note("no answer", tally.unanswered)
    selection.note("repeats", tally.repeats, read=tally.rows, repeats_with_another_answer=contradicting)
    return selection


def drop_long(selection: KeptRows, tokenizer: Tokenizer, limit: int, tally: Tally) -> None:
    """Keeps problems whose rendered prompts have at most ``limit`` tokens, and counts the others in ``tally``."""
    lengths = [len(prompt_ids(p, tokenizer)) for p in tqdm(selection.problems, desc="counting", unit="prompt")]
    kept = [length <= limit for length in lengths]
    tally.too_long = kept.count(False)
    selection.keep("prompt length", kept, max_prompt_tokens=limit, longest=max(lengths))


def score_problems(arguments: PrepareArguments, problems: Sequence[Problem], tokenizer: Tokenizer) -> ScoreFile:
    """Samples and scores ``samples`` responses to each problem without scores. Returns the scores of all problems."""
    with caller_errors():
        policy = find_policy(str(arguments.model))
        scoring = arguments.reward, arguments.reward_workers, arguments.reward_timeout_s
        pool = RewardPool(*scoring, unscored=math.nan)
        prompt_tokens = max(len(prompt_ids(problem, tokenizer)) for problem in problems)
        limit = response_limit(arguments.max_response_tokens, policy.config, prompt_tokens)
    names = ("model", "samples", "temperature", "reward", "seed")
    settings = {name: getattr(arguments, name) for name in names}
    if policy.step is not None:
        settings["step"] = policy.step  # of a run, which may go on
    settings |= {"chat_template": str(arguments.chat_template).lower(), "max_response_tokens": limit}
    of_template = template_arguments(arguments.enable_thinking, arguments.chat_template_kwargs)
    settings["template_arguments"] = of_template or None
    path = arguments.scores or arguments.out.with_name(arguments.out.name + ".scores.jsonl")
    with caller_errors():
        scores = ScoreFile(path, settings)
    keys = [problem_key(problem) for problem in problems]
    done = sum(key in scores.rewards for key in keys)
    if done == len(problems):
        return scores
    sampling = SamplingParams(limit, arguments.temperature, policy.stops(tokenizer.eos_token_id))
    at_once = arguments.batch_size or (1024 if arguments.urls else 64)
    rollout = RolloutConfig(engine="vllm" if arguments.urls else "jax", urls=arguments.urls, dtype=arguments.dtype)
    with (
        pool,
        open_engine(policy, rollout, prompt_tokens=prompt_tokens, response_tokens=limit) as engine,
        tqdm(total=len(problems), initial=done, desc="scoring", unit="problem") as bar,
    ):
        sampler = Sampler(SingleTurn(engine, tokenizer, pool), sampling, arguments.samples)
        for start, batch in in_batches(problems, at_once):
            waiting = [problem for problem in batch if problem_key(problem) not in scores.rewards]
            found: list[dict[int, float]] = [{} for _ in waiting]
            if not waiting:
                continue
            for one in sampler.scored(waiting, arguments.seed + start):
                index, sample = one.place
                rewards = found[index]
                rewards[sample] = one.reward
                if len(rewards) == arguments.samples:
                    scores.add(problem_key(waiting[index]), [rewards[j] for j in range(len(rewards))])
                    bar.update()
        counts = pool.pop_metrics()
    if counts["reward/errors"]:
        failed = f"{counts['reward/errors']} responses could not be scored and count as wrong"
        print(f"warning: {failed}; the same command tries their problems again", file=sys.stderr)
    return scores


def problem_key(problem: Problem) -> str:
    """Returns a hash of a problem's prompt and right answer: 24 hexadecimal digits."""
    return hashlib.sha256(json.dumps([problem["prompt"], problem["answer"]]).encode()).hexdigest()[:24]


def drop_unfit(selection: KeptRows, scores: ScoreFile, low: float, high: float, samples: int) -> None:
    """Keeps problems whose pass rate is in [low, high] and is neither 0 nor 1, and records the rates in the rows."""
    rates = [
        sum(reward > SOLVED for reward in scores.rewards[problem_key(problem)]) / samples
        for problem in selection.problems
    ]
    selection.rows = [row | {PASS_RATE: rate} for row, rate in zip(selection.rows, rates, strict=True)]
    selection.keep(
        "pass rate",
        [0.0 < rate < 1.0 and low <= rate <= high for rate in rates],
        samples=samples,
        min_pass_rate=low,
        max_pass_rate=high,
        never_solved=sum(rate == 0.0 for rate in rates),
        always_solved=sum(rate == 1.0 for rate in rates),
    )


def hold_out(selection: KeptRows, count: int, seed: int) -> list[FileRow]:
    """Removes ``count`` random rows from the selection and returns them. Raises ConfigError if no other row is left."""
    if count >= len(selection.rows):
        raise ConfigError(f"--hold-out {count} leaves nothing of {len(selection.rows)} problems to train on")
    chosen = set(np.random.default_rng(seed).permutation(len(selection.rows))[:count].tolist())
    eval_rows = [row for i, row in enumerate(selection.rows) if i in chosen]
    selection.keep("held out", [i not in chosen for i in range(len(selection.rows))])
    return eval_rows


def main(argv: Sequence[str]) -> int:
    """Prepares the training file and returns the exit status."""
    arguments = parse_arguments(PrepareArguments, argv, prog="rljax prepare", description=__doc__ or "")
    with caller_errors():
        source = find_source(arguments.source)
        files = source_files(source)
        tally = Tally(source.name)
        tokenizer = None if arguments.model is None else load_tokenizer(find_policy(arguments.model).hf_path)
        how = arguments.chat_template, template_arguments(arguments.enable_thinking, arguments.chat_template_kwargs)
        selection = read_distinct(source, arguments.own_form, tally, whole=is_own(arguments.reward))
        selection.problems = [render_problem(each, tokenizer, *how) for each in selection.problems]
        if tokenizer is not None:
            say_marks(selection.problems, tokenizer)
    if tokenizer is not None and arguments.max_prompt_tokens is not None:
        drop_long(selection, tokenizer, arguments.max_prompt_tokens, tally)
    tally.problems = selection.problems
    with caller_errors():
        refuse_placeholders(tally.problems, arguments.reward, arguments.source)
        (check,) = check_answers(
            [tally.problems],
            arguments.reward,
            count=arguments.check_answers,
            seed=arguments.seed,
            workers=arguments.reward_workers,
            timeout_s=arguments.reward_timeout_s,
        )
    print(looked := table([(tally, check)], arguments.max_prompt_tokens))
    if tokenizer is not None and arguments.samples:
        scores = score_problems(arguments, selection.problems, tokenizer)
        drop_unfit(selection, scores, arguments.min_pass_rate, arguments.max_pass_rate, arguments.samples)
    eval_rows = hold_out(selection, arguments.hold_out, arguments.seed) if arguments.hold_out else []
    held = arguments.out.with_name(f"{arguments.out.stem}-held.parquet")
    with caller_errors():
        digest = hashlib.sha256()
        for file in files:
            digest.update(file.read_bytes())
        provenance = {
            "source": arguments.source,
            "source_sha256": digest.hexdigest(),
            "command": shlex.join(["rljax", "prepare", *argv]),
            "steps": selection.steps,
            "looked": looked.splitlines(),
            "source_provenance": read_provenance(files[0]) if files[0].suffix == ".parquet" else None,
        }
        for path, rows in [(arguments.out, selection.rows)] + ([(held, eval_rows)] if eval_rows else []):
            form, whole = arguments.own_form, is_own(arguments.reward)
            write_rows(path, rows, like=files[0], provenance=provenance, form=form, whole=whole)
            print(f"wrote {len(rows)} problems to {path}")
    return 0
