"""The prompts of a run: problems of a task or a file, shuffled and repeated by grain, with a position as state."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from rljax.data import gym_problems as gym
from rljax.data import toy
from rljax.data.files import CHAT_TOOLS, Problem, Tally, answered_rows, prompt_text
from rljax.data.forms import OwnKeys
from rljax.data.tokenizer import Tokenizer
from rljax.errors import check_at_least

ChatTemplate = bool | Literal["auto"]
DATA_SEED = 0
"""The seed of the made problems, and of the choice of problems and answers. ``run.seed`` shuffles the problems."""


@dataclass(frozen=True)
class ToyTask:
    """A task that needs no file."""

    # A function ``problems(split, seed=...)``; the splits "train" and "eval" share no problem.
    problems: Callable[..., Sequence[Problem]]
    reward: str  # the name of the reward that scores the responses
    max_response_tokens: int  # the longest useful response, in tokens


TOYS: Mapping[str, ToyTask] = {
    "toy": ToyTask(toy.addition_problems, "addition", toy.MAX_RESPONSE_TOKENS),
    "toy_swaps": ToyTask(toy.swap_problems, "swaps", toy.MAX_SWAPS_TOKENS),
    "calculator": ToyTask(toy.addition_problems, "addition", toy.MAX_CALCULATOR_TOKENS),
}
FILE_REWARD = "math"
RAW_PROMPT = "raw_prompt"  # the key of a prompt as it was before its text was rendered
TEMPLATED = "templated"  # the key of problems whose prompt a chat template wrote; its value is true
_MARKS = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<｜User｜>|\[INST\]")  # of chat templates


@dataclass(frozen=True, kw_only=True)
class ProblemsConfig:
    """The settings by which problems become prompts and their responses are scored, in a run and in commands."""

    prompt_key: str = ""
    """The key of the prompt in the rows of a file. A dot leads into a nested record: ``extra_info.question``. The
    evaluation files of a run use it in the rows that have it. Empty: the keys of a row tell it."""
    answer_key: str = ""
    """The key of the right answer in the rows of a file, as ``prompt_key`` is the key of the prompt."""
    reward_workers: int | None = None
    """The number of processes that score responses. 0: score in the process of the run or command itself. None: 0 for
    the rewards of the toy tasks, otherwise chosen by the number of CPU cores."""
    reward_timeout_s: float = 10.0
    """The longest time to score one response, in seconds. A response that takes longer gets reward 0 and is counted
    separately."""
    chat_template: bool | Literal["auto"] = "auto"
    """auto: apply the tokenizer's chat template, if it has one, to prompts that are lists of messages. true: also to
    plain texts, each as one user message. false: use the bare text, as base models need."""
    enable_thinking: bool | None = None
    """The argument ``enable_thinking`` of the chat template, which turns the reasoning of Qwen3 and others on or off.
    None: it is not given, so that the template's default holds."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Further arguments of the chat template, each as ``NAME=VALUE``. VALUE is JSON, or else text:
    ``reasoning_effort=low``."""


@dataclass(frozen=True)
class DataConfig(ProblemsConfig):
    """The training problems and their reward."""

    task: str = "toy"
    """toy: three-digit addition. toy_swaps: letters that are swapped. calculator: additions for the environment
    ``rljax.rollout.episodes.calculator:Calculator``. file: the problems in ``path``. ``reasoning_gym:NAME``: a task of
    reasoning-gym; ``reasoning_gym:NAME+NAME``: a mixture of several."""
    task_options: tuple[str, ...] = ()
    """Settings of a reasoning-gym task, each as ``NAME=VALUE`` with VALUE as JSON, or else text: ``min_digits=1``. In a
    mixture, ``TASK.NAME=VALUE`` is for one task."""
    task_problems: int = 5000
    """The number of training problems that a reasoning-gym task makes, always the same ones."""
    task_instruction: str = ""
    """A text that follows each question of a reasoning-gym task after an empty line. Use it to say where the answer
    goes."""
    path: str | None = None
    """A Parquet file in verl's form, a JSONL, JSON or CSV file of ``prompt`` and ``answer``, or a folder of shards."""
    reward: str | None = None
    """The function that scores a response: addition, swaps, math, reasoning_gym, reasoning_gym_library, or your own as
    ``package.module:function`` or ``FILE.py:function``. None: the reward of the task; math if ``task`` is file."""
    check_answers: int = 1000
    """The number of right answers, chosen at random, that are scored as responses to their own problems before step 1.
    0: none."""
    fraction: float = 1.0
    """The fraction of the problems to train on, chosen at random. A smaller fraction is a subset of a larger one."""
    batch_size: int = 64
    """The number of prompts per step."""
    max_prompt_tokens: int = 1024
    """The longest prompt, in tokens."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "max_prompt_tokens", "task_problems")
        check_at_least(self, 0, "check_answers")
        arguments = template_arguments(self.enable_thinking, self.chat_template_kwargs)
        if arguments and self.chat_template is False:
            raise ValueError(f"chat_template = false applies no template, but {', '.join(arguments)} is given for it")
        self._check_task()
        if self.task == "file" and not self.path:
            raise ValueError("path is needed with task = file")
        if self.task != "file" and self.path:
            raise ValueError(f"path is given, but task = {self.task} reads no file; set task = file")
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        if self.reward_workers is not None:
            check_at_least(self, 0, "reward_workers")
        if not 0.0 < self.reward_timeout_s < float("inf"):
            raise ValueError(f"reward_timeout_s must be positive and finite, got {self.reward_timeout_s}")

    def _check_task(self) -> None:
        """Raises ValueError for a task of unknown kind, and for settings that do not belong to its kind."""
        is_gym = bool(gym.task_names(self.task))
        if self.task not in (*TOYS, "file") and not is_gym:
            known = f"{', '.join(TOYS)}, file or {gym.PREFIX}NAME"
            raise ValueError(f"task must be {known}, got {self.task!r}")
        for name in ("task_options", "task_instruction"):
            if getattr(self, name) and not is_gym:
                raise ValueError(f"{name} is for a reasoning-gym task, but task = {self.task}")
        for name in _named_values(self.task_options, "task_options", may_have_task=True):
            owner, point, _ = name.partition(".")
            if point and owner not in gym.task_names(self.task):
                raise ValueError(f"task_options has {name}, but task = {self.task} has no task {owner}")

    @property
    def reward_name(self) -> str:
        """``reward``, or the default reward of the task."""
        return self.reward or task_reward(self.task)


def task_reward(task: str) -> str:
    """Returns the name of the default reward of a task."""
    if gym.task_names(task):
        return gym.REWARD
    return TOYS[task].reward if task in TOYS else FILE_REWARD


def is_own(reward: str) -> bool:
    """Returns whether a reward's name means code of the user."""
    return ":" in reward


def template_arguments(enable_thinking: bool | None, more: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of the chat template by name, from the settings of ``ProblemsConfig``.

    Raises:
      ValueError: An argument is not ``NAME=VALUE``, or a name is given twice.
    """
    thinking = () if enable_thinking is None else (f"enable_thinking={json.dumps(enable_thinking)}",)
    return _named_values((*thinking, *more), "chat_template_kwargs")


def _named_values(words: Sequence[str], key: str, *, may_have_task: bool = False) -> dict[str, Any]:
    """Returns the values of words ``NAME=VALUE`` by name. With ``may_have_task`` a name may be ``TASK.NAME``."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        last = name.partition(".")[2] or name if may_have_task else name
        if not (equals and last.isidentifier()) or name in values:
            raise ValueError(f"{key} must be NAME=VALUE, each name once, got {word!r}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def training_problems(
    config: DataConfig, tokenizer: Tokenizer | None = None, tally: Tally | None = None
) -> Sequence[Problem]:
    """Returns the training problems; each ``prompt`` is the text to tokenise.

    ``tokenizer`` has the chat template; the toy tasks need none. The rows of the file are counted in ``tally``. If
    there is no ``tally``, a row without a right answer is an error.

    Raises:
      ValueError: The file cannot be read, or a row is not a problem; the message names the row.
    """
    source = str(config.path) if config.task == "file" else config.task
    problems = _problems(source, "train", config, tokenizer, tally)
    if config.fraction == 1.0:
        return problems
    order = np.random.default_rng(DATA_SEED).permutation(len(problems))
    return [problems[int(i)] for i in order[: max(1, round(config.fraction * len(problems)))]]


def evaluation_datasets(
    names: Sequence[str], config: DataConfig, tokenizer: Tokenizer | None = None
) -> dict[str, Sequence[Problem]]:
    """Returns the datasets to evaluate on, by their names in the metrics.

    Each of ``names`` is a file, ``NAME=FILE``, or a task for its eval split. Without names, a task is evaluated on its
    own eval split. ``tokenizer`` has the chat template; the toy tasks need none.

    Raises:
      ValueError: A file cannot be read, or two datasets have the same name.
    """
    datasets: dict[str, Sequence[Problem]] = {}
    for entry in names or ([] if config.task == "file" else [config.task]):
        name, equals, source = entry.partition("=")
        if not equals or Path(entry).exists():
            name, source = Path(entry).stem.removeprefix(gym.PREFIX), entry
        if name in datasets:
            raise ValueError(f"two datasets are called {name}: give one as NAME=FILE")
        datasets[name] = _problems(source, "eval", config, tokenizer)
    return datasets


def _problems(
    source: str, split: str, config: DataConfig, tokenizer: Tokenizer | None, tally: Tally | None = None
) -> Sequence[Problem]:
    """Returns a split of a task, or all problems of a file; the prompts of a toy task need no rendering."""
    if source in TOYS:
        return TOYS[source].problems(split, seed=DATA_SEED)
    arguments = template_arguments(config.enable_thinking, config.chat_template_kwargs)
    read: Iterable[Problem]
    if names := gym.task_names(source):
        read = _gym_problems(names, split, config)
        if tally is not None:
            tally.rows = len(read)
    else:
        form = OwnKeys(config.prompt_key, config.answer_key, optional=split == "eval" and config.task == "file")
        rows = answered_rows(source, tally, form, whole=is_own(config.reward_name))
        read = (problem for _, problem in rows)
    return [render_problem(problem, tokenizer, config.chat_template, arguments) for problem in read]


def _gym_problems(names: Sequence[str], split: str, config: DataConfig) -> list[Problem]:
    """Returns the problems of a split of reasoning-gym's tasks, with the instruction behind each question."""
    options = _named_values(config.task_options, "task_options", may_have_task=True)
    settings = {name: gym.own_options(name, config.task, options) for name in names}
    problems = gym.gym_problems(names, split, count=config.task_problems, options=settings)
    for problem in problems if config.task_instruction else ():
        problem["prompt"][0]["content"] += f"\n\n{config.task_instruction}"
    return problems


def render_problem(
    problem: Problem,
    tokenizer: Tokenizer | None,
    chat_template: ChatTemplate,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Problem:
    """Returns a problem whose prompt is the text to tokenise, rendered as ``ProblemsConfig.chat_template`` describes.

    If the chat template wrote the prompt, the result has ``TEMPLATED``. ``RAW_PROMPT`` keeps a prompt of another form.
    Without a tokenizer no template is applied. ``arguments`` are further arguments of the template, from
    ``template_arguments``.

    Raises:
      ValueError: ``chat_template`` is True, or there are arguments, but no template is applied.
    """
    raw = problem["prompt"]
    is_chat = chat_template is True or (chat_template == "auto" and not isinstance(raw, str))
    if is_chat and tokenizer is not None and tokenizer.has_chat_template:
        messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
        tools = {"tools": problem[CHAT_TOOLS]} if CHAT_TOOLS in problem else {}
        text = tokenizer.render_chat(messages, **{**tools, **arguments})
        return problem | {"prompt": text} | ({} if text == raw else {RAW_PROMPT: raw}) | {TEMPLATED: True}
    if chat_template is True:
        raise ValueError("chat_template = true, but the tokenizer has none; false gives the model the bare text")
    if arguments:
        plain = "a prompt is plain text; chat_template = true puts it into the template"
        reason = "the tokenizer has none" if is_chat else plain
        raise ValueError(f"{', '.join(arguments)} is given for the chat template, but {reason}")
    text = prompt_text(raw)
    return problem | {"prompt": text} | ({} if text == raw else {RAW_PROMPT: raw})


def prompt_ids(problem: Problem, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the token ids of a problem's rendered prompt, int32 [s].

    A prompt that no chat template wrote begins with the special tokens that the tokenizer puts before a text.
    """
    text = problem["prompt"]
    return tokenizer.encode(text) if problem.get(TEMPLATED) else tokenizer.encode_prompt(text)


def say_marks(problems: Sequence[Problem], tokenizer: Tokenizer) -> None:
    """Says on stderr which special tokens begin plain texts, and warns of texts that hold a chat template's marks."""
    raw = [prompt_text(problem[RAW_PROMPT]) for problem in problems if TEMPLATED in problem and RAW_PROMPT in problem]
    if marked := [found[0] for text in raw if (found := _MARKS.search(text))]:
        line = f"warning: {len(marked)} prompts hold marks of a chat template, such as {marked[0]}, and get it again"
        print(f"{line}; chat_template = false gives the model the bare text", file=sys.stderr)
    texts = [problem["prompt"] for problem in problems if not problem.get(TEMPLATED)] if tokenizer.prefix else []
    if not texts:
        return
    named = " ".join(tokenizer.pieces(tokenizer.prefix))
    twice = sum(text.startswith(tokenizer.pieces(tokenizer.prefix[:1])[0]) for text in texts)
    also = f"; {twice} of {len(texts)} texts begin with it themselves, and have it twice" if twice else ""
    line = f"prompts that are plain texts begin with {named}, which the tokenizer puts before a text{also}"
    print(line, file=sys.stderr)


def prompt_key(text: str) -> bytes:
    """Returns a hash of a prompt, after Unicode NFC and with one space for each run of white space."""
    return hashlib.sha256(" ".join(unicodedata.normalize("NFC", text).split()).encode()).digest()


def drop_long(
    problems: Sequence[Problem], tokenizer: Tokenizer, limit: int, remedy: str, *, may_drop: bool = True
) -> Sequence[Problem]:
    """Returns the problems whose prompts have at most ``limit`` tokens.

    Raises:
      ValueError: No problem is left, or there is a longer one and ``may_drop`` is false. The message has the counts and
        ends with ``remedy``.
    """
    lengths = [len(prompt_ids(problem, tokenizer)) for problem in problems]
    if max(lengths) <= limit:
        return problems
    if min(lengths) > limit or not may_drop:
        too_long = sum(length > limit for length in lengths)
        raise ValueError(
            f"data.max_prompt_tokens = {limit}, but a prompt has {max(lengths)} tokens, and {too_long} of "
            f"{len(lengths)} are longer{remedy}"
        )
    return [problem for problem, length in zip(problems, lengths, strict=True) if length <= limit]


class PromptStream:
    """An endless, shuffled stream of problems, reshuffled each epoch; the same seed gives the same stream."""

    def __init__(self, problems: Sequence[Problem], batch_size: int, seed: int):
        """Starts at the first problem. Raises ValueError if there are fewer problems than a batch takes."""
        if len(problems) < batch_size:
            raise ValueError(f"a batch takes {batch_size} problems, but there are only {len(problems)}")
        self._problems, self._seed, self._batch_size = problems, seed, batch_size
        self._drawn = 0

    @functools.cached_property
    def _dataset(self) -> Any:
        import grain  # grain takes half a second with orbax, so a command imports it late

        return grain.MapDataset.source(self._problems).seed(self._seed).shuffle().repeat()

    def take(self, count: int | None = None) -> list[Problem]:
        """Returns the next ``count`` problems; None: a batch."""
        if count is None:
            count = self._batch_size
        start = self._drawn
        self._drawn += count
        return [self._dataset[start + i] for i in range(count)]

    def state_dict(self) -> dict[str, int]:
        """Returns the position, which is the number of problems drawn."""
        return {"problems_drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues at the position of ``state_dict``."""
        self._drawn = int(state["problems_drawn"])
