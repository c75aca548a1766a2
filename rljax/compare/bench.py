"""Measures scorers on the same tokens: a row has the gap of one scorer at one length, and the scorer's noise floors.

A gap is the difference of log-probabilities from a reference: this library's forward, unless another scorer is named.
The servers that the rows need are started one after another. The directory of a bench has bench.json, and for each
length a token dump with all columns. bench.json has no path and no address of the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

import rljax
from rljax.compare.sampling import SampleConfig, sample_responses
from rljax.compare.scorers import DTYPES, ON_TPU, open_server, score_column, server_kind
from rljax.distributed.files import write_whole
from rljax.errors import parse_json
from rljax.mismatch.atlas import normal_range
from rljax.policy.families import read_config
from rljax.record.dump_facts import TokenPair
from rljax.record.token_dumps import SECOND_RUN, ColumnSource, TokenDump, read_dump, write_dump
from rljax.rollout.build import version_bytes
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.vllm import server as vllm
from rljax.weights.format import weights_hash

FORMAT = 1
ROWS = {
    "jax": ("jax", "forward"),
    "jax-prefill": ("jax", "prefill"),
    "jax-decode": ("jax", "decode"),
    "exact": ("exact", "forward"),
    "hf": ("transformers", "forward"),
    "vllm": ("vllm", "prefill"),
    "vllm-decode": ("vllm", "decode"),
}
"""The engine of a row and its path ("forward", "prefill" or "decode"), by the kind of its scorer."""
REFERENCES = ("jax", "jax-decode", "hf")
"""The kinds of scorers that can be the reference of the gaps."""
STARTED = ("vllm", "vllm-decode")
"""The kinds of scorers for which a bench starts a server, if their spec names a dtype and no URL."""
_OTHERS = {ROWS[kind][0] for kind in ("hf", *STARTED)}  # the engines whose gap is compared with published ones
GAP = "logprob_abs_diff_mean"
METRICS = (GAP, "k3_kl", "logprob_abs_diff_max", "extreme_rate", "log_ppl_abs_diff")
COUNTS = ("token_count", "nonfinite_count")
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")
"""The packages whose versions bench.json holds, beside rljax."""

ScoreRows = Callable[[int], tuple[Sequence[np.ndarray], ColumnSource]]


@dataclass(frozen=True)
class BenchConfig:
    """The settings of a bench."""

    model: Path  # the model's directory
    name: str  # the model's name in the report: OWNER/NAME or the directory's last part
    scorers: tuple[str, ...]  # KIND:DTYPE, where vllm and vllm-decode mean a server to start, or vllm:URL
    lengths: tuple[int, ...]  # the lengths of the responses (tokens)
    batch_size: int = 4  # the sequences that are scored at the same time
    second_run: bool = True  # whether a second scoring, at half the batch size, measures the floor "shape"
    repeat: int = 1  # the number of further scorings at the same batch size, which measure the floor "repeat"
    reference: str = "jax"  # the scorer that gaps are measured against; without a dtype, at each row's dtype
    sample: str = "jax-decode:bfloat16"  # the engine that samples the tokens
    seed: int = 0  # the seed of the sampling
    server_arg: tuple[str, ...] = ()  # further command-line arguments of the servers that the bench starts
    out: Path = Path("comparison")  # the directory to write


class BenchForm(NamedTuple):
    """The identity of a row: its scorer, as the report describes it, and its length."""

    engine: str
    dtype: str
    path: str  # the way of the computation: "forward", "prefill" or "decode"
    length: int  # the length of the scored responses, in tokens

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> BenchForm:
        """Returns the identity of a row of bench.json."""
        return cls(*(row[name] for name in cls._fields))

    @property
    def kind(self) -> str:
        """The kind of the row's scorer, a key of ``ROWS``."""
        words = self.engine.removesuffix(ON_TPU), self.path
        return next(kind for kind, known in ROWS.items() if known == words)

    @property
    def column(self) -> str:
        """The name of the row's column in the dump of its length, as ``rljax compare`` names columns."""
        named = f"{self.kind}:{self.dtype}".replace("vllm-decode", "vllm-forced")
        return named.replace(self.engine.removesuffix(ON_TPU), self.engine, 1)


def find_forms(config: BenchConfig) -> dict[BenchForm, str]:
    """Returns the identity of each row with the spec of its scorer, such as ``hf:bfloat16``.

    Raises:
      ValueError: A spec has an unknown kind or dtype, or two specs describe the same row.
      ServerError: A server that a scorer names does not answer.
    """
    forms: dict[BenchForm, str] = {}
    for spec in config.scorers:
        kind, _, dtype = spec.partition(":")
        engine, path = ROWS.get(kind, ("", ""))
        if kind in STARTED and "://" in dtype:
            with open_server(dtype) as server:
                engine, dtype = server_kind(server.info), server.info.dtype
        elif not engine or dtype not in DTYPES:
            kinds, dtypes = ", ".join(ROWS), ", ".join(DTYPES)
            raise ValueError(f"--serve measures KIND:DTYPE of {kinds} and {dtypes}, or vllm:URL; got {spec!r}")
        for form in (BenchForm(engine, dtype, path, length) for length in config.lengths):
            if forms.setdefault(form, spec) != spec:
                raise ValueError(f"{forms[form]} and {spec} are one row, {form.column}: measure them in two --out")
    return forms


def is_started(spec: str) -> bool:
    """Returns whether a bench itself starts the server of the scorer that ``spec`` names."""
    return spec.startswith(STARTED) and "://" not in spec


def machine() -> dict[str, Any]:
    """Returns this machine's processor, cores, memory (GiB), system and jax devices, without the machine's name."""
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


def new_document(config: BenchConfig, prompts: TokenDump, prompts_name: str | None, command: str) -> dict[str, Any]:
    """Returns the JSON document of a new bench, which has no rows yet."""
    policy = read_config(config.model)
    floors = ["shape"] * config.second_run + ["repeat"] * bool(config.repeat)
    return {
        "format": FORMAT,
        "model": {
            "name": config.name,
            "parameters": version_bytes(policy, "float32") // 4,
            "shape": dataclasses.asdict(policy),
            "weights": weights_hash(config.model),
        },
        "commands": [command],
        "machine": machine(),
        "versions": {"rljax": rljax.__version__}
        | {name: version(name) for name in PACKAGES if importlib.util.find_spec(name)},
        "settings": {"prompts": prompts_name, "sequences": len(prompts.sequence_ids), "batch_size": config.batch_size}
        | {"floors": floors, "repeat": config.repeat, "reference": config.reference}
        | {"sample": without_places(config.sample), "seed": config.seed},
        "tokens": {},
        "rows": [],
    }


def resumed(fresh: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the bench to continue: the content of the file ``path`` without failed rows, or ``fresh`` without a file.

    So failed rows are measured again. Raises ValueError if the file has another model, machine, version or setting, or
    if it is missing beside tokens that a bench has scored.
    """
    if not path.exists():
        left = [file for file in sorted(path.parent.glob("tokens-*.parquet")) if read_dump(file).logprobs]
        if left:
            raise ValueError(f"{left[0]} is of a bench without {path.name}: give another --out, or remove it")
        return fresh
    old = parse_json(path.read_bytes())
    for name in ("format", "model", "machine", "versions", "settings"):
        if old.get(name) != json.loads(json.dumps(fresh[name])):
            raise ValueError(f"{path} is a bench with another {name}: give another --out, or remove it and its tokens")
    rows = [row for row in old["rows"] if "reason" not in row]
    return old | {"rows": rows, "commands": [*dict.fromkeys(old["commands"] + fresh["commands"])]}


class Bench:
    """A bench: its document, the tokens of each length, and the rows that are still to measure."""

    def __init__(self, config: BenchConfig, prompts: TokenDump, prompts_name: str | None, command: str):
        """Opens or begins the bench in the directory ``config.out``, which exists.

        ``prompts`` has the sequences whose prompts are continued, and ``prompts_name`` the name of their file.

        Raises:
          ValueError: A scorer is unknown, or the directory has a bench of another model, machine, version or setting.
          ServerError: A server that a scorer names does not answer.
        """
        self.config, self.path, self._prompts = config, config.out / "bench.json", prompts
        self.document = resumed(new_document(config, prompts, prompts_name, command), self.path)
        done = set(map(BenchForm.of, self.document["rows"]))
        self._todo = {form: spec for form, spec in find_forms(config).items() if form not in done}
        self._dumps: dict[int, TokenDump] = {}
        write_whole(self.path, json.dumps(self.document, indent=1) + "\n")

    def run(self) -> None:
        """Measures every missing row, and writes the document after each. A row that fails gets the reason."""
        for length in dict.fromkeys(form.length for form in self._todo):
            with self._failing([form for form in self._todo if form.length == length]):
                self._sample(length)
        todo = [form for form in self._todo if form.length in self._dumps]
        groups = dict.fromkeys((form.engine, form.dtype) for form in todo)
        with tqdm(total=len(todo), desc="scoring", unit="row") as bar:
            for group in groups:
                forms = [form for form in todo if (form.engine, form.dtype) == group]
                with self._failing(forms), self._server(forms) as address:
                    for form in forms:
                        bar.set_postfix_str(f"{form.column}, {form.length} tokens")
                        with self._failing([form]):
                            self.document["rows"].append(form._asdict() | self._measure(form, address))
                        bar.update(1)

    @contextlib.contextmanager
    def _failing(self, forms: Sequence[BenchForm]) -> Iterator[None]:
        """If the block fails, gives each form without a row a row with the reason. Then writes the rows."""
        rows = self.document["rows"]
        try:
            yield
        except Exception as error:  # of any kind: the other rows go on
            done = set(map(BenchForm.of, rows))
            rows += [form._asdict() | {"reason": reason_of(error)} for form in forms if form not in done]
        finally:
            write_whole(self.path, json.dumps(self.document, indent=1) + "\n")

    def _sample(self, length: int) -> None:
        """Reads the tokens of a length, or samples them if there is no file of them yet."""
        config, prompts = self.config, self._prompts
        path = config.out / f"tokens-{length}.parquet"
        if not path.exists():
            longest = max(int(mask.argmax()) or len(mask) for mask in prompts.response_mask)
            room = read_config(config.model).max_position_embeddings
            if longest + length > room:
                raise ValueError(f"{longest} + {length} tokens do not fit the {room} positions of the model")
            how = SampleConfig(max_response_tokens=length, seed=config.seed, batch_size=config.batch_size)
            write_dump(path, sample_responses(prompts, config.model, config.sample, how, full_length=True))
        self._dumps[length] = read_dump(path)
        ids = b"".join(row.tobytes() for row in self._dumps[length].token_ids)
        self.document["tokens"][str(length)] = f"sha256:{hashlib.sha256(ids).hexdigest()}"

    @contextlib.contextmanager
    def _server(self, forms: Sequence[BenchForm]) -> Iterator[str]:
        """Starts the server that any of the forms needs, and yields its URL, or "" if none needs one."""
        if not any(is_started(self._todo[form]) for form in forms):
            yield ""
            return
        config, dtype = self.config, forms[0].dtype
        longest = max(len(ids) for dump in self._dumps.values() for ids in dump.token_ids)
        python, log = str(environment_python("vllm")), config.out / f"vllm-{dtype}.log"
        serving = vllm.VllmConfig(
            str(config.model),
            python,
            dtype,  # type: ignore[arg-type]
            max_model_len=longest + 1,
            log_path=log,
            extra_args=config.server_arg,
        )
        with vllm.start(serving) as process:
            yield process.url

    def _measure(self, form: BenchForm, address: str) -> dict[str, Any]:
        """Scores the tokens with a form, writes the log-probabilities, and returns the numbers of its row."""
        config, dump, reference = self.config, self._dumps[form.length], self.config.reference
        reference = reference if ":" in reference else f"{reference}:{form.dtype}"
        spec = self._todo[form]
        if is_started(spec):
            spec = f"{spec.partition(':')[0]}:{address}"
        others = {reference: reference}  # the specs of the columns that the row is compared with
        if form.path == "decode":
            prefill = form._replace(path="prefill")  # the same engine computes the same tokens at once
            others[prefill.column] = f"{prefill.kind}:{spec.partition(':')[2]}"
        for column, other in others.items():
            if column not in (form.column, *dump.logprobs):
                dump = dump.with_column(column, *score_column(other, dump, config.model, batch_size=config.batch_size))
                self._dumps[form.length] = dump  # kept if the form itself fails
        numbers, dump = measure_form(
            form, dump, reference, lambda size: score_column(spec, dump, config.model, batch_size=size), config
        )
        self._dumps[form.length] = dump
        write_dump(config.out / f"tokens-{form.length}.parquet", dump)
        return numbers


def measure_form(
    form: BenchForm, dump: TokenDump, reference: str, score: ScoreRows, config: BenchConfig
) -> tuple[dict[str, Any], TokenDump]:
    """Measures one row of a bench. Returns its numbers, and the dump with the row's new columns.

    ``dump`` must have the column ``reference``, which the gap is measured against, unless this is the row's own. For
    the path "decode" it must have the column of the same engine's prefill, too. ``score`` is a function that scores the
    dump in batches of the given size. The new columns are the row's own and that of the floor "shape". Of several
    repeats the largest gap is recorded.

    Raises:
      ValueError: The engine has another dtype than ``form``, or other weights than the reference. Or no token has a
        finite number in both columns.
    """
    size, start = config.batch_size, time.perf_counter()
    vectors, source = score(size)
    seconds = time.perf_counter() - start
    if source.dtype and source.dtype != form.dtype:
        raise ValueError(f"the engine computes in {source.dtype}, expected {form.dtype}")
    dump, again = dump.with_column(form.column, vectors, source), form.column + SECOND_RUN
    if len({source.weights_hash, dump.sources[reference].weights_hash} - {""}) > 1:
        raise ValueError("the engine holds other weights than the reference")
    row: dict[str, Any] = {"program": source.engine, "form": source.form, "reference": reference}
    row |= _gap(dump, reference, form.column) | {"seconds": seconds}
    if form.path == "decode":
        row["floor_path"] = _gap(dump, form._replace(path="prefill").column, form.column)[GAP]
    if config.second_run:
        dump = dump.with_column(again, score(size // 2 or 2)[0], source)
        row["floor_shape"] = _gap(dump, form.column, again)[GAP]
    if config.repeat:
        repeated = (dump.with_column(again, score(size)[0], source) for _ in range(config.repeat))
        row["floor_repeat"] = max(_gap(each, form.column, again)[GAP] for each in repeated)
    return row, dump


def _gap(dump: TokenDump, trainer: str, rollout: str) -> dict[str, float]:
    metrics = TokenPair(dump, trainer, rollout).metrics
    if not metrics["token_count"]:
        count = int(metrics["nonfinite_count"])
        raise ValueError(f"none of the {count} tokens has a finite log-probability on both sides")
    return {name: metrics[name] for name in (*METRICS, *COUNTS)}


def reason_of(error: BaseException) -> str:
    """Returns the first line of an error's message, at most 300 characters, without this machine's paths and URLs.

    The type of the error is named, too, unless it is a ValueError, RuntimeError or OSError with a message.
    """
    first = next(filter(None, map(str.strip, str(error).splitlines())), "")
    named = first if first and isinstance(error, (ValueError, RuntimeError, OSError)) else repr(error)
    return without_places(named)[:300].rstrip(":")


def without_places(text: str) -> str:
    """Returns a text with "URL" in place of each URL, and with only the last part of each absolute path."""
    part = r"[^\s/'\":;,()]+"
    return re.sub(rf"(?<![\w.~/-])~?(?:/{part})*/({part})/?", r"\1", re.sub(r"https?://\S+", "URL", text))


HEAD = (
    *("engine", "path", "dtype", "length", "tokens", "mean gap", "floor: shape", "floor: repeat", "floor: path"),
    *("k3", "max gap", "beyond 0.5", "log_ppl_abs_diff", "seconds", "note"),
)


def bench_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Returns the table of a bench.json: the head, then the cells of each row, by length, dtype, engine and path."""
    order = sorted(document["rows"], key=lambda row: (row["length"], row["dtype"], row["engine"], row["path"]))
    return [list(HEAD), *(_cells(row, document["model"]["parameters"]) for row in order)]


def _cells(row: Mapping[str, Any], parameters: int) -> list[str]:
    form = [str(row[name]) for name in ("engine", "path", "dtype", "length")]
    form[2] += f" ({row['form']})" if row.get("form") else ""
    if "reason" in row:
        return [*form, *[""] * (len(HEAD) - len(form) - 1), row["reason"]]
    names = (GAP, "floor_shape", "floor_repeat", "floor_path", *METRICS[1:], "seconds")
    numbers = [f"{row[name]:.3g}" if name in row else "" for name in names]
    lost = f"{row['nonfinite_count']:.0f} tokens are not finite" if row["nonfinite_count"] else ""
    note = "the reference" if row["reference"] == BenchForm.of(row).column else lost or _standing(row, parameters)
    return [*form, f"{row['token_count']:.0f}", *numbers, note]


def _standing(row: Mapping[str, Any], parameters: int) -> str:
    """Returns where another engine's gap lies among the atlas's healthy gaps of models of this size, or ""."""
    if row["engine"].removesuffix(ON_TPU) not in _OTHERS:
        return ""
    dtype = f"{row['reference'].partition(':')[2]} / {row.get('form') or row['dtype']}"
    return normal_range(GAP, row[GAP], parameters=parameters / 1e9, tokens=row["length"], dtype=dtype)
