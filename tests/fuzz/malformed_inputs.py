"""Hypothesis strategies for malformed inputs: sound files with their values, structure or bytes damaged.

Each kind of ``KINDS`` is a strategy of ``Case``: the words of one command and the files that it is given. Used by
``tests/fuzz/fuzz_inputs.py`` and ``tests/fuzz/test_fuzz_inputs.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import io
import json
import math
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from sound_models import POLICIES, sound_adapters, sound_model
from sound_run import RUN, STEPS, sound_run

from rljax.policy.peft import CONFIG_NAME, WEIGHTS_NAME
from rljax.run.config import Config

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "toy-base"


class Special(enum.Enum):
    """What stands at a path in place of a file with contents."""

    DIRECTORY = "an empty directory"
    LOOP = "a symbolic link to itself"
    DANGLING = "a symbolic link to nothing"
    UNREADABLE = "a file without permissions"


Content = bytes | Special


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
      command: a key of ``fuzz_inputs.COMMANDS``.
      words: its command line; paths are relative to the folder that holds ``files``.
      files: path -> content.
    """

    command: str
    words: tuple[str, ...]
    files: Mapping[str, Content]


# --- damaged values ---------------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def lines_of(name: str) -> list[str]:
    """The lines of a file beside this one; ``\\n`` and ``\\t`` in a line stand for the characters."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [line.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\") for line in lines]


NUMBERS = (*(0, -1, 1, 2, 3.5, -0.0, 1e308, 5e-324, math.nan, math.inf), *(2**31, -(2**31) - 1, 2**63, 10**30))
LONG = ("9" * 5000, "a" * 10_000, "n" * 300, "é" * 40)
ODD = ("", " ", "\ud800", "\udcff", "a\x00b", "\x07", "\x1b[31mred", "\ufeff", "\u202e")
TEXTS = (*LONG, *ODD, *lines_of("words.txt"))
weird = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([*NUMBERS, 10**400]),
    st.sampled_from([-math.inf, -1e9]),
    st.sampled_from(TEXTS),
    st.sampled_from([[], {}, [[]], [None], {"a": 1}, {"": {}}, [1, "a"], nested(12), {"x" * 300: [0]}]),
    st.text(max_size=8),
    st.integers(),
)


def paths_of(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a document of lists and dictionaries."""
    yield above
    if isinstance(document, dict | list):
        for key, value in list(document.items() if isinstance(document, dict) else enumerate(document))[:60]:
            yield from paths_of(value, (*above, key))


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three values replaced, left out, renamed, added or wrapped."""
    root = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([(0, *path) for path in paths_of(root[0])]))
        place = functools.reduce(lambda value, key: value[key], way, root)
        change = draw(st.sampled_from(["replace", "replace", "replace", "drop", "rename", "add", "wrap", "repeat"]))
        if change == "replace":
            place[last] = copy.deepcopy(draw(weird))
        elif change == "wrap":
            place[last] = [place[last]]
        elif change == "drop" and place is not root:
            del place[last]
        elif change == "rename" and isinstance(place, dict):
            place[draw(st.sampled_from([*TEXTS, str(last).upper(), f"{last}s"]))] = place.pop(last)
        elif change == "add" and isinstance(place[last], dict):
            place[last][draw(st.sampled_from(TEXTS))] = copy.deepcopy(draw(weird))
        elif change == "repeat" and isinstance(place[last], list):
            place[last] = place[last] * 2
    return root[0]


# --- damaged bytes ----------------------------------------------------------------------------------------------------

MANY = (b"[" * 100_000, b"{" * 5000, b'{"a":' * 3000)
JUNK = (b"", b"\n", b"\x00", b"\xff\xfe", b"\x80\x04", b"PK\x03\x04", b"PAR1", *MANY)
FORMS: tuple[Callable[[bytes], bytes], ...] = (
    lambda data: b"\xef\xbb\xbf" + data,
    lambda data: data.replace(b"\n", b"\r\n"),
    lambda data: data.replace(b"\n", b"\r"),
    lambda data: data.decode("utf-8", "replace").encode("utf-16"),
    lambda data: data + data,
    lambda data: data.replace(b'"', b"'"),
    lambda data: data.replace(b"}", b",}"),
    lambda data: data.replace(b":", b"\t:\t"),
    lambda data: data + b"\n{}\n[]\nnull\n",
    lambda data: data + b'{"x": 1, "x": 2}\n',
    lambda data: data.swapcase(),
)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> Content:
    """The bytes cut, changed, in another form, or something else in their place."""
    how = draw(st.sampled_from(["cut", "cut", "bytes", "bytes", "insert", "form", "junk", "special"]))
    place = draw(st.integers(0, len(data)))
    if how == "cut":
        return data[:place]
    if how == "bytes":
        other = draw(st.binary(min_size=1, max_size=8))
        return data[:place] + other + data[place + len(other) :]
    if how == "insert":
        return data[:place] + draw(st.binary(min_size=1, max_size=8)) + data[place:]
    if how == "form":
        return draw(st.sampled_from(FORMS))(data)
    return draw(st.sampled_from(JUNK if how == "junk" else list(Special)))


@st.composite
def maybe_damaged(draw: st.DrawFn, data: bytes, share: int = 4) -> Content:
    """The bytes themselves, or one in ``share`` damaged."""
    return draw(damaged(data)) if draw(st.integers(1, share)) == 1 else data


def as_json(document: Any) -> bytes:
    """JSON, NaN and lone surrogates written as they are."""
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def as_lines(rows: Any) -> bytes:
    """JSONL; of something that is no list a single line."""
    return b"".join(as_json(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


# --- configurations ---------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text()) | {
    "model": {"path": str(MODEL)},
    "schedule": {"kind": "length_triggered", "surge": {"warmup": 15, "ratio": 3.0}},
    "rollout": {"engine": "jax", "dtype": "bfloat16", "group_size": 8, "max_response_tokens": 36, "urls": []},
    "mesh": {"fsdp": 1, "tp": 1},
    "loss": {"kind": "ppo_clip", "mini_batches": 1, "epochs": 1, "kl": "none"},
    "correction": {"preset": "none"},
}
LAUGHS = "\n".join(
    ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
)
DEEP = ("[" * 3000, "run: " + "[" * 3000, "run: " + "{a: " * 500, "- " * 3000)
SNIPPETS = (*lines_of("snippets.txt"), *DEEP, LAUGHS, "\trun: {}", "run: {steps: " + "9" * 5000 + "}")


def as_yaml(document: Any) -> bytes:
    """YAML as PyYAML writes it."""
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=False).encode("utf-8", "surrogatepass")


def dotted(section: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a configuration."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from dotted(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


KEYS = tuple(dotted(Config()))


@st.composite
def yaml_cases(draw: st.DrawFn) -> Case:
    """A damaged configuration file, up to ``--dry-run``."""
    how = draw(st.sampled_from(["values", "values", "values", "snippet", "bytes"]))
    content: Content = as_yaml(SETTINGS)
    if how == "values":
        key = draw(st.sampled_from(KEYS))
        *sections, last = key.split(".")
        settings = copy.deepcopy(SETTINGS)
        functools.reduce(lambda value, name: value.setdefault(name, {}), sections, settings)[last] = copy.deepcopy(
            draw(weird)
        )
        content = as_yaml(draw(mutated(settings)) if draw(st.booleans()) else settings)
        content = draw(maybe_damaged(content, 8))
    elif how == "snippet":
        snippet = draw(st.sampled_from(SNIPPETS)).encode("utf-8", "surrogatepass")
        kept = as_yaml({key: value for key, value in SETTINGS.items() if key != "run"})
        content = draw(st.sampled_from([snippet, kept + snippet, snippet + b"\n" + kept]))
    else:
        content = draw(damaged(content))
    return Case(
        "dry run", ("config.yaml", "--dry-run"), {"config.yaml": content, "base.yaml": as_yaml({"base": "config.yaml"})}
    )


@st.composite
def argument_cases(draw: st.DrawFn) -> Case:
    """A sound configuration file with a damaged command line, up to ``--dry-run``."""
    words: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(KEYS))
        spelt = draw(
            st.sampled_from([key, key, key, key.replace("_", "-"), key[:-1], key + "s", key.upper(), key.split(".")[0]])
        )
        value = draw(st.lists(st.sampled_from(TEXTS), max_size=3))
        if value and draw(st.booleans()):
            words += [f"--{spelt}={value[0]}", *value[1:]]
        else:
            words += [f"--{spelt}", *value]
    if draw(st.integers(1, 20)) == 1:
        words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(TEXTS)))
    file = draw(
        st.sampled_from(["config.yaml"] * 30 + ["nowhere.yaml", "", ".", "config.yaml/x", "n" * 300, "a\udcffb"])
    )
    return Case("dry run", (file, *words, "--dry-run"), {"config.yaml": as_yaml(SETTINGS)})


# --- problems ---------------------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": "2+3=", "answer": "5", "data_source": "toy", "extra_info": {"index": 0}},
    {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2", "style": "rule"}},
    {"prompt": "7+7=", "answer": 14},
]


@functools.cache
def columns() -> dict[str, list[pa.Array]]:
    """Columns of two rows that a Parquet file of problems may have: a sound one, then damaged ones."""
    chat = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    turn = [{"role": "user", "content": "1+1="}]
    plain = ([None, None], [1, 2], [True, False], [2.0, math.nan], ["", " "], [b"\xff", b"1"], [["a"], ["b"]])
    inner = ([[{"role": "user"}]] * 2, turn * 2, [{"ground_truth": None}, None], [{"ground_truth": [1]}] * 2)
    chats = ([turn] * 2, [[], []], [[None], None], [turn, [{"role": "user", "content": None}]])
    odd = [
        *map(pa.array, (*plain, *inner)),
        *(pa.array(values, chat) for values in chats),
        pa.array([0, 2**62], pa.timestamp("us")),
        pa.array([2**50, 1], pa.timestamp("s")),
        pa.array(["1+1=", "1+1="]).dictionary_encode(),
        pa.array(["é" * 5000, "x"], pa.large_string()),
    ]
    sound = {
        "prompt": ["1+1=", "2+2="],
        "answer": ["2", "4"],
        "reward_model": [{"ground_truth": "2"}, {"ground_truth": "4"}],
        "data_source": ["a", "b"],
        "extra_info": [{"i": 0}, {"i": 1}],
    }
    return {name: [pa.array(values), *odd] for name, values in sound.items()}


def as_parquet(table: pa.Table) -> bytes:
    """A Parquet file."""
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


@st.composite
def problem_files(draw: st.DrawFn) -> tuple[str, Content]:
    """(ending, content) of a file of problems."""
    if draw(st.booleans()):
        rows = draw(mutated(ROWS)) if draw(st.integers(1, 4)) > 1 else ROWS
        ending, content = ".jsonl", draw(maybe_damaged(as_lines(rows), 3))
    else:
        names = (
            draw(st.lists(st.sampled_from(sorted(columns())), unique=True, min_size=1))
            if draw(st.booleans())
            else columns()
        )
        chosen = {name: draw(st.sampled_from(columns()[name])) for name in names}
        table = pa.table(chosen).slice(0, draw(st.sampled_from([2, 2, 2, 1, 0])))
        ending, content = ".parquet", draw(maybe_damaged(as_parquet(table), 2))
    return draw(st.sampled_from([ending] * 12 + [".jsonl", ".parquet", ".json", ""])), content


@st.composite
def problem_cases(draw: st.DrawFn) -> Case:
    """A damaged file of problems, for training up to the run directory or for ``rljax prepare``."""
    ending, content = draw(problem_files())
    name = f"problems{ending}"
    model = draw(st.sampled_from([(), ("--model", str(MODEL)), ("--model", str(MODEL), "--max-prompt-tokens", "6")]))
    held = draw(st.sampled_from([(), (), ("--hold-out", "1")]))
    if draw(st.booleans()):
        return Case("prepare", (name, "out/made.parquet", *model, *held), {name: content})
    evaluated = draw(
        st.sampled_from([(), (), ("--eval.datasets", name), ("--eval.datasets", f"a={name}", f"a={name}")])
    )
    template = draw(st.sampled_from([(), (), ("--data.chat-template", "true")]))
    words = ("--data.task", "file", "--data.path", name, "--data.batch-size", "1", *evaluated, *template)
    return Case("train", (*TRAIN, *words), {name: content, **HELD})


FILE = ("--data.task", "file", "--data.path", "p.jsonl", "--data.batch-size", "1", "--eval.every", "0")
# Training that is refused, in one line, only after all its inputs were read: its run directory holds a run already.
TRAIN = ("config.yaml", "--run.dir", "held", "--run.resume", "never")
HELD: dict[str, Content] = {
    "config.yaml": as_yaml(
        {
            "model": {"path": str(MODEL)},
            "rollout": {"max_response_tokens": 16, "group_size": 2},
            "data": {"max_prompt_tokens": 64},
        }
    ),
    "held/metrics.jsonl": b'{"step": 1}\n',
}


# --- models -----------------------------------------------------------------------------------------------------------

CONFIG = json.loads((MODEL / "config.json").read_text())
TOKENIZER = json.loads((MODEL / "tokenizer.json").read_text())
TOKENIZER_CONFIG = json.loads((MODEL / "tokenizer_config.json").read_text()) | {
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "added_tokens_decoder": {"15": {"content": "_", "special": True, "lstrip": False}},
}
TEMPLATES = ("", *lines_of("templates.txt"))


@st.composite
def model_cases(draw: st.DrawFn) -> Case:
    """A model directory whose shape or tokenizer is damaged."""
    model: dict[str, Content] = {
        "config.json": as_json(CONFIG),
        "tokenizer.json": as_json(TOKENIZER),
        "tokenizer_config.json": as_json(TOKENIZER_CONFIG),
    }
    sound = {"config.json": CONFIG, "tokenizer.json": TOKENIZER, "tokenizer_config.json": TOKENIZER_CONFIG}
    name = draw(st.sampled_from([*sound, "config.json", "tokenizer.json", "chat_template.jinja", "nothing", "whole"]))
    if name == "chat_template.jinja":
        model[name] = draw(maybe_damaged(draw(st.sampled_from(TEMPLATES)).encode(), 4))
    elif name == "nothing":
        del model[draw(st.sampled_from(sorted(model)))]
    elif name in sound:
        document = draw(mutated(sound[name])) if draw(st.integers(1, 4)) > 1 else sound[name]
        model[name] = draw(maybe_damaged(as_json(document), 3))
    if draw(st.integers(1, 6)) == 1:
        model["special_tokens_map.json"] = draw(damaged(as_json({"eos_token": {"content": "$"}})))
        model["tokenizer_config.json"] = as_json({"eos_token": "$"})
    files: dict[str, Content] = {f"model/{path}": content for path, content in model.items()}
    if name == "whole":
        files = {"model": draw(st.sampled_from([*Special, b""]))}
    problems = as_lines([{"prompt": [{"role": "user", "content": "1+1="}], "answer": 2}])
    return Case("train", (*TRAIN, "--model.path", "model", *FILE), {**files, **HELD, "p.jsonl": problems})


@functools.cache
def weights() -> tuple[dict[str, Any], bytes]:
    """Header and data of the toy model's weights."""
    return parts_of((MODEL / "model.safetensors").read_bytes())


def parts_of(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    (size,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + size]), file[8 + size :]


def as_safetensors(header: Any, data: bytes, size: int | None = None) -> bytes:
    """A safetensors file; ``size`` stands for the header's length where it is given."""
    text = as_json(header)
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def damaged_weights(file: bytes, how: str) -> st.SearchStrategy[bytes]:
    """A safetensors file whose header, or its length, or whose bytes are damaged."""
    header, data = parts_of(file)
    if how == "header":
        return mutated(header).map(lambda made: as_safetensors(made, data))
    if how == "size":
        sizes = st.sampled_from([0, 1, 2**20, 2**31, 2**63, 2**64 - 1])
        return sizes.map(lambda size: as_safetensors(header, data, size))
    return damaged(file)


DAMAGES = ("header", "size", "bytes")
OTHER_SIZES = st.sampled_from([1, 2, 3, 64, 96, 128, 1000])


@st.composite
def weight_cases(draw: st.DrawFn) -> Case:
    """A model directory of any family whose weight files are damaged, or are not of its shape."""
    config, file = sound_model(draw(st.sampled_from([*POLICIES])))
    names = [name for name in parts_of(file)[0] if name != "__metadata__"]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    how = draw(st.sampled_from([*DAMAGES, "index", "index", "config", "damaged config", "family"]))
    files = {"model.safetensors": file}
    if how in DAMAGES:
        files["model.safetensors"] = draw(damaged_weights(file, how))
    elif how == "index":
        document = draw(mutated(index)) if draw(st.booleans()) else index | {"weight_map": {"a": draw(weird)}}
        files["model.safetensors.index.json"] = draw(maybe_damaged(as_json(document), 3))
    elif how == "config":
        sizes = [key for key, value in config.items() if isinstance(value, int)]
        config = config | {draw(st.sampled_from(sizes)): draw(OTHER_SIZES)}
    elif how == "damaged config":
        config = draw(mutated(config))
    else:
        config = sound_model(draw(st.sampled_from([*POLICIES]))).config
    whole: dict[str, Content] = {f"model/{path}": content for path, content in files.items()}
    return Case("load", ("model",), {**whole, "model/config.json": as_json(config)})


@st.composite
def adapter_cases(draw: st.DrawFn) -> Case:
    """A directory of adapters in PEFT's layout with one of its files damaged, missing or of another rank."""
    config, file = sound_adapters()
    files: dict[str, Content] = {CONFIG_NAME: as_json(config), WEIGHTS_NAME: file}
    how = draw(st.sampled_from([*DAMAGES, "config", "config", "bytes of config", "nothing"]))
    if how in DAMAGES:
        files[WEIGHTS_NAME] = draw(damaged_weights(file, how))
    elif how == "config":
        files[CONFIG_NAME] = as_json(draw(mutated(config)))
    elif how == "bytes of config":
        files[CONFIG_NAME] = draw(damaged(as_json(config)))
    else:
        files[draw(st.sampled_from(sorted(files)))] = draw(st.sampled_from([*Special, b""]))
    return Case("adapters", ("adapters",), {f"adapters/{name}": content for name, content in files.items()})


# --- token dumps ------------------------------------------------------------------------------------------------------

SEQUENCES = [
    {
        "rljax_tokens": 1,
        "columns": {"trainer": {"engine": "jax", "dtype": "float32", "temperature": 1.0, "role": "trainer"}},
        "sampling": {"temperature": 1.0, "column": "rollout"},
    },
    {
        "sequence_id": "a",
        "token_ids": [5, 6, 7],
        "response_mask": [False, True, True],
        "logprobs": {"trainer": [None, -1.0, -0.5], "rollout": [None, -1.0, -0.25]},
    },
    {"prompt_ids": [5], "response_ids": [6, 7], "logprobs": {"trainer": [-1.0, -0.5], "rollout": [-1.0, -0.25]}},
]
PRIME = [
    {
        "schema_version": 1,
        "run_id": "r",
        "export_step": 1,
        "rank": 0,
        "export_sequence_idx": number,
        "token_ids": [1, 2],
        "loss_mask": [False, True],
        "trainer_logprobs": [0.0, -1.0],
        "inference_logprobs": [0.0, -1.5],
    }
    for number in range(2)
]
NOTE = {
    "version": 1,
    "columns": {"trainer": {"engine": "jax", "dtype": "float32", "role": "trainer"}, "rollout": {"engine": "vllm"}},
    "sampling": {"temperature": 1.0, "column": "rollout"},
}


@functools.cache
def dump_columns() -> dict[str, list[pa.Array]]:
    """Columns of two sequences that a dump may have: a sound one, then damaged ones."""
    ids, numbers = pa.list_(pa.int32()), pa.list_(pa.float32())
    plain = (["a", "a"], [None, "b"], [1, 2], [None, None], [[0, 1], [1]], [[1.5, 2.0], [3.0]], [["x", "y"], ["z"]])
    masks = ([[False, None], [True]], [[True], [True]])
    tokens = ([[1, 2], []], [[1, None], [3]], [[-1, 2], [2**31 - 1]], [[1, 2], None])
    logprobs = ([[None, -1.0], [-math.inf]], [[math.inf, 3e38], [1e30]], [[0.0], [1.0]])
    odd = [
        *map(pa.array, (*plain, *masks)),
        *(pa.array(rows, ids) for rows in tokens),
        *(pa.array(rows, numbers) for rows in logprobs),
    ]
    sound = {
        "sequence_id": pa.array(["a", "b"]),
        "token_ids": pa.array([[1, 2], [3]], ids),
        "response_mask": pa.array([[False, True], [True]]),
        "logprobs/trainer": pa.array([[math.nan, -1.0], [-2.0]], numbers),
        "logprobs/rollout": pa.array([[math.nan, -1.5], [-2.0]], numbers),
        "logprobs/": pa.array([[0.0, -1.5], [-2.0]], numbers),
    }
    return {name: [array, *odd] for name, array in sound.items()}


@st.composite
def token_cases(draw: st.DrawFn) -> Case:
    """A damaged dump, JSONL or export of tokens for ``rljax compare``."""
    form = draw(st.sampled_from(["jsonl", "jsonl", "prime", "dump", "dump", "dump"]))
    name, content = f"tokens.{'parquet' if form == 'dump' else 'jsonl'}", b""
    if form == "dump":
        names = [name for name in dump_columns() if name != "logprobs/" and draw(st.integers(1, 12)) > 1]
        names += ["logprobs/"] * (draw(st.integers(1, 12)) == 1)
        spoilt = draw(st.sampled_from([None, *names]))
        chosen = {n: draw(st.sampled_from(dump_columns()[n])) if n == spoilt else dump_columns()[n][0] for n in names}
        note = draw(maybe_damaged(as_json(draw(mutated(NOTE)) if draw(st.booleans()) else NOTE), 8))
        table = pa.table(chosen).slice(0, draw(st.sampled_from([2, 2, 2, 2, 0])))
        if isinstance(note, bytes) and draw(st.integers(1, 12)) > 1:
            table = table.replace_schema_metadata({b"rljax.dump": note})
        content = draw(maybe_damaged(as_parquet(table), 2))
    else:
        rows = SEQUENCES if form == "jsonl" else PRIME
        content = draw(maybe_damaged(as_lines(draw(mutated(rows)) if draw(st.integers(1, 4)) > 1 else rows), 2))
    specs = ("dump:tokens.jsonl#x", "dump:x", "jax:int8", "", "vllm:x", "dump:nowhere#x", "hf:")
    options = [("--columns", "trainer"), ("--columns", "trainer", "x"), ("--trainer", "rollout"), ("--rollout", "x")]
    more = draw(st.sampled_from([*[()] * 4, *options, *(("--scorer", spec) for spec in specs)]))
    where = draw(st.sampled_from(["file"] * 9 + ["folder"]))
    if where == "folder":
        return Case("compare", ("export", "--out", "out", *more), {"export/rank_0.jsonl": content})
    return Case("compare", (name, "--out", "out", *more), {name: content})


# --- logs and records -------------------------------------------------------------------------------------------------

LENGTHS = [10.0] * 12 + [40.0] * 8
LOG = [
    {"step": i, "response_length/mean": value, "response_length/clip_ratio": 0.0} for i, value in enumerate(LENGTHS, 1)
]


@functools.cache
def events() -> bytes:
    """A TensorBoard event file of the lengths."""
    from tensorboardX import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for row in LOG:
                writer.add_scalar("response_length/mean", row["response_length/mean"], row["step"])
        (file,) = Path(folder).iterdir()
        return file.read_bytes()


def as_csv(rows: Any) -> bytes:
    """A table of the rows that are dictionaries."""
    found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = list(dict.fromkeys(str(key) for row in found for key in row))
    lines = [names, *([str(row.get(name, "")) for name in names] for row in found)]
    return "\n".join(",".join(line) for line in lines).encode("utf-8", "surrogatepass")


@st.composite
def log_cases(draw: st.DrawFn) -> Case:
    """A damaged log for ``rljax replay``."""
    rows = draw(mutated(LOG)) if draw(st.integers(1, 4)) > 1 else LOG
    forms: list[tuple[str, bytes]] = [
        ("log.jsonl", as_lines(rows)),
        ("log.csv", as_csv(rows)),
        ("run/metrics.jsonl", as_lines(rows)),
    ]
    name, data = draw(
        st.sampled_from([*forms, ("events.out.tfevents.1", events()), ("run/tb/events.out.tfevents.1", events())])
    )
    content = draw(maybe_damaged(data, 2))
    option = draw(
        st.sampled_from(["--column", "--truncated-column", "--ratio", "--window", "--warmup", "--multiplier"])
    )
    value = draw(st.sampled_from(["step", "x", "nan", "0", "-1", "inf", "1e400", "9" * 30, "", "2"]))
    more = (f"{option}={value}",) if draw(st.integers(1, 3)) == 1 else ()
    sweep = draw(st.sampled_from([(), (), (), ("--sweep",)]))
    log = "run" if name.startswith("run/") else name
    return Case("replay", (log, "--png", "out/surge.png", *more, *sweep), {name: content, "out": Special.DIRECTORY})


RECORD = [
    {
        "step": step,
        "reward/mean": 0.1 * step,
        "response_length/mean": length,
        "schedule/learning_rate": 1e-4,
        "schedule/surge_step": 14 if step >= 14 else None,
        "schedule/decay_period": 25 if step >= 14 else None,
        "optimizer/grad_norm": 0.5,
        "policy/entropy": 0.25,
        "mismatch/log_ppl_abs_diff": 1e-3,
    }
    | ({"eval/toy/accuracy": 0.5} if step % 5 == 0 else {})
    for step, length in enumerate(LENGTHS, 1)
]


@st.composite
def records(draw: st.DrawFn) -> Content:
    """A damaged metrics.jsonl."""
    rows = RECORD[: draw(st.sampled_from([1, 3, 20]))]
    return draw(maybe_damaged(as_lines(draw(mutated(rows)) if draw(st.integers(1, 4)) > 1 else rows), 2))


@st.composite
def record_cases(draw: st.DrawFn) -> Case:
    """A damaged record of a run for ``rljax plot``."""
    files: dict[str, Content] = {"run/metrics.jsonl": draw(records())}
    figure = draw(st.sampled_from([(), (), (), ("--figure", "6"), ("--figure", "7"), ("--figure", "ratio-by-length")]))
    if "ratio-by-length" in figure:
        table = pa.table({name: arrays[0] for name, arrays in dump_columns().items() if name != "logprobs/"})
        dump = as_parquet(table.replace_schema_metadata({b"rljax.dump": as_json(NOTE)}))
        files["run/rollouts/step_000001.parquet"] = draw(maybe_damaged(dump, 2))
    return Case("plot", ("run", *figure), files)


@st.composite
def resume_cases(draw: st.DrawFn) -> Case:
    """A run directory whose record or configuration is damaged, for training that would go on there."""
    settings = copy.deepcopy(yaml.safe_load(HELD["config.yaml"]))
    there = draw(mutated(settings)) if draw(st.booleans()) else settings
    files: dict[str, Content] = {
        **HELD,
        "held/metrics.jsonl": draw(records()),
        "held/config.yaml": draw(maybe_damaged(as_yaml(there), 3)),
    }
    for name in draw(st.lists(st.sampled_from(["5", "x", "5.tmp", "05", "-1", "²"]), max_size=2, unique=True)):
        files[f"held/checkpoints/{name}"] = draw(st.sampled_from([*Special, b""]))
    resume = draw(st.sampled_from(["auto", "auto", "never", "held", "nowhere", "", "a\udcffb", "held/metrics.jsonl"]))
    # The engine has no server, so that a run that may go on ends there, in one line.
    engine = ("--rollout.engine", "vllm", "--rollout.urls", "http://127.0.0.1:9", "--rollout.server-wait-s", "0.01")
    problems = as_lines(ROWS)
    words = ("config.yaml", "--run.dir", "held", "--run.resume", resume, *FILE, *engine)
    return Case("train", words, {**files, "p.jsonl": problems})


# --- checkpoints ------------------------------------------------------------------------------------------------------

EXTRA = ("0", "x", "9", "05", "-1", "²", "٣", "3.tmp", "tmp_4", "copy_of_3", "3.orbax-checkpoint-tmp-0", "1" + "0" * 12)


def without(files: Mapping[str, Content], path: str) -> dict[str, Content]:
    """The files but for that one, or for all below that folder."""
    return {name: content for name, content in files.items() if name != path and not name.startswith(f"{path}/")}


def below(files: Mapping[str, Content], path: str) -> dict[str, Content]:
    """The files in a folder, by their paths in it."""
    return {name.removeprefix(f"{path}/"): files[name] for name in files if name.startswith(f"{path}/")}


@st.composite
def damaged_checkpoint(draw: st.DrawFn, files: Mapping[str, Content], folder: str) -> dict[str, Content]:
    """The files of a run, of which those in the folder of one checkpoint are damaged."""
    names = [name for name in files if name.startswith(f"{folder}/")]
    host, largest = f"{folder}/host/metadata", max(names, key=lambda name: len(bytes(files[name])))  # type: ignore[arg-type]
    how = draw(st.sampled_from(["host", "host", "file", "file", "largest", "gone", "folder", "other", "other file"]))
    name = {"host": host, "largest": largest}.get(how) or draw(st.sampled_from(names))
    data = files[name]
    assert isinstance(data, bytes)
    if how == "gone":
        return without(files, draw(st.sampled_from([name, name, name.rpartition("/")[0], folder])))
    if how == "folder":
        place = draw(st.sampled_from([name.rpartition("/")[0], folder]))
        return without(files, place) | {place: draw(st.sampled_from([*Special, b""]))}
    if how.startswith("other"):
        source = draw(st.sampled_from([f"{RUN}/checkpoints/{step}" for step in STEPS]))
        inside = "" if how == "other" else f"/{draw(st.sampled_from(['host', 'state']))}"
        taken = {f"{folder}{inside}/{path}": content for path, content in below(files, source + inside).items()}
        return without(files, folder + inside) | taken
    if data.startswith(b"{") and draw(st.integers(1, 4)) > 1:
        return {**files, name: as_json(draw(mutated(json.loads(data))))}
    return {**files, name: draw(damaged(data))}


@st.composite
def checkpoint_cases(draw: st.DrawFn) -> Case:
    """A run directory whose checkpoints are damaged, for training that would go on there."""
    sound: dict[str, Content] = {f"{RUN}/{name}": content for name, content in sound_run().files.items()}
    files, place = sound, f"{RUN}/checkpoints"
    newest = STEPS[-1]
    for step in draw(st.sampled_from([(newest,), (newest,), STEPS[1:], STEPS, STEPS, ()])):
        files = draw(damaged_checkpoint(files, f"{place}/{step}"))
    if draw(st.integers(1, 5)) == 1:
        name = f"{place}/{draw(st.sampled_from(EXTRA))}"
        copy_of = {f"{name}/{path}": content for path, content in below(sound, f"{place}/{newest}").items()}
        what = draw(st.sampled_from([*Special, b"", None, None]))
        files = without(files, name) | (copy_of if what is None else {name: what})
    if draw(st.integers(1, 20)) == 1:
        files = without(files, place) | {place: draw(st.sampled_from([*Special, b""]))}
    return Case("go on", (RUN,), files)


KINDS: dict[str, st.SearchStrategy[Case]] = {
    "yaml": yaml_cases(),
    "arguments": argument_cases(),
    "problems": problem_cases(),
    "model": model_cases(),
    "weights": weight_cases(),
    "adapters": adapter_cases(),
    "tokens": token_cases(),
    "log": log_cases(),
    "record": record_cases(),
    "resume": resume_cases(),
    "checkpoints": checkpoint_cases(),
}
"""Kind -> strategy."""
