"""Compares log-probabilities of the same tokens across engines and precisions, pair by pair.

    rljax compare TOKENS --model DIR --scorer jax:bfloat16 --scorer hf:bfloat16 --out comparison

TOKENS is a token dump, a JSONL file, or prime-rl's token export (docs/compare.md). The columns of log-probabilities in
it are compared as well. The program writes tokens.parquet (with the new columns), report.md, report.json and report.png
into the directory OUT. The exit status is 0 when every pair of columns passes, 1 when a pair fails or is refused, 2
when an argument is wrong or a server does not answer, and 130 after an interrupt. After an interrupt, or when a server
stops answering, the program still saves and reports the columns that are complete.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from tqdm import tqdm

from rljax.commands.parser import Parser
from rljax.compare.distributions import DistributionPair, compare_distributions, with_distributions
from rljax.compare.importers import read_tokens
from rljax.compare.report import SECOND_RUN, Comparison, compare_columns, to_json, to_markdown, to_text
from rljax.compare.sampling import SampleConfig, sample_responses, split_sampler, toy_prompts
from rljax.compare.scorers import name_columns, score_column, split_spec
from rljax.data.prompts import TOYS
from rljax.errors import ConfigError, caller_errors
from rljax.policy.hub import CONFIGS, model_directory
from rljax.record.token_dumps import TokenDump, write_dump

METRIC = "logprob_abs_diff_mean"
TOY_PROMPTS = 64
MAX_RESPONSE_TOKENS = 256
MOST_NAMED = 24  # with more pairs than this, the legend groups those that pass
COARSENESS = {"bfloat16": "tab:red", "float16": "tab:blue", "float32": "tab:green"}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options. Raises ConfigError for words that are none."""
    parser = Parser(
        prog="rljax compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tokens",
        metavar="TOKENS",
        type=Path,
        nargs="?",
        help="file of sequences; it may have columns of log-probabilities",
    )
    parser.add_argument(
        "--toy-prompts", metavar="N", type=int, help="instead of TOKENS: the prompts of N toy problems, for --sample"
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help="compare on the package's toy base: it samples responses to 64 toy problems in bfloat16, and "
        "the trainer's forward scores them in bfloat16 and in float32",
    )
    parser.add_argument(
        "--model", metavar="DIR", type=Path, help="Hugging Face directory; vllm: and dump: do not need it"
    )
    parser.add_argument(
        "--scorer",
        metavar="SPEC",
        action="append",
        default=[],
        help="what computes a column: jax:DTYPE, jax-decode:DTYPE or hf:DTYPE (DTYPE: float32, bfloat16, float16; "
        "DTYPE@DIR: of another model directory), vllm:URL or dump:FILE#COLUMN; may be repeated",
    )
    parser.add_argument(
        "--sample",
        metavar="SPEC",
        help="first sample new responses to the prompts, with jax-decode:DTYPE or vllm-decode:URL",
    )
    parser.add_argument(
        "--responses", metavar="N", type=int, default=1, help="responses sampled for each prompt (default: 1)"
    )
    parser.add_argument(
        "--max-response-tokens",
        metavar="N",
        type=int,
        help="longest sampled response in tokens (default: 256; with --toy 36)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--columns", metavar="NAME", nargs="+", help="columns of TOKENS to compare (default: all)")
    parser.add_argument(
        "--trainer",
        metavar="NAME",
        action="append",
        default=[],
        help="a column that a trainer computed; may be repeated",
    )
    parser.add_argument(
        "--rollout",
        "--engine",
        metavar="NAME",
        action="append",
        default=[],
        help="a column that a rollout engine computed; may be repeated",
    )
    parser.add_argument(
        "--distributions",
        action="store_true",
        help="also compare the next-token distributions of the jax:, hf:, vllm: and sglang: scorers, at each "
        "response token",
    )
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=int,
        default=20,
        help="with --distributions: how many of its likeliest tokens a server is asked for (default: 20)",
    )
    parser.add_argument(
        "--same-weights",
        action="store_true",
        help="the model directories hold one model's weights in different forms, as after a conversion: their hashes "
        "may differ, and the numbers alone judge",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="temperature of sampling and of scoring (default: 1)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="sequences that are scored at the same time (default: 8)"
    )
    parser.add_argument(
        "--no-second-run", action="store_true", help="do not score a second time to measure the noise floor"
    )
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="directory to write (default: comparison)")
    options = parser.parse_args(argv)
    if options.toy:
        options.toy_prompts = options.toy_prompts or TOY_PROMPTS
        options.model = options.model or CONFIGS / "toy-base"
        options.sample = options.sample or "jax-decode:bfloat16"
        options.scorer = ["jax:bfloat16", "jax:float32", *options.scorer]
        options.max_response_tokens = options.max_response_tokens or TOYS["toy"].max_response_tokens
    options.max_response_tokens = options.max_response_tokens or MAX_RESPONSE_TOKENS
    return options


Job = tuple[str, str, int]  # column, spec, batch size


def jobs(dump: TokenDump, columns: dict[str, str], options: argparse.Namespace) -> list[Job]:
    """The columns to compute: each scorer runs once, and a second time at another batch size for its noise floor.

    The engine that sampled the responses has given its first column already, so only its second run is added.
    """
    sampler = options.sample if options.sample in dump.logprobs else None
    first = [(column, spec, options.batch_size) for spec, column in columns.items() if spec != sampler]
    if options.no_second_run:
        return first
    twice = columns | ({sampler: sampler} if sampler else {})
    other = options.batch_size // 2 or 2
    return first + [
        (column + SECOND_RUN, spec, other) for spec, column in twice.items() if split_spec(spec)[0] != "dump"
    ]


def scored(dump: TokenDump, todo: Sequence[Job], options: argparse.Namespace) -> Iterator[TokenDump]:
    """Computes one column after the other and yields the dump with each new one."""
    with tqdm(total=len(todo) * len(dump.sequence_ids), desc="scoring", unit="seq", disable=not todo) as bar:
        for column, spec, batch_size in todo:
            bar.set_postfix_str(column)
            with caller_errors():
                vectors, source = score_column(
                    spec,
                    dump,
                    options.model,
                    temperature=options.temperature,
                    batch_size=batch_size,
                    progress=bar.update,
                )
            dump = dump.with_column(column, vectors, source)
            yield dump


def sequences(options: argparse.Namespace) -> TokenDump:
    """The sequences of TOKENS, or the prompts of the toy task; with --sample new responses to their prompts."""
    if (options.tokens is None) == (options.toy_prompts is None):
        raise ConfigError("expected either TOKENS or --toy-prompts N")
    if options.model is None and (options.sample or options.toy_prompts is not None):
        raise ConfigError("--sample and --toy-prompts need --model")
    if options.tokens is not None:
        dump = read_tokens(options.tokens)
    else:
        dump = toy_prompts(options.toy_prompts, options.model)
    if options.sample is None:
        return dump
    config = SampleConfig(
        responses=options.responses,
        max_response_tokens=options.max_response_tokens,
        temperature=options.temperature,
        seed=options.seed,
        batch_size=options.batch_size,
        second_run=not options.no_second_run,
    )
    with tqdm(desc="sampling", unit="seq") as bar:
        return sample_responses(dump, options.model, options.sample, config, progress=bar.update)


def distributions(dump: TokenDump, options: argparse.Namespace) -> list[DistributionPair]:
    """What --distributions asks for."""
    if not options.distributions:
        return []
    with tqdm(total=len(dump.sequence_ids), desc="distributions", unit="seq") as bar, caller_errors():
        return compare_distributions(
            options.scorer,
            dump,
            options.model,
            temperature=options.temperature,
            top_k=options.top_k,
            progress=bar.update,
        )


def named_roles(options: argparse.Namespace, columns: Collection[str]) -> dict[str, str]:
    """The roles that --trainer and --rollout give: name of a column -> role."""
    roles = dict.fromkeys(options.trainer, "trainer") | dict.fromkeys(options.rollout, "rollout")
    if len(roles) < len(set(options.trainer)) + len(set(options.rollout)):
        raise ConfigError("a column cannot be both --trainer and --rollout")
    unknown = sorted(set(roles) - set(columns))
    if unknown:
        raise ConfigError(f"--trainer and --rollout: no column {unknown[0]!r}, but {', '.join(sorted(columns))}")
    return roles


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Plots the mean absolute difference of each pair as a matrix, and how it grows along the response."""
    side = max(5.5, 2.0 + 0.6 * len(comparison.columns))
    figure = Figure(figsize=(2 * side + 4.0, side), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_matrix(left, comparison)
    plot_growth(right, comparison)
    figure.legend(loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=100)


def plot_growth(axes: Axes, comparison: Comparison) -> None:
    """One line for each pair.

    With more than ``MOST_NAMED`` pairs, those that pass have the colour of the coarser of their two dtypes, and the
    legend names only the pairs that fail.
    """
    many = len(comparison.pairs) > MOST_NAMED
    shades = colormaps["turbo"](np.linspace(0.05, 0.95, len(comparison.pairs)))
    named: set[str] = set()
    for pair, shade in zip(comparison.pairs, shades, strict=True):
        gaps = [max(bucket[METRIC], 1e-9) for bucket in pair.growth.values()]
        passed = pair.verdict.status == "pass"
        label = f"{pair.trainer} / {pair.rollout}: {pair.verdict.status}"
        if many and passed:
            dtypes = {comparison.columns[name].dtype for name in (pair.trainer, pair.rollout)}
            dtype = next((name for name in COARSENESS if name in dtypes), "")
            label, shade = f"coarser dtype: {dtype or 'unknown'}", COARSENESS.get(dtype, "0.5")
        axes.plot(
            list(pair.growth), gaps, "o-" if passed else "x--", color=shade, label=label if label not in named else None
        )
        named.add(label)
    axes.set(yscale="log", xlabel="position in the response (tokens)", ylabel=f"{METRIC} (nats)")
    axes.grid(alpha=0.3)


def plot_matrix(axes: Axes, comparison: Comparison) -> None:
    """The difference of each pair; on the diagonal the difference between the two runs of one scorer."""
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
    """Compares, writes the report; returns the exit status."""
    options = parse(argv)
    stopped: KeyboardInterrupt | ConfigError | None = None
    with caller_errors():
        if options.model is not None:
            options.model = Path(model_directory(str(options.model)))
        for spec in options.scorer:
            split_spec(spec)
        if options.distributions:
            with_distributions(options.scorer)
        if options.sample is not None:
            split_sampler(options.sample)
        columns = name_columns(options.scorer)
        options.out.mkdir(parents=True, exist_ok=True)
        dump = sequences(options)
        write_dump(options.out / "tokens.parquet", dump)
    given = options.columns if options.columns is not None else sorted(dump.logprobs)
    roles = named_roles(options, {*dump.logprobs, *columns.values()})
    try:
        for more in scored(dump, jobs(dump, columns, options), options):
            dump = more
            write_dump(options.out / "tokens.parquet", dump)
    except (KeyboardInterrupt, ConfigError) as error:
        stopped = error
    done = [column for column in columns.values() if column in dump.logprobs]
    names = [name for name in dict.fromkeys([*given, *done]) if not name.endswith(SECOND_RUN)]
    if stopped is not None and len(names) < 2:
        raise stopped
    with caller_errors():
        with_roles = dump.with_roles({name: roles[name] for name in names if name in roles})
        comparison = compare_columns(with_roles, names, same_weights=options.same_weights)
    if stopped is None:
        comparison = dataclasses.replace(comparison, distributions=distributions(dump, options))
    (options.out / "report.md").write_text(to_markdown(comparison), encoding="utf-8")
    (options.out / "report.json").write_text(to_json(comparison), encoding="utf-8")
    plot_comparison(comparison, options.out / "report.png")
    print(to_text(comparison))
    print(f"written to {options.out}: report.md, report.json, report.png")
    if stopped is not None:
        raise stopped
    return 0 if comparison.passed else 1
