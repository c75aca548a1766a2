"""Hypothesis strategies for malformed inputs: sound files whose values, structure or bytes are damaged."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import io
import itertools
import json
import math
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from tensorboardX import SummaryWriter

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.lora import LoraConfig, init_adapters
from rljax.policy.model import init_params
from rljax.policy.peft import ADAPTER_CONFIG, WEIGHTS_NAME, save_adapters
from rljax.run.config import Config
from rljax.run.config_file import load_config

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "toy-base"
# Rows and columns of problems; the note, sequences and Prime-RL's export of token dumps.
ROWS, COLUMNS, NOTE, SEQUENCES, PRIME = json.loads(Path(__file__).with_name("sound.json").read_text()).values()
# LOOP is a link to itself, and DANGLING is a link to nothing.
Special = enum.Enum("Special", ["DIRECTORY", "LOOP", "DANGLING", "UNREADABLE"])
Content = bytes | Special
Files = dict[str, Content]
Words = Sequence[str]


class Case(NamedTuple):
    """One input: a key of ``run_input.COMMANDS``, its command line, and files by their paths in the case's folder."""

    command: str
    words: tuple[str, ...]
    files: Mapping[str, Content]


# --- damaged values, bytes and files ----------------------------------------------------------------------------------


def entries(name: str) -> list[str]:
    """Returns the entries of a file beside this one, which ¦ separates; ``\\n`` stands for the end of a line."""
    texts = " ".join(Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()).split("¦")
    return [text.strip().replace("\\n", "\n").replace("\\\\", "\\") for text in texts]


NUMBERS = (0, -1, 1, 2, 3, 64, 96, 1000, 3.5, -0.0, 1e308, 5e-324, math.nan, math.inf, -math.inf, -1e9)
NUMBERS += (2**20, 2**31, -(2**31) - 1, 2**63, 2**64 - 1, 10**30, 10**400)
LONG = ("9" * 5000, "a" * 10_000, "n" * 300, "é" * 40)
ODD = ("", " ", "\ud800", "\udcff", "a\x00b", "\x07", "\x1b[31mred", "\ufeff", "\u202e")
TEXTS = (*LONG, *ODD, *entries("words.txt"))
NESTED = functools.reduce(lambda value, _: [value], range(12), 1)
SHAPES = ([], {}, [[]], [None], {"a": 1}, {"": {}}, [1, "a"], NESTED, {"x" * 300: [0]})
listed = map(st.sampled_from, ([None, True, False], NUMBERS, TEXTS, SHAPES))
weird = st.one_of(*listed, st.text(max_size=8), st.integers()).map(copy.deepcopy)


def chooser(draw: st.DrawFn) -> Callable[..., Any]:
    return lambda *items: draw(st.sampled_from(items))


def paths_of(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of keys to each value in a document of lists and dictionaries."""
    yield above
    parts = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else [])
    )
    for key, value in list(parts)[:60]:
        yield from paths_of(value, (*above, key))


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """Draws the document with one to three values replaced, left out, renamed, added, wrapped or repeated."""
    root, choose = [copy.deepcopy(document)], chooser(draw)
    for _ in range(choose(1, 2, 3)):
        *way, last = choose(*((0, *path) for path in paths_of(root[0])))
        place = functools.reduce(lambda value, key: value[key], way, root)
        change = choose("replace", "replace", "replace", "drop", "rename", "add", "wrap", "repeat")
        if change == "replace":
            place[last] = draw(weird)
        elif change == "wrap":
            place[last] = [place[last]]
        elif change == "drop" and place is not root:
            del place[last]
        elif change == "rename" and isinstance(place, dict):
            place[choose(*TEXTS, str(last).upper(), f"{last}s")] = place.pop(last)
        elif change == "add" and isinstance(place[last], dict):
            place[last][choose(*TEXTS)] = draw(weird)
        elif change == "repeat" and isinstance(place[last], list):
            place[last] = place[last] * 2
    return root[0]


JUNK = (b"", b"\n", b"\x00", b"\xff\xfe", b"\x80\x04", b"PK\x03\x04", b"PAR1")
JUNK += (b"[" * 100_000, b"{" * 5000, b'{"a":' * 3000)
SWAPS = ((b"\n", b"\r\n"), (b"\n", b"\r"), (b'"', b"'"), (b"}", b",}"), (b":", b"\t:\t"))
ENDS = (b"\n{}\n[]\nnull\n", b'{"x": 1, "x": 2}\n')


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> Content:
    """Draws damaged bytes: cut, changed, in another form, or replaced by something else."""
    choose, place, other = chooser(draw), draw(st.integers(0, len(data))), draw(st.binary(min_size=1, max_size=8))
    how = choose("cut", "cut", "bytes", "bytes", "insert", "form", "junk", "special")
    if how == "form":
        forms = [data.replace(*swap) for swap in SWAPS] + [data + end for end in ENDS]
        utf16 = data.decode("utf-8", "replace").encode("utf-16")
        return choose(*forms, data * 2, data.swapcase(), b"\xef\xbb\xbf" + data, utf16)
    if how in ("junk", "special"):
        return choose(*(JUNK if how == "junk" else Special))
    kept = {"cut": len(data), "bytes": place + len(other), "insert": place}[how]
    return data[:place] + other * (how != "cut") + data[kept:]


def as_json(document: Any) -> bytes:
    """Writes JSON; NaN and lone surrogates stay as they are."""
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def as_lines(rows: Any) -> bytes:
    """Writes JSONL; a value that is not a list becomes a single line."""
    return b"".join(as_json(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def as_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def as_yaml(document: Any) -> bytes:
    return as_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=False))


def objects(rows: Any) -> list[dict[Any, Any]]:
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def as_csv(rows: Any) -> bytes:
    found = objects(rows)
    names = list(dict.fromkeys(str(key) for row in found for key in row))
    lines = [names, *([str(row.get(name, "")) for name in names] for row in found)]
    return as_text("\n".join(",".join(line) for line in lines))


# The types of token dumps are the narrow ones.
NARROW = {pa.list_(pa.int64()): pa.list_(pa.int32()), pa.list_(pa.float64()): pa.list_(pa.float32())}


def as_parquet(table: Any) -> bytes:
    """Writes columns and the note of a token dump; a column of mixed types becomes text."""
    if not isinstance(table, dict) or not isinstance(table.get("columns"), dict):
        return ascii(table).encode()
    columns = {}
    for name, values in table["columns"].items():
        values = values if isinstance(values, list | pa.Array) else [values] * 2
        texts = [ascii(value) for value in values]
        try:
            column = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeError):
            column = pa.array(texts)
        if "struct<>" in str(column.type):  # Parquet has no place for it.
            column = pa.array(texts)
        column = column.cast(NARROW.get(column.type, column.type), safe=False)
        columns[name.encode("utf-8", "replace").decode()] = column
    rows, out, note = min(map(len, columns.values()), default=0), io.BytesIO(), table.get("note")
    made = pa.table({name: column[:rows] for name, column in columns.items()})
    metadata = {"rljax.dump": note if isinstance(note, bytes) else as_json(note)}
    pq.write_table(made.replace_schema_metadata(metadata), out)
    return out.getvalue()


def as_safetensors(data: bytes, parts: Any) -> bytes:
    """Writes a safetensors file of data and a header, whose length is ``size`` if this is a valid number."""
    header, size = (parts.get(name) if isinstance(parts, dict) else parts for name in ("header", "size"))
    text = as_json(header)
    return struct.pack("<Q", size if isinstance(size, int) and 0 <= size < 2**64 else len(text)) + text + data


class Document(NamedTuple):
    """The content of a file as a value, with the function that writes it and the strategy that damages the value."""

    value: Any
    write: Callable[[Any], bytes] = as_json
    mutated: Callable[[Any], st.SearchStrategy[Any]] = mutated


Parts = Mapping[str, Content | Document]
Cases = Iterator[st.SearchStrategy[Case]]


def written(files: Parts) -> Files:
    return {path: each.write(each.value) if isinstance(each, Document) else each for path, each in files.items()}


def inside(folder: str, files: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def without(files: Files, path: str) -> Files:
    """Returns the files without one, or without all below a folder."""
    return {name: content for name, content in files.items() if name != path and not name.startswith(f"{path}/")}


@st.composite
def spoilt(
    draw: st.DrawFn, command: str, words: Words, files: Parts, spoil: Words, options: Sequence[Words] = ((),)
) -> Case:
    """Draws the case with one of the options, and one or two of the files ``spoil`` damaged, missing or replaced.

    A name of ``spoil`` that is not among the files is a folder of them, or a file that should not exist.
    """
    choose, given = chooser(draw), written(files)
    chosen = draw(st.lists(st.sampled_from(spoil), min_size=1, max_size=2, unique=True))
    for path in sorted(chosen, reverse=True):  # files before their folder
        how, document = choose(*["values"] * 12, *["bytes"] * 4, "gone", "special"), files.get(path)
        if how == "special" or document is None:
            given = without(given, path) | {path: choose(*Special, b"")}
        elif how == "gone":
            given = without(given, path)
        elif how == "bytes" or not isinstance(document, Document):
            given[path] = draw(damaged(given[path]))
        else:
            data = document.write(draw(document.mutated(document.value)))
            given[path] = draw(damaged(data)) if choose(True, False, False, False) else data
    return Case(command, (*words, *choose(*options)), given)


# --- configurations and command lines ---------------------------------------------------------------------------------

WORDS = (str(ROOT / "configs" / "quickstart.yaml"), "--model.path", str(MODEL), "--rollout.dtype", "bfloat16")
SETTINGS = json.loads(json.dumps(dataclasses.asdict(load_config(Config, list(WORDS), prog="fuzz", description=""))))
ALIASES = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
LAUGHS = "\n".join([f"l0: &l0 [{', '.join('x' * 10)}]", *ALIASES])
SNIPPETS = (*entries("snippets.txt"), LAUGHS, "\trun: {}", "run: {steps: " + "9" * 5000 + "}")
SNIPPETS += ("[" * 3000, "run: " + "[" * 3000, "run: " + "{a: " * 500, "- " * 3000)
KEYS = [".".join(map(str, path)) for path in paths_of(SETTINGS) if path]


@st.composite
def keyed(draw: st.DrawFn, settings: Any) -> Any:
    """Draws the settings with a strange value for any key, perhaps damaged further."""
    *way, last = draw(st.sampled_from([path for path in paths_of(settings) if path]))
    settings = copy.deepcopy(settings)
    functools.reduce(lambda value, key: value[key], way, settings)[last] = draw(weird)
    return draw(st.one_of(st.just(settings), mutated(settings)))


def yaml_cases() -> Cases:
    kept = as_yaml({key: value for key, value in SETTINGS.items() if key != "run"}).decode()
    texts = st.sampled_from([text for each in SNIPPETS for text in (each, kept + each, f"{each}\n{kept}")])
    for file in (*[Document(SETTINGS, as_yaml, keyed)] * 3, Document(kept, as_text, lambda _: texts)):
        files = {"config.yaml": file, "base.yaml": as_yaml({"base": "config.yaml"})}
        yield spoilt("dry run", ("config.yaml", "--dry-run"), files, ["config.yaml"])


def argument_cases() -> Cases:
    """Yields a sound configuration file with damaged command lines, up to ``--dry-run``."""
    spellings = [key[:-1] for key in KEYS] + [f"{key}s" for key in KEYS] + [key.upper() for key in KEYS]
    spellings += [*KEYS * 4, *(key.replace("_", "-") for key in KEYS), *(key.split(".")[0] for key in KEYS)]
    key, text = st.sampled_from(spellings), st.sampled_from(TEXTS)
    joined = st.builds(lambda key, value: [f"--{key}={value}"], key, text)
    apart = st.builds(lambda key, values: [f"--{key}", *values], key, st.lists(text, max_size=3))
    words = st.lists(st.one_of(joined, apart, apart, apart), min_size=1, max_size=3)
    files = st.sampled_from(["nowhere.yaml", "", ".", "config.yaml/x", "n" * 300, "a\udcffb", *["config.yaml"] * 30])
    extra = st.sampled_from([(), *[()] * 500, *((each,) for each in TEXTS)])
    parts, sound = st.tuples(files, extra, words), {"config.yaml": as_yaml(SETTINGS)}
    yield parts.map(lambda each: Case("dry run", (each[0], *each[1], *itertools.chain(*each[2]), "--dry-run"), sound))


# --- problems ---------------------------------------------------------------------------------------------------------

TURN = [{"role": "user", "content": "1+1="}]
ODD_COLUMNS = [
    *([b"\xff", b"1"], pa.array([0, 2**62], pa.timestamp("us")), pa.array(["1+1=", "1+1="]).dictionary_encode()),
    *([TURN] * 2, [TURN, None], [[], []], [[None], None], pa.array(["é" * 5000, "x"], pa.large_string())),
]

# This training is refused in one line only after all its inputs were read, because its run directory holds a run.
TRAIN = ("config.yaml", "--run.dir", "held", "--run.resume", "never", "--data.task", "file", "--data.batch-size", "1")
PROBLEMS = (*TRAIN, "--eval.every", "0", "--data.path", "p.jsonl")
HELD_CONFIG = {"model": {"path": str(MODEL)}, "data": {"max_prompt_tokens": 64}}
HELD_CONFIG |= {"rollout": {"max_response_tokens": 16, "group_size": 2}}
HELD: Files = {"config.yaml": as_yaml(HELD_CONFIG), "held/metrics.jsonl": b'{"step": 1}\n'}


def problem_cases() -> Cases:
    """Yields damaged files of problems, for training up to the run directory and for ``rljax prepare``."""
    rows, table = Document(ROWS, as_lines), Document({"columns": COLUMNS}, as_parquet)
    model = ("--model", str(MODEL))
    prepared = [(), ("--form", "gsm8k"), ("--form", "aime-2024"), ("--hold-out", "1")]
    prepared += [model, (*model, "--max-prompt-tokens", "6"), (*model, "--hold-out", "1")]
    odd = [Document({"columns": COLUMNS | {name: column}}, as_parquet) for name in COLUMNS for column in ODD_COLUMNS]
    named = ((rows, "p.jsonl"), (table, "p.parquet"), (rows, "p.json"), (table, "p"), (rows, "p.parquet"))
    for file, name in (*named * 5, *((each, "p.parquet") for each in odd)):
        evaluated = [("--eval.datasets", name), ("--eval.datasets", f"a={name}", f"a={name}")]
        options = [(), (), *evaluated, ("--data.chat-template", "true")]
        yield spoilt("train", (*TRAIN, "--data.path", name), {**HELD, name: file}, [name], options)
        yield spoilt("prepare", (name, "out/made.parquet", "--check-answers", "0"), {name: file}, [name], prepared)


# --- models -----------------------------------------------------------------------------------------------------------

# A tiny policy of each family, and adapters.
SHAPE: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2}
SHAPE |= {"num_kv_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
POLICIES = {
    "qwen3": PolicyConfig(**SHAPE),
    "qwen2": PolicyConfig(**SHAPE, family="qwen2"),
    "qwen3_moe": PolicyConfig(**SHAPE, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=8),
}
LORA = LoraConfig(rank=2, targets=("q_proj", "o_proj"))


@functools.cache
def sound_model(family: str) -> tuple[dict[str, Any], bytes]:
    config = POLICIES[family]
    with tempfile.TemporaryDirectory() as made:
        save_params(made, init_params(config, 0), config)
        return read_pair(Path(made), "config.json", "model.safetensors")


@functools.cache
def sound_adapters() -> tuple[dict[str, Any], bytes]:
    config = POLICIES["qwen3"]
    with tempfile.TemporaryDirectory() as made:
        save_adapters(made, init_adapters(config, LORA, 0), config, LORA, "model")
        return read_pair(Path(made), ADAPTER_CONFIG, WEIGHTS_NAME)


def read_pair(folder: Path, config: str, weights: str) -> tuple[dict[str, Any], bytes]:
    return json.loads((folder / config).read_text()), (folder / weights).read_bytes()


CONFIG, TOKENIZER, TOKENIZER_CONFIG = (
    json.loads((MODEL / f"{name}.json").read_text()) for name in ("config", "tokenizer", "tokenizer_config")
)
TOKENIZER_CONFIG |= {
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "added_tokens_decoder": {"15": {"content": "_", "special": True, "lstrip": False}},
}
TEMPLATE = Document("{{ messages[0].content }}", as_text, lambda _: st.sampled_from(["", *entries("templates.txt")]))


def model_cases() -> Cases:
    shape, tokenizer = Document(CONFIG), {"tokenizer.json": Document(TOKENIZER)}
    special = {"special_tokens_map.json": Document({"eos_token": {"content": "$"}})}
    plain = {"config.json": shape, **tokenizer, "tokenizer_config.json": Document(TOKENIZER_CONFIG)}
    mapped = {"config.json": shape, **tokenizer, **special, "tokenizer_config.json": Document({"eos_token": "$"})}
    for files in (plain, plain | {"chat_template.jinja": TEMPLATE}, mapped):
        given = {**HELD, "p.jsonl": as_lines([{"prompt": TURN, "answer": 2}]), **inside("model", files)}
        yield spoilt("train", (*PROBLEMS, "--model.path", "model"), given, [*inside("model", files), "model"])


def safetensors(file: bytes) -> Document:
    (size,) = struct.unpack("<Q", file[:8])
    parts = {"header": json.loads(file[8 : 8 + size]), "size": None}
    return Document(parts, functools.partial(as_safetensors, file[8 + size :]))


def weight_cases() -> Cases:
    """Yields model directories of each family whose weights are damaged or have another shape."""
    for config, file in map(sound_model, POLICIES):
        weights, name = safetensors(file), "model/model.safetensors.index.json"
        files = inside("model", {"config.json": Document(config), "model.safetensors": weights})
        yield spoilt("load", ("model",), files, [*files])
        for names in (weights.value["header"], "a"):
            index = Document({"weight_map": dict.fromkeys(names, "model.safetensors")})
            yield spoilt("load", ("model",), {**files, name: index}, [name])
        for _, other in map(sound_model, POLICIES):
            yield st.just(Case("load", ("model",), written({**files, "model/model.safetensors": other})))


def adapter_cases() -> Cases:
    config, file = sound_adapters()
    files = inside("adapters", {ADAPTER_CONFIG: Document(config), WEIGHTS_NAME: safetensors(file)})
    yield spoilt("adapters", ("adapters",), files, [*files])


# --- token dumps, logs and records ------------------------------------------------------------------------------------

DUMP = {
    "columns": {
        **{"sequence_id": ["a", "b"], "token_ids": [[1, 2], [3]], "response_mask": [[False, True], [True]]},
        **{"logprobs/trainer": [[math.nan, -1.0], [-2.0]], "logprobs/rollout": [[math.nan, -1.5], [-2.0]]},
    },
    "note": NOTE,
}
SCORERS = ("dump:tokens.jsonl#x", "dump:x", "jax:int8", "", "vllm:x", "dump:nowhere#x", "hf:")
CHOSEN = (("--columns", "trainer"), ("--columns", "trainer", "x"), ("--trainer", "rollout"), ("--rollout", "x"))


def token_cases() -> Cases:
    """Yields damaged dumps, JSONL and exports of tokens for ``rljax compare`` and ``rljax view``."""
    options = [*[()] * 12, *CHOSEN, *(("--scorer", spec) for spec in SCORERS)]
    dump, rows, prime = Document(DUMP, as_parquet), Document(SEQUENCES, as_lines), Document(PRIME, as_lines)
    files = (*[("t.parquet", dump)] * 3, ("t.jsonl", rows), ("t.jsonl", prime), ("export/rank_0.jsonl", prime))
    for name, file in files:
        yield spoilt("compare", (name.split("/")[0], "--out", "out"), {name: file}, [name], options)
        yield spoilt("view", (name.split("/")[0], "-o", "out/page.html"), {name: file}, [name], [(), *CHOSEN[2:]])
        yield spoilt("diagnose", (name.split("/")[0],), {name: file}, [name], [(), *CHOSEN[2:]])


LENGTHS = [10.0] * 12 + [40.0] * 8
LOG = [{"step": i, "response_length/mean": x, "response_length/clip_ratio": 0.0} for i, x in enumerate(LENGTHS, 1)]
RULES = ("--column", "--truncated-column", "--ratio", "--window", "--warmup", "--multiplier")
VALUES = ("step", "x", "nan", "0", "-1", "inf", "1e400", "9" * 30, "", "2")


@functools.cache
def events() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for step, length in enumerate(LENGTHS, 1):
                writer.add_scalar("response_length/mean", length, step)
        return next(Path(folder).iterdir()).read_bytes()


def log_cases() -> Cases:
    rows, file = Document(LOG, as_lines), "events.out.tfevents.1"
    names = {"log.jsonl": rows, "log.csv": Document(LOG, as_csv), "run/metrics.jsonl": rows}
    options = [*[()] * 100, *[("--sweep",)] * 50, *((f"{rule}={value}",) for rule in RULES for value in VALUES)]
    for name, content in (names | {file: events(), f"run/tb/{file}": events()}).items():
        files = {name: content, "out": Special.DIRECTORY}
        yield spoilt("replay", (name.split("/")[0], "--picture", "out/surge.png"), files, [name], options)


# The course of a run in the names of verl, with and without a mismatch.
COURSE = [
    {"step": i, "critic/score/mean": 0.1 + 0.02 * i, "actor/entropy": 0.5 - 0.01 * i, "actor/grad_norm": 1 + 0.01 * i}
    | {"response_length/mean": length, "response_length/clip_ratio": 0.0, "actor/lr": 1e-6}
    for i, length in enumerate(LENGTHS, 1)
]
GAPS = {"rollout_corr/k3_kl": 1e-3, "rollout_corr/kl": 1e-3, "training/rollout_probs_diff_mean": 4e-3}
MEASURED = [row | GAPS for row in COURSE]
ABSENT = (None, math.nan, "", "x", "nan", [], {}, [1.0], {"a": 1.0}, True, math.inf)


def as_long(rows: Any) -> bytes:
    """Writes a table with a row for each number, as MLflow exports it."""
    return as_csv([{"key": key, "value": row[key], "step": row.get("step")} for row in objects(rows) for key in row])


def as_charts(rows: Any) -> bytes:
    """Writes W&B's export of the charts of two runs."""
    named = [(row.get("step"), {f"{run} - {key}": row[key] for run in "ab" for key in row}) for row in objects(rows)]
    return as_csv([{"Step": step} | cells for step, cells in named])


def as_console(rows: Any) -> bytes:
    """Writes the lines that verl prints."""
    return as_text("".join(f"(TaskRunner pid=1) {' - '.join(f'{k}:{row[k]}' for k in row)}\n" for row in objects(rows)))


def course_cases() -> Cases:
    logs = {"log.jsonl": as_lines, "log.csv": as_csv, "long.csv": as_long, "charts.csv": as_charts}
    logs |= {"out.log": as_console, "trainer_state.json": lambda rows: as_json({"log_history": rows})}
    for name, write in logs.items():
        options = [(), (), ("--run", "a"), ("--run", "x")] if name == "charts.csv" else [()]
        yield spoilt("diagnose", (name,), {name: Document(MEASURED, write)}, [name], options)


@st.composite
def silent_cases(draw: st.DrawFn) -> Case:
    """Draws a log without a number of the mismatch, or tokens without a number of one side. None may be healthy."""
    choose = chooser(draw)
    if choose(True, False):
        names = draw(st.lists(st.sampled_from([*GAPS]), unique=True))
        rows = [row | {name: draw(st.sampled_from(ABSENT)) for name in names} for row in COURSE[: choose(1, 7, 20)]]
        name, write = choose(("log.jsonl", as_lines), ("log.csv", as_csv), ("long.csv", as_long))
        return Case("silent", (name,), {name: write(rows)})
    nothing = draw(st.sampled_from([None, math.nan, math.inf, -math.inf]))
    rows = []
    for _ in range(choose(1, 2, 30)):
        count, side = choose(1, 2, 40), choose("trainer", "rollout", "no")
        known = {name: [nothing if name == side else -1.0] * count for name in ("trainer", "rollout")}
        ids = {"prompt_ids": [5], "response_ids": [*range(6, 6 + count)]}
        rows.append(ids | {"logprobs": known, "response_mask": [side != "no"] * count})
    return Case("silent", ("t.jsonl",), {"t.jsonl": as_lines(rows)})


RECORD = [
    {
        **{"step": step, "reward/mean": 0.1 * step, "response_length/mean": length, "policy/entropy": 0.25},
        **{"schedule/learning_rate": 1e-4, "optimizer/grad_norm": 0.5, "mismatch/log_ppl_abs_diff": 1e-3},
        **{"schedule/surge_step": 14 if step >= 14 else None, "schedule/decay_period": 25 if step >= 14 else None},
        **({"eval/toy/accuracy": 0.5} if step % 5 == 0 else {}),
    }
    for step, length in enumerate(LENGTHS, 1)
]


def record_cases() -> Cases:
    dump = {"run/rollouts/step_000001.parquet": as_parquet(DUMP)}
    for count in (1, 3, 20):
        files = {"run/metrics.jsonl": Document(RECORD[:count], as_lines)}
        yield spoilt("plot", ("run",), files, [*files], [(), ("--metrics", "response_length/mean,optimizer/grad_norm")])
        config = {"run/config.yaml": Document(HELD_CONFIG, as_yaml)}
        yield spoilt("view", ("run", "-o", "out/page.html"), {**files, **dump, **config}, [*files, *dump, *config])


def resume_cases() -> Cases:
    """Yields run directories with a damaged record or configuration, for training that would resume there."""
    checkpoints = [f"held/checkpoints/{name}" for name in ("5", "x", "5.tmp", "05", "-1", "²")]
    resumes = ("auto", "auto", "never", "held", "nowhere", "", "a\udcffb", "held/metrics.jsonl")
    # The engine has no server, so a run that may resume ends there in one line.
    engine = ("--rollout.engine", "vllm", "--rollout.urls", "http://127.0.0.1:9", "--rollout.server-wait-s", "0.01")
    for count in (1, 3, 20):
        held = {"config.yaml": Document(HELD_CONFIG, as_yaml), "metrics.jsonl": Document(RECORD[:count], as_lines)}
        files = {**HELD, "p.jsonl": as_lines(ROWS), **inside("held", held)}
        spoil = [*[*inside("held", held)] * 3, *checkpoints]
        yield spoilt("train", (*PROBLEMS, *engine), files, spoil, [("--run.resume", each) for each in resumes])


MAKERS = {
    **{"yaml": (5, yaml_cases), "arguments": (4, argument_cases), "problems": (4, problem_cases)},
    **{"model": (4, model_cases), "weights": (4, weight_cases), "adapters": (2, adapter_cases)},
    **{"tokens": (2, token_cases), "log": (2, log_cases), "record": (1, record_cases)},
    **{"course": (2, course_cases), "silent": (2, lambda: iter([silent_cases()]))},
    **{"resume": (2, resume_cases)},
}


def deferred(make: Callable[[], Cases]) -> st.SearchStrategy[Case]:
    """Returns a strategy whose sound inputs are made when the first example is drawn."""
    return st.deferred(lambda: st.one_of(*make()))


# The share of the examples of each kind, and its strategy.
KINDS = {kind: (share, deferred(make)) for kind, (share, make) in MAKERS.items()}
