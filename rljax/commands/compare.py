"""Compares log-probabilities of the same tokens across engines and precisions, pair by pair.

    rljax compare --toy
    rljax compare TOKENS --model DIR --scorer jax:bfloat16 --scorer hf:bfloat16 --out comparison

    rljax compare TOKENS --model DIR --scorer jax:bfloat16 --scorer hf:bfloat16 --layers
    rljax compare --serve --model toy-base --scorer hf:bfloat16 --scorer vllm:bfloat16 --lengths 32 256

TOKENS is a token dump, a JSONL file, or prime-rl's token export. The columns of log-probabilities in it are compared,
too. The program writes tokens.parquet (with the new columns), report.md, report.json and report.png into the directory
OUT. With --layers it compares the operations inside the scorers, and writes layers.md, layers.json and layers.png.

With --serve it starts the vLLM servers that the scorers need, in the environment .venv-vllm or $RLJAX_VLLM_VENV. For
each length the model continues the prompts by so many tokens, and each scorer is a row of one table. A row has the gap
to the reference in nats per token: mean, k3, largest, and share beyond 0.5. It also has the difference in
log-perplexity and the floors, which are gaps of the scorer to itself: "shape" at half the batch size, "repeat" at the
same size, and of a decode "path" to the prefill of its own engine. A row that fails has its reason, and the others go
on. Started again with the same OUT, the program measures the rows that have no numbers. OUT has bench.json, and the
tokens in tokens-LENGTH.parquet.

The exit status is 0 when every pair of columns passes, and 1 when a pair fails or is refused, or a row of --serve. It
is 2 when an argument is wrong or a server does not answer, and 130 after an interrupt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from rljax.compare.bench import REFERENCES, ROWS, Bench, BenchConfig, bench_rows, without_places
from rljax.compare.distributions import compare_distributions, with_distributions
from rljax.compare.importers import read_tokens
from rljax.compare.layers.differences import compare_layers
from rljax.compare.layers.findings import Judged, judge_layers, layers_json, layers_markdown, layers_text
from rljax.compare.layers.tracers import check_traced, open_tracer
from rljax.compare.picture import plot_comparison, plot_layers
from rljax.compare.report import compare_columns, to_json, to_markdown, to_text
from rljax.compare.sampling import SampleConfig, sample_responses, split_sampler, toy_prompts
from rljax.compare.scorers import DTYPES, check_vocabulary, name_columns, score_column, split_spec
from rljax.data.prompts import TOYS
from rljax.distributed.files import filled_directory
from rljax.errors import ConfigError, caller_errors
from rljax.policy.config import SIZES, PolicyConfig
from rljax.policy.hub import is_hub_id, model_directory
from rljax.record.dump_facts import check_logprobs, named_roles
from rljax.record.rows import text_table
from rljax.record.token_dumps import OTHER_RUNS, SECOND_RUN, TokenDump, write_dump
from rljax.run.options import Positional, Repeated, parse_arguments
from rljax.trainer.measure import Cause

TOY_PROMPTS = 64
BENCH_PROMPTS = 8  # the toy problems of --serve
OF_SERVE = {"lengths", "repeat", "server_arg"}  # options that go with --serve only
# Options that go with --serve and without it.
OF_BOTH = {"serve", "tokens", "toy_prompts", "model", "scorer", "sample"}
OF_BOTH |= {"seed", "trainer", "batch_size", "second_run", "out"}


@dataclass(frozen=True)
class CompareArguments(SampleConfig):
    """The arguments of the comparison."""

    tokens: Positional[Path | None] = None
    """The file of sequences. It may have columns of log-probabilities."""
    toy_prompts: int | None = None
    """The number of toy problems whose prompts replace TOKENS, for --sample."""
    toy: bool = False
    """Compare on the toy base of the package. It samples responses of at most 36 tokens to 64 toy problems in bfloat16,
    and the trainer's forward scores them in bfloat16 and in float32."""
    model: str | None = None
    """The Hugging Face directory of the model, or OWNER/NAME. The scorers vllm: and dump: do not need it."""
    scorer: Repeated[str] = ()
    """The program that computes a column: jax:DTYPE, jax-decode:DTYPE, jax-prefill:DTYPE or hf:DTYPE (DTYPE is float32,
    bfloat16 or float16; DTYPE@DIR takes another model directory), vllm:URL, vllm-decode:URL, sglang:URL or
    dump:FILE#COLUMN. It may be repeated."""
    sample: str | None = None
    """First sample new responses to the prompts, with jax-decode:DTYPE or vllm-decode:URL."""
    columns: tuple[str, ...] | None = None
    """The columns of TOKENS to compare. None: all of them."""
    trainer: Repeated[str] = ()
    """A column that a trainer computed. It may be repeated."""
    rollout: Repeated[str] = ()
    """A column that a rollout engine computed. It may be repeated."""
    distributions: bool = False
    """Compare the next-token distributions, too, of the scorers jax:, hf:, vllm: and sglang: at each response token."""
    top_k: int = 20
    """With --distributions, the number of likeliest tokens that a server is asked for."""
    same_weights: bool = False
    """Take the model directories as one model's weights in different forms, as after a conversion. Different hashes
    of weights are then no failure."""
    second_run: bool = True
    """Measure noise floors: score the tokens again in the ways that ``floors`` names."""
    floors: tuple[Cause, ...] = ("shape",)
    """The further runs that measure noise floors. shape: a run at another batch size. Two are for jax: scorers only.
    mesh: a run on several devices, with split weights. remat: a program with a backward pass, which needs the memory of
    gradients."""
    layers: bool = False
    """Name the layer and the operation at which each other scorer differs from the first, on one sequence of TOKENS.
    The scorers are jax:DTYPE and hf:DTYPE, with options as in jax:bfloat16,tp=2, and vllm:URL."""
    sequence: str | None = None
    """With --layers, the name of the sequence. None: the longest one."""
    layer_tokens: int = 128
    """With --layers, the largest number of tokens of the sequence that are computed."""
    serve: bool = False
    """Measure each scorer of --model, one row each, on new responses to the prompts of TOKENS or of toy problems (8).
    The scorers are jax, jax-prefill, jax-decode, exact, hf, vllm and vllm-decode with a DTYPE, or vllm:URL; without any
    it measures all of them. --trainer names the reference, such as jax:float32. None: jax in the dtype of the row."""
    lengths: tuple[int, ...] = (32, 256)
    """With --serve, the lengths of the responses (tokens)."""
    repeat: int = 1
    """With --serve, the number of further scorings at the same batch size, for the floor "repeat"."""
    server_arg: Repeated[str] = ()
    """With --serve, a further argument of the servers, as in --server-arg=--gpu-memory-utilization=0.4."""
    json: Path | None = None
    """The file of the JSON report. None: report.json in OUT, with --layers layers.json."""
    picture: Path | None = None
    """The file of the picture. None: report.png in OUT, with --layers layers.png."""
    out: Path = Path("comparison")
    """The directory to write."""


def parse(argv: Sequence[str]) -> CompareArguments:
    """Returns the arguments of the command line. --toy is replaced by the arguments that it stands for."""
    given = parse_arguments(
        CompareArguments, argv, prog="rljax compare", description=__doc__ or "", aliases={"--engine": "--rollout"}
    )
    for field in dataclasses.fields(CompareArguments):
        is_taken = field.name in OF_BOTH or (field.name in OF_SERVE) == given.serve
        if not is_taken and getattr(given, field.name) != field.default:
            goes = "does not go" if given.serve else "goes"
            raise ConfigError(f"--{field.name.replace('_', '-')} {goes} with --serve")
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


Job = tuple[str, str, int, Cause]  # a column, its scorer's spec, the batch size, and the program of ``jax:``


def jobs(dump: TokenDump, columns: dict[str, str], options: CompareArguments) -> list[Job]:
    """Returns the columns to compute: one for each scorer, and one for each of its noise floors of ``--floors``.

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


def scored(dump: TokenDump, todo: Sequence[Job], options: CompareArguments) -> Iterator[TokenDump]:
    """Computes the columns one after another, and yields the dump after each. Raises ConfigError if one fails."""
    with tqdm(total=len(todo) * len(dump.sequence_ids), desc="scoring", unit="seq", disable=not todo) as bar:
        score = functools.partial(score_column, temperature=options.temperature, progress=bar.update)
        for column, spec, size, cause in todo:
            bar.set_postfix_str(column)
            with caller_errors():
                vectors, source = score(spec, dump, options.model, batch_size=size, cause=cause)
            dump = dump.with_column(column, vectors, source)
            yield dump


def sequences(options: CompareArguments) -> TokenDump:
    """Returns the sequences of TOKENS or the prompts of the toy task; with --sample, new responses to their prompts."""
    if (options.tokens is None) == (options.toy_prompts is None):
        raise ConfigError("expected either TOKENS or --toy-prompts N")
    if options.model is None and (options.sample or options.toy_prompts is not None):
        raise ConfigError("--sample and --toy-prompts need --model")
    model = options.model or ""
    dump = read_tokens(options.tokens) if options.tokens is not None else toy_prompts(options.toy_prompts or 0, model)
    if options.sample is None:
        return dump
    with tqdm(desc="sampling", unit="seq") as bar:
        return sample_responses(dump, model, options.sample, options, progress=bar.update)


def run_layers(dump: TokenDump, options: CompareArguments) -> int:
    """Compares each further scorer with the first by operations, writes the reports, and returns the exit status."""
    scorers, model, out = options.scorer, options.model, options.out
    if len(scorers) < 2:
        raise ConfigError(f"--layers compares the first --scorer with each other one, got {len(scorers)}")
    if options.layer_tokens < 2:
        raise ConfigError(f"--layer-tokens must be at least 2, got {options.layer_tokens}")
    for spec in scorers:
        check_traced(spec)
    name, names = options.sequence, list(dump.sequence_ids)
    if name is not None and name not in names:
        raise ConfigError(f"--sequence: no sequence {name!r} among the {len(names)} there")
    place = int(np.argmax([len(ids) for ids in dump.token_ids])) if name is None else names.index(name)
    tokens = np.asarray(dump.token_ids[place][: options.layer_tokens], np.int32)
    if len(tokens) < 2:
        raise ConfigError(f"--layers needs a sequence of at least 2 tokens, got {len(tokens)}")
    judged: list[Judged] = []
    with open_tracer(scorers[0], model) as reference:
        check_vocabulary(dump, reference.config.vocab_size)
        for spec in scorers[1:]:
            with open_tracer(spec, model) as tested:
                _check_alike(spec, tested.config, scorers[0], reference.config)
                comparison = compare_layers(reference, tested, tokens)
            judged.append((comparison, judge_layers(comparison)))
    write_dump(out / "tokens.parquet", dump)
    (out / "layers.md").write_text(layers_markdown(judged), encoding="utf-8")
    (options.json or out / "layers.json").write_text(layers_json(judged), encoding="utf-8")
    plot_layers(judged, options.picture or out / "layers.png")
    print(layers_text(judged))
    print(f"written to {out}: layers.md, layers.json, layers.png")
    return 0 if all(verdict.passed for _, verdict in judged) else 1


def _check_alike(spec: str, config: PolicyConfig, first: str, expected: PolicyConfig) -> None:
    of_delta_nets = ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim")
    for name in (*SIZES, "num_experts", "family", *of_delta_nets):
        got, wanted = getattr(config, name), getattr(expected, name)
        if got != wanted:
            raise ConfigError(f"scorer {spec!r} has {name} = {got}, expected {wanted}, that of {first}")


def run_bench(options: CompareArguments, argv: Sequence[str]) -> int:
    """Measures the scorers of --serve, writes into the directory OUT, which exists, and returns the exit status."""
    if options.model is None or (options.tokens and options.toy_prompts):
        raise ConfigError("--serve needs --model, and takes the prompts of either TOKENS or --toy-prompts N")
    for name, least in (("lengths", 1), ("repeat", 0)):
        if np.size(value := getattr(options, name)) == 0 or np.min(value) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    reference = options.trainer[0] if options.trainer else "jax"
    if len(options.trainer) > 1 or reference.partition(":")[0] not in REFERENCES:
        raise ConfigError(f"--serve takes one --trainer of {', '.join(REFERENCES)}, got {' '.join(options.trainer)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the engines share the memory of a card
    parts = [[Path(part).name if os.path.exists(part) else part for part in word.split("=")] for word in argv]
    with caller_errors():
        model = Path(model_directory(options.model))
        tokens, count = options.tokens, options.toy_prompts or BENCH_PROMPTS
        prompts = read_tokens(tokens) if tokens else toy_prompts(count, model)
        sample = options.sample or "jax-decode:bfloat16"
        split_sampler(sample)
        same = ("lengths", "second_run", "repeat", "seed", "server_arg", "out")
        config = BenchConfig(
            model,
            options.model if is_hub_id(options.model) else Path(options.model).name,
            options.scorer or tuple(f"{kind}:{dtype}" for kind, dtype in itertools.product(ROWS, DTYPES)),
            batch_size=min(options.batch_size, len(prompts.sequence_ids)),
            reference=reference,
            sample=sample,
            **{name: getattr(options, name) for name in same},
        )
        command = shlex.join(["rljax", "compare", *(without_places("=".join(each)) for each in parts)])
        bench = Bench(config, prompts, tokens.name if tokens else None, command)
    bench.run()
    print(text_table(bench_rows(bench.document)))
    print(f"written to {options.out}: bench.json and the tokens of each length")
    return 1 if any("reason" in row for row in bench.document["rows"]) else 0


def main(argv: Sequence[str]) -> int:
    """Compares columns, operations or the scorers of --serve, writes the report, and returns the exit status."""
    options = parse(argv)
    with contextlib.ExitStack() as stack:
        with caller_errors():
            stack.enter_context(filled_directory(options.out))
            for file in filter(None, (options.json, options.picture)):  # found before the work
                file.parent.mkdir(parents=True, exist_ok=True)
                if file.is_dir():
                    raise ConfigError(f"{file} is a directory: expected a file to write")
        return run_bench(options, argv) if options.serve else run(options)


def run(options: CompareArguments) -> int:
    """Compares the columns, writes into the directory OUT, which exists, and returns the exit status."""
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
    roles = named_roles({*dump.logprobs, *columns.values()}, options.trainer, options.rollout)
    tokens, start = options.out / "tokens.parquet", dump
    for dump in scored(start, jobs(start, columns, options), options):
        write_dump(tokens, dump)
    compared = dict.fromkeys([*given, *columns.values()])
    names = [name for name in compared if not name.endswith(tuple(OTHER_RUNS.values()))]
    with caller_errors():
        with_roles = dump.with_roles({name: roles[name] for name in names if name in roles})
        comparison = compare_columns(with_roles, names, same_weights=options.same_weights)
    if options.distributions:
        with tqdm(total=len(dump.sequence_ids), desc="distributions", unit="seq") as bar, caller_errors():
            how = {name: getattr(options, name) for name in ("temperature", "top_k")} | {"progress": bar.update}
            pairs = compare_distributions(options.scorer, dump, options.model, **how)
        comparison = dataclasses.replace(comparison, distributions=pairs)
    if dump is start:
        write_dump(tokens, dump)
    (options.out / "report.md").write_text(to_markdown(comparison), encoding="utf-8")
    (options.json or options.out / "report.json").write_text(to_json(comparison), encoding="utf-8")
    plot_comparison(comparison, options.picture or options.out / "report.png")
    print(to_text(comparison))
    print(f"written to {options.out}: report.md, report.json, report.png")
    return 0 if comparison.passed else 1
