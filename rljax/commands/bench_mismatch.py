"""Measures the mismatch of engines, precisions and paths on the same tokens, in one table with noise floors.

    rljax bench-mismatch toy-base --engines jax exact transformers --dtypes float32 bfloat16 --lengths 16 256
    rljax bench-mismatch Qwen/Qwen3-0.6B --engines jax vllm --url http://localhost:8000 --out qwen
    rljax bench-mismatch --collect results

For each length, MODEL continues a few prompts by so many tokens. Each engine then scores these tokens in each dtype,
on each of its paths: jax forward, prefill and decode, exact forward, transformers forward, vllm prefill and decode.
The program starts a vLLM server for each dtype, in the environment .venv-vllm or $RLJAX_VLLM_VENV, unless --url names
servers.

A row has the mean gap of an engine to the reference, in nats per token, with k3, the largest gap, the share of gaps
beyond 0.5, and the difference in log-perplexity. Beside it stand the floors, which are gaps of the engine to itself:
"shape" at half the batch size, and "repeat" at the same size. A gap near its floor has no cause to look for. The
seconds are those of the first scoring, with loading and compiling.

A form that does not fit or fails is a row with its reason, and the others go on. The directory OUT has bench.json, and
the tokens with all columns in tokens-LENGTH.parquet for rljax compare and rljax view. Started again with the same OUT,
the program goes on with the rows that are missing. bench.json has no path and no address of this machine.

The exit status is 0 when every row is measured, and 1 when a form failed. It is 2 when an argument is wrong, and 130
after an interrupt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from tqdm import tqdm

import rljax
from rljax.compare.bench import (
    FLOORS,
    PATHS,
    Floor,
    Form,
    bench_rows,
    measure_form,
    reason_of,
    score_form,
    without_places,
)
from rljax.compare.importers import read_tokens
from rljax.compare.report import markdown_table
from rljax.compare.sampling import SampleConfig, sample_responses, split_sampler, toy_prompts
from rljax.compare.scorers import open_server, score_column, split_spec
from rljax.distributed.files import write_whole
from rljax.errors import ConfigError, caller_errors, parse_json
from rljax.policy.families import read_config
from rljax.policy.hub import is_hub_id, model_directory
from rljax.record.text_tables import text_table
from rljax.record.token_dumps import TokenDump, read_dump, write_dump
from rljax.rollout.build import version_bytes
from rljax.rollout.kinds import engines_that
from rljax.rollout.servers.process import Dtype, environment_python
from rljax.run.options import parse_arguments
from rljax.weights.format import weights_hash

FORMAT = 1
REFERENCES = ("jax", "jax-decode", "hf")
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")
"""The packages whose versions bench.json holds, beside rljax."""
FIXED = ("prompts", "sequences", "batch_size", "floors", "reference", "sample", "seed")
"""The settings that all rows of one bench.json share."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of the bench."""

    model: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[MODEL]")] = None
    """The Hugging Face directory, OWNER/NAME, or toy-base."""
    engines: tuple[Literal["jax", "exact", "transformers", "vllm"], ...] = ("jax", "exact", "transformers", "vllm")
    """The engines to measure."""
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
    """The dtypes of weights and activations."""
    lengths: tuple[int, ...] = (32, 256)
    """The lengths of the responses (tokens)."""
    paths: tuple[Literal["forward", "prefill", "decode"], ...] = ("forward", "prefill", "decode")
    """The paths to measure, of those that an engine has."""
    url: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """The URL of a running vLLM server that holds MODEL, for the rows of its dtype. It may be repeated."""
    server_arg: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A further argument of the servers that are started, as in --server-arg=--gpu-memory-utilization=0.4."""
    prompts: Path | None = None
    """A file of sequences that rljax compare reads, for its prompts. None: toy problems in the tokens of MODEL."""
    sequences: int = 8
    """The number of prompts, each with one response."""
    batch_size: int = 4
    """The number of sequences that are scored at the same time."""
    floors: tuple[Floor, ...] = FLOORS
    """The noise floors to measure. Each takes one more scoring."""
    reference: str = "jax"
    """The scorer that the gaps are measured against: jax is the trainer's forward in the dtype of the row, and
    jax:float32 the same in one dtype for all rows."""
    sample: str = "jax-decode:bfloat16"
    """The engine that samples the tokens: jax-decode:DTYPE or vllm-decode:URL."""
    seed: int = 0
    """The seed of the sampling."""
    retry: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measure the forms again that failed before."""
    out: Path = Path("mismatch_bench")
    """The directory to write."""
    collect: Path | None = None
    """Only print the tables of the JSON files in this directory, as Markdown."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.collect is None):
            raise ConfigError("expected either MODEL or --collect DIR")
        for name, least in (("sequences", 2), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not self.lengths or min(self.lengths) < 1:
            raise ConfigError(f"--lengths must be at least 1 each, got {self.lengths}")
        if self.batch_size > self.sequences:
            raise ConfigError(f"--batch-size must be at most --sequences = {self.sequences}, got {self.batch_size}")
        with caller_errors():
            split_sampler(self.sample)
            if split_spec(self.reference_of("float32"))[0] not in REFERENCES:
                raise ConfigError(f"--reference must be {', '.join(REFERENCES)}, got {self.reference}")

    def reference_of(self, dtype: str) -> str:
        """Returns the spec of the scorer that is the reference for rows of a dtype."""
        return self.reference if ":" in self.reference else f"{self.reference}:{dtype}"


def machine() -> dict[str, Any]:
    """Returns the processor, cores, memory, accelerators and system of this machine, without its name."""
    found = ""
    with contextlib.suppress(OSError):
        found = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    named = re.search(r"^model name\s*: (.*)$", found, re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": named[1] if named else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "devices": [f"{device.platform} {device.device_kind}" for device in jax.devices()],
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def document_of(options: Arguments, argv: Sequence[str], directory: str) -> dict[str, Any]:
    """Returns the JSON document of a bench without rows."""
    policy, name = read_config(directory), str(options.model)
    settings = {one: getattr(options, one) for one in FIXED} | {"prompts": options.prompts and options.prompts.name}
    settings |= {"sample": without_places(options.sample), "floors": list(options.floors)}
    parts = [[Path(part).name if os.path.exists(part) else part for part in word.split("=")] for word in argv]
    return {
        "format": FORMAT,
        "model": {
            "name": name if is_hub_id(name) else Path(name).name,
            "parameters": version_bytes(policy, "float32") // 4,
            "shape": dataclasses.asdict(policy),
            "weights": weights_hash(directory),
        },
        "commands": [shlex.join(["rljax", "bench-mismatch", *(without_places("=".join(each)) for each in parts)])],
        "machine": machine(),
        "versions": {"rljax": rljax.__version__}
        | {name: version(name) for name in PACKAGES if importlib.util.find_spec(name)},
        "settings": settings,
        "tokens": {},
        "running": [],
        "rows": [],
    }


def resumed(fresh: dict[str, Any], path: Path, *, retry: bool) -> dict[str, Any]:
    """Returns the document to continue: the one in the file ``path`` if it exists, or else ``fresh``.

    Forms that were running when the program was killed count as failed. With ``retry`` failed forms are forgotten.
    Raises ConfigError if the file belongs to another model, machine, version or setting.
    """
    if not path.exists():
        return fresh
    with caller_errors():
        old = parse_json(path.read_bytes())
    for name in ("format", "model", "machine", "versions", "settings"):
        if old.get(name) != json.loads(json.dumps(fresh[name])):
            raise ConfigError(f"{path} is a bench with another {name}: give another --out, or remove it")
    killed = {"reason": "the program was killed here, perhaps for want of memory"}
    rows = [*old["rows"], *(form | killed for form in old["running"])]
    rows = [row for row in rows if not (retry and "reason" in row)]
    return old | {"rows": rows, "running": [], "commands": [*dict.fromkeys(old["commands"] + fresh["commands"])]}


class Bench:
    """One bench: its document, the tokens of each length, and the forms that are still to measure."""

    def __init__(self, options: Arguments, argv: Sequence[str]):
        """Opens or begins the bench in ``options.out``.

        Raises ConfigError if the model cannot be found, or the directory has a bench of another model, machine,
        version or setting.
        """
        with caller_errors():
            self.model = Path(model_directory(str(options.model)))
            options.out.mkdir(parents=True, exist_ok=True)
            fresh = document_of(options, argv, str(self.model))
        self.options, self.path = options, options.out / "bench.json"
        self.document = resumed(fresh, self.path, retry=options.retry)
        self.dumps: dict[int, TokenDump] = {}
        done = set(map(Form.of, self.document["rows"]))
        choice = itertools.product(options.engines, options.dtypes, options.paths, options.lengths)
        forms = [Form(*one) for one in choice if one[2] in PATHS[one[0]]]
        self.todo = [form for form in dict.fromkeys(forms) if form not in done]

    def save(self, running: Sequence[Form] = ()) -> None:
        """Writes the document, in which ``running`` are the forms that are being measured."""
        self.document["running"] = [form._asdict() for form in running]
        write_whole(self.path, json.dumps(self.document, indent=1) + "\n")

    def sample(self, length: int) -> None:
        """Reads the tokens of a length, or samples them if there is no file of them yet.

        Raises ValueError if there are too few prompts, or the length does not fit the model.
        """
        options, path = self.options, self.options.out / f"tokens-{length}.parquet"
        if not path.exists():
            given = read_tokens(options.prompts) if options.prompts else toy_prompts(options.sequences, self.model)
            columns = (given.sequence_ids, given.token_ids, given.response_mask)
            prompts = TokenDump(*(column[: options.sequences] for column in columns))  # type: ignore[arg-type]
            if len(prompts.sequence_ids) < options.sequences:
                raise ValueError(f"there are {len(prompts.sequence_ids)} prompts, expected {options.sequences}")
            longest = max(int(mask.argmax()) or len(mask) for mask in prompts.response_mask)
            room = read_config(self.model).max_position_embeddings
            if longest + length > room:
                raise ValueError(f"{longest} + {length} tokens do not fit the {room} positions of the model")
            config = SampleConfig(max_response_tokens=length, seed=options.seed, batch_size=options.batch_size)
            write_dump(path, sample_responses(prompts, self.model, options.sample, config, full_length=True))
        self.dumps[length] = read_dump(path)
        ids = b"".join(row.tobytes() for row in self.dumps[length].token_ids)
        self.document["tokens"][str(length)] = f"sha256:{hashlib.sha256(ids).hexdigest()}"

    @contextlib.contextmanager
    def address(self, engine: str, dtype: str) -> Iterator[str]:
        """Yields the URL of an engine's server, or an empty string for an engine without one.

        The server is started unless --url names one. Raises ValueError if no server of --url computes in ``dtype``.
        """
        if engine not in engines_that("serves"):
            yield ""
            return
        for url in self.options.url:
            with open_server(url, engine) as server:
                theirs = server.info.dtype
            if theirs == dtype:
                yield url
                return
        if self.options.url:
            raise ValueError(f"no server of --url computes in {dtype}")
        module = importlib.import_module(f"rljax.rollout.servers.{engine}.server")
        lengths = [len(ids) for dump in self.dumps.values() for ids in dump.token_ids]
        config = module.ServerConfig(
            str(self.model),
            str(environment_python(engine)),
            dtype,
            max_model_len=max(lengths, default=1) + 1,
            log_path=self.options.out / f"{engine}-{dtype}.log",
            extra_args=self.options.server_arg,
        )
        with module.start(config) as process:
            yield process.url

    def measure(self, form: Form, address: str, bar: Any) -> dict[str, Any]:
        """Scores the tokens with one form of an engine, writes the log-probabilities, and returns the row of the table.

        ``address``: The URL of the engine's server, or "" without one. ``bar``: The progress bar.
        """
        dump, reference = self.dumps[form.length], self.options.reference_of(form.dtype)
        size = self.options.batch_size
        if reference not in (form.column, *dump.logprobs):
            dump = dump.with_column(reference, *score_column(reference, dump, self.model, batch_size=size))
            self.dumps[form.length] = dump  # kept even if the form itself fails

        def score(batch_size: int) -> Any:
            return score_form(form, dump, self.model, address, batch_size, bar.update)

        numbers, dump = measure_form(form, dump, reference, score, size, self.options.floors)
        self.dumps[form.length] = dump
        write_dump(self.options.out / f"tokens-{form.length}.parquet", dump)
        return numbers

    def fail(self, forms: Sequence[Form], error: Exception) -> None:
        """Adds a row with the reason for each form that failed and has no row yet."""
        done = set(map(Form.of, self.document["rows"]))
        reason = {"reason": reason_of(error)}
        self.document["rows"] += [form._asdict() | reason for form in forms if form not in done]

    def run(self) -> None:
        """Measures every missing form. The document is written before each form."""
        for length, forms in grouped(self.todo, lambda form: form.length):
            self.save(forms)
            try:
                self.sample(length)
            except Exception as error:
                self.fail(forms, error)
        todo = [form for form in self.todo if form.length in self.dumps]
        each = self.options.sequences * (1 + len(self.options.floors))
        with tqdm(total=len(todo) * each, desc="scoring", unit="seq") as bar:
            for (engine, dtype), forms in grouped(todo, lambda form: (form.engine, form.dtype)):
                try:
                    with self.address(engine, dtype) as address:
                        for form in forms:
                            bar.set_postfix_str(f"{form.column}, {form.length} tokens")
                            self.save([form])
                            try:
                                self.document["rows"].append(form._asdict() | self.measure(form, address, bar))
                            except Exception as error:
                                self.fail([form], error)
                            bar.update((todo.index(form) + 1) * each - bar.n)
                except Exception as error:  # the server did not start, or did not answer
                    self.fail(forms, error)


def grouped(forms: Sequence[Form], key: Callable[[Form], Any]) -> list[tuple[Any, list[Form]]]:
    """Groups the forms by their key. The groups are in the order in which their keys first occur."""
    return [(one, [form for form in forms if key(form) == one]) for one in dict.fromkeys(map(key, forms))]


def collected(directory: Path) -> str:
    """Returns the tables of the JSON files in a directory as Markdown, one section for each file."""
    sections = []
    for path in sorted(directory.glob("*.json")):
        with caller_errors():
            document = parse_json(path.read_bytes())
        model, here = document["model"], document["machine"]
        servers = {
            " ".join(row["program"].split()[:2])
            for row in document["rows"]
            if row["engine"] in engines_that("serves") and "program" in row
        }
        packages = ", ".join([*(f"{name} {number}" for name, number in document["versions"].items()), *sorted(servers)])
        said = f"{model['parameters']:,} parameters ({model['weights'][:19]}), {', '.join(here['devices'])}"
        lines = [f"### {model['name']}", f"{said}, {here['processor']}, {here['cores']} cores; {packages}."]
        lines += ["\n".join(["```", *document["commands"], "```"])]
        sections += ["\n\n".join([*lines, markdown_table(bench_rows(document))])]
    return "\n\n".join(sections) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measures a bench or collects files of earlier ones, prints the tables, and returns the exit status."""
    options = parse_arguments(Arguments, argv, prog="rljax bench-mismatch", description=__doc__ or "")
    if options.collect is not None:
        print(collected(options.collect), end="")
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the engines share the memory of a card
    bench = Bench(options, argv)
    try:
        bench.run()
    finally:
        bench.save()
    print(text_table(bench_rows(bench.document)))
    print(f"written to {options.out}: bench.json and the tokens of each length")
    return 1 if any("reason" in row for row in bench.document["rows"]) else 0
