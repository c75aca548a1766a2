"""Compares log-probabilities of the same tokens across engines and precisions, pair by pair.

    rljax compare --toy
    rljax compare TOKENS --model DIR --scorer jax:bfloat16 --scorer hf:bfloat16 --out comparison

    rljax compare TOKENS --model DIR --scorer jax:bfloat16 --scorer hf:bfloat16 --layers

TOKENS is a token dump, a JSONL file, or prime-rl's token export. The columns of log-probabilities in it are compared,
too. The program writes tokens.parquet (with the new columns), report.md, report.json and report.png into the directory
OUT. With --layers it compares the operations inside the scorers, and writes layers.md, layers.json and layers.png.

The exit status is 0 when every pair of columns passes, and 1 when a pair fails or is refused. It is 2 when an argument
is wrong or a server does not answer, and 130 after an interrupt. After an interrupt, or when a server stops answering,
the program still saves and reports the columns that are complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from tqdm import tqdm

from rljax.commands.compare_layers import run_layers
from rljax.compare.distributions import DistributionPair, Likeliest, compare_distributions, with_distributions
from rljax.compare.importers import read_tokens
from rljax.compare.report import Comparison, check_logprobs, compare_columns, to_json, to_markdown, to_text
from rljax.compare.sampling import SampleConfig, sample_responses, split_sampler, toy_prompts
from rljax.compare.scorers import name_columns, score_column, split_spec
from rljax.data.prompts import TOYS
from rljax.distributed.files import filled_directory
from rljax.errors import ConfigError, caller_errors
from rljax.policy.hub import model_directory
from rljax.record.token_dumps import OTHER_RUNS, SECOND_RUN, TokenDump, write_dump
from rljax.run.options import parse_arguments
from rljax.trainer.measure import Cause

METRIC = "logprob_abs_diff_mean"
TOY_PROMPTS = 64
MOST_NAMED = 24  # with more pairs than this, the legend groups those that pass
COARSENESS = {"bfloat16": "tab:red", "float16": "tab:blue", "float32": "tab:green"}


@dataclass(frozen=True)
class Arguments:
    """The arguments of the comparison."""

    tokens: tyro.conf.Positional[Path | None] = None
    """The file of sequences. It may have columns of log-probabilities."""
    toy_prompts: int | None = None
    """The number of toy problems whose prompts replace TOKENS, for --sample."""
    toy: bool = False
    """Compare on the toy base of the package. It samples responses to 64 toy problems in bfloat16, and the trainer's
    forward scores them in bfloat16 and in float32."""
    model: str | None = None
    """The Hugging Face directory of the model, or OWNER/NAME. The scorers vllm: and dump: do not need it."""
    scorer: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """The program that computes a column: jax:DTYPE, jax-decode:DTYPE, jax-prefill:DTYPE or hf:DTYPE (DTYPE is float32,
    bfloat16 or float16; DTYPE@DIR takes another model directory), vllm:URL, vllm-decode:URL, sglang:URL or
    dump:FILE#COLUMN. It may be repeated."""
    sample: str | None = None
    """First sample new responses to the prompts, with jax-decode:DTYPE or vllm-decode:URL."""
    responses: int = 1
    """The number of responses sampled for each prompt."""
    max_response_tokens: int = 256
    """The longest sampled response (tokens). With --toy it is at most 36."""
    seed: int = 0
    """The seed of the sampling."""
    columns: tuple[str, ...] | None = None
    """The columns of TOKENS to compare. None: all of them."""
    trainer: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A column that a trainer computed. It may be repeated."""
    rollout: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(aliases=("--engine",))] = ()
    """A column that a rollout engine computed. It may be repeated."""
    distributions: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compare the next-token distributions, too, of the scorers jax:, hf:, vllm: and sglang: at each response token."""
    top_k: int = 20
    """With --distributions, the number of likeliest tokens that a server is asked for."""
    same_weights: tyro.conf.FlagCreatePairsOff[bool] = False
    """The model directories hold one model's weights in different forms, as after a conversion. Their hashes may
    differ, and only the numbers judge."""
    temperature: float = 1.0
    """The temperature of sampling and of scoring."""
    batch_size: int = 8
    """The number of sequences that are scored at the same time."""
    second_run: bool = True
    """Measure noise floors: score the tokens again in the ways that ``floors`` names."""
    floors: tuple[Cause, ...] = ("shape",)
    """The further runs that measure noise floors. shape: a run at another batch size. Two are for jax: scorers only.
    mesh: a run on several devices, with split weights. remat: a program with a backward pass, which needs the memory of
    gradients."""
    layers: tyro.conf.FlagCreatePairsOff[bool] = False
    """Name the layer and the operation at which the first scorer and each other one part, on one sequence of TOKENS.
    The scorers are jax:DTYPE and hf:DTYPE, with options as in jax:bfloat16,tp=2, and vllm:URL."""
    sequence: str | None = None
    """With --layers, the name of the sequence. None: the longest one."""
    layer_tokens: int = 128
    """With --layers, the largest number of tokens of the sequence that are computed."""
    json: Path | None = None
    """The file of the JSON report. None: report.json in OUT, with --layers layers.json."""
    picture: Path | None = None
    """The file of the picture. None: report.png in OUT, with --layers layers.png."""
    out: Path = Path("comparison")
    """The directory to write."""


def parse(argv: Sequence[str]) -> Arguments:
    """Returns the arguments of the command line, with the arguments that --toy stands for filled in."""
    given = parse_arguments(Arguments, argv, prog="rljax compare", description=__doc__ or "")
    if not given.toy:
        return given
    return dataclasses.replace(
        given,
        toy_prompts=given.toy_prompts or TOY_PROMPTS,
        model=given.model or "toy-base",
        sample=given.sample or "jax-decode:bfloat16",
        scorer=("jax:bfloat16", "jax:float32", *given.scorer),
        max_response_tokens=min(given.max_response_tokens, TOYS["toy"].max_response_tokens),
    )


Job = tuple[str, str, int, Cause]  # column, spec, batch size, program


def jobs(dump: TokenDump, columns: dict[str, str], options: Arguments) -> list[Job]:
    """Returns the columns to compute: one for each scorer, and one for each noise floor of ``--floors``.

    The engine that sampled the responses has its first column already, so only its noise floor is added.
    """
    sampler = options.sample if options.sample in dump.logprobs else None
    size = options.batch_size
    first: list[Job] = [(column, spec, size, "shape") for spec, column in columns.items() if spec != sampler]
    if not options.second_run:
        return first
    twice = [(spec, name) for spec, name in columns.items() if not spec.startswith("dump:")]
    twice += [(sampler, sampler)] if sampler and sampler not in columns else []
    seconds: list[Job] = [(name + SECOND_RUN, spec, size // 2 or 2, "shape") for spec, name in twice]
    seconds = seconds if "shape" in options.floors else []
    causes = [cause for cause in options.floors if cause == "remat" or (cause == "mesh" and jax.device_count() > 1)]
    others = itertools.product([pair for pair in twice if pair[0].startswith("jax:")], causes)
    return first + seconds + [(name + OTHER_RUNS[cause], spec, size, cause) for (spec, name), cause in others]


def scored(dump: TokenDump, todo: Sequence[Job], options: Arguments) -> Iterator[TokenDump]:
    """Computes the columns one after another, and yields the dump after each. Raises ConfigError if one fails."""
    with tqdm(total=len(todo) * len(dump.sequence_ids), desc="scoring", unit="seq", disable=not todo) as bar:
        score = functools.partial(score_column, temperature=options.temperature, progress=bar.update)
        for column, spec, size, cause in todo:
            bar.set_postfix_str(column)
            with caller_errors():
                vectors, source = score(spec, dump, options.model, batch_size=size, cause=cause)
            dump = dump.with_column(column, vectors, source)
            yield dump


def sequences(options: Arguments) -> TokenDump:
    """Returns the sequences of TOKENS or the prompts of the toy task; with --sample, new responses to their prompts."""
    if (options.tokens is None) == (options.toy_prompts is None):
        raise ConfigError("expected either TOKENS or --toy-prompts N")
    if options.model is None and (options.sample or options.toy_prompts is not None):
        raise ConfigError("--sample and --toy-prompts need --model")
    model = options.model or ""
    dump = read_tokens(options.tokens) if options.tokens is not None else toy_prompts(options.toy_prompts or 0, model)
    if options.sample is None:
        return dump
    config = SampleConfig(**{name.name: getattr(options, name.name) for name in dataclasses.fields(SampleConfig)})
    with tqdm(desc="sampling", unit="seq") as bar:
        return sample_responses(dump, model, options.sample, config, progress=bar.update)


def distributions(
    dump: TokenDump, options: Arguments, columns: Mapping[str, str]
) -> tuple[list[DistributionPair], TokenDump]:
    """Compares the scorers' distributions. Returns the comparisons, and the dump with the likeliest tokens.

    ``columns`` has the column name of each scorer's spec.
    """
    likeliest = Likeliest(options.top_k)
    with tqdm(total=len(dump.sequence_ids), desc="distributions", unit="seq") as bar, caller_errors():
        given, temperature = (options.scorer, dump, options.model), options.temperature
        pairs = compare_distributions(
            *given, temperature=temperature, top_k=options.top_k, progress=bar.update, keep=likeliest
        )
    return pairs, likeliest.added(dump, columns)


def named_roles(options: Arguments, columns: Collection[str]) -> dict[str, str]:
    """Returns the roles that --trainer and --rollout give to columns, by column name. Raises ConfigError."""
    roles = dict.fromkeys(options.trainer, "trainer") | dict.fromkeys(options.rollout, "rollout")
    if len(roles) < len(set(options.trainer)) + len(set(options.rollout)):
        raise ConfigError("a column cannot be both --trainer and --rollout")
    unknown = sorted(set(roles) - set(columns))
    if unknown:
        raise ConfigError(f"--trainer and --rollout: no column {unknown[0]!r}, but {', '.join(sorted(columns))}")
    return roles


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Plots the mean absolute difference of each pair as a matrix, and its growth along the response."""
    side = max(5.5, 2.0 + 0.6 * len(comparison.columns))
    figure = Figure(figsize=(2 * side + 4.0, side), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_matrix(left, comparison)
    plot_growth(right, comparison)
    figure.legend(loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=100)


def plot_growth(axes: Axes, comparison: Comparison) -> None:
    """Plots one line for each pair.

    With more than ``MOST_NAMED`` pairs, a pair that passes has the colour of the coarser of its two dtypes. The legend
    then names only the pairs that fail.
    """
    shades = colormaps["turbo"](np.linspace(0.05, 0.95, len(comparison.pairs)))
    named: set[str] = set()
    for pair, shade in zip(comparison.pairs, shades, strict=True):
        gaps = [max(bucket[METRIC], 1e-9) for bucket in pair.growth.values()]
        label, form = f"{pair.trainer} / {pair.rollout}: {pair.verdict.status}", "x--"
        if pair.verdict.status == "pass":
            form = "o-"
            if len(comparison.pairs) > MOST_NAMED:
                dtypes = {comparison.columns[name].dtype for name in (pair.trainer, pair.rollout)}
                dtype = next((name for name in COARSENESS if name in dtypes), "")
                label, shade = f"coarser dtype: {dtype or 'unknown'}", COARSENESS.get(dtype, "0.5")
        axes.plot(list(pair.growth), gaps, form, color=shade, label=None if label in named else label)
        named.add(label)
    axes.set(yscale="log", xlabel="position in the response (tokens)", ylabel=f"{METRIC} (nats)")
    axes.grid(alpha=0.3)


def plot_matrix(axes: Axes, comparison: Comparison) -> None:
    """Plots the difference of each pair, and on the diagonal the difference between the two runs of one scorer."""
    names = list(comparison.columns)
    grid = np.full((len(names), len(names)), np.nan)
    for pair in comparison.pairs:
        i, j = names.index(pair.trainer), names.index(pair.rollout)
        grid[i, j] = grid[j, i] = pair.metrics[METRIC]
    for name, floor in comparison.noise_floor.items():
        grid[names.index(name), names.index(name)] = floor[METRIC]
    axes.imshow(np.maximum(grid, 1e-8), norm=LogNorm(1e-8, 1.0), cmap="viridis")
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for (i, j), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text = f"{value:.1e}".replace("e-0", "e-") if value else "0"
            axes.text(j, i, text, ha="center", va="center", fontsize=7, color="w" if value < 1e-2 else "k")
    axes.set_title(f"{METRIC} (nats; diagonal: second run)", fontsize=10)


def main(argv: Sequence[str]) -> int:
    """Compares the columns, writes the report, and returns the exit status."""
    options = parse(argv)
    with contextlib.ExitStack() as stack:
        with caller_errors():
            stack.enter_context(filled_directory(options.out))
        return run(options)


def run(options: Arguments) -> int:
    """Does the comparison in the directory OUT, which exists, and returns the exit status."""
    stopped: KeyboardInterrupt | ConfigError | None = None
    with caller_errors():
        if options.model is not None:
            options = dataclasses.replace(options, model=model_directory(options.model))
        for spec in () if options.layers else options.scorer:
            split_spec(spec)
        if options.distributions:
            with_distributions(options.scorer)
        if options.sample is not None:
            split_sampler(options.sample)
        columns = {} if options.layers else name_columns(options.scorer)
        dump = sequences(options)
        if options.sample is not None:
            write_dump(options.out / "tokens.parquet", dump)
        if options.layers:
            return run_layers(dump, options)
        check_logprobs(dump, set(dump.logprobs).intersection(options.columns or dump.logprobs))
    given = sorted(dump.logprobs) if options.columns is None else options.columns
    roles = named_roles(options, {*dump.logprobs, *columns.values()})
    try:
        for more in scored(dump, jobs(dump, columns, options), options):
            dump = more
            write_dump(options.out / "tokens.parquet", dump)
    except (KeyboardInterrupt, ConfigError) as error:
        stopped = error
    done = [column for column in columns.values() if column in dump.logprobs]
    names = [name for name in dict.fromkeys([*given, *done]) if not name.endswith(tuple(OTHER_RUNS.values()))]
    if stopped is not None and len(names) < 2:
        raise stopped
    with caller_errors():
        with_roles = dump.with_roles({name: roles[name] for name in names if name in roles})
        comparison = compare_columns(with_roles, names, same_weights=options.same_weights)
    if stopped is None and options.distributions:
        pairs, dump = distributions(dump, options, columns)
        comparison = dataclasses.replace(comparison, distributions=pairs)
    write_dump(options.out / "tokens.parquet", dump)
    (options.out / "report.md").write_text(to_markdown(comparison), encoding="utf-8")
    (options.json or options.out / "report.json").write_text(to_json(comparison), encoding="utf-8")
    plot_comparison(comparison, options.picture or options.out / "report.png")
    print(to_text(comparison))
    print(f"written to {options.out}: report.md, report.json, report.png")
    if stopped is not None:
        raise stopped
    return 0 if comparison.passed else 1
