"""Token dumps: token ids of sequences with any number of log-probability columns, in one Parquet file.

Each sequence is a row: ``sequence_id`` string, ``token_ids`` ``list<int32>`` (prompt and response), ``response_mask``
``list<bool>`` and ``logprobs/<column>`` ``list<float32>``. All lists of a row have one length. ``logprobs[t]`` is the
log-probability **of** ``token_ids[t]`` given everything before it (nats), or NaN if it is unknown. If the sampler
reported its k likeliest tokens, ``top_ids`` and ``top_logprobs`` are lists of k numbers for each token. Further
numbers of the tokens are in columns ``values/<name>``, ``list<float32>``. The likeliest tokens of another column are in
``top_ids/<column>`` and ``top_logprobs/<column>``. The schema's metadata has a JSON object under ``rljax.dump``:
``version``, ``columns`` (the source of each column) and ``sampling`` (how the tokens were sampled). Each page has a
checksum, and ``rljax.dump.crc32`` in the metadata covers that object and the names of the columns. Older files have
neither. Reading a dump executes nothing in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rljax.distributed.files import replacing
from rljax.errors import naming, parse_json
from rljax.record.token_arrays import to_float32, to_int32, to_mask

FORMAT_VERSION = 1
"""The version written into every file; a reader refuses any other."""

ROLES = ("trainer", "rollout")
"""The roles of a column in the formulas of the mismatch: the trainer's forward, and the engine that sampled."""

PLACES = ("trainer", "", "rollout")
"""The order in which a comparison sorts columns by their roles; "" is an unknown role."""

SECOND_RUN = "@2"
"""The suffix of the column of a scorer's second run; the part before it is the name of its first column."""

OTHER_RUNS = {"shape": SECOND_RUN, "mesh": "@mesh", "remat": "@remat"}
"""The suffixes of all further runs of a scorer, by the kind of difference from the first run."""

ABOVE_ZERO = 1e-5
"""The largest number above 0 (nats) that rounding can make of a log-probability."""

_KEY, _SUM = b"rljax.dump", b"rljax.dump.crc32"
_SOURCE_TEXTS = ("engine", "dtype", "weights_hash", "role")
_PLAIN = {"sequence_id": pa.string(), "token_ids": pa.list_(pa.int32()), "response_mask": pa.list_(pa.bool_())}
_KINDS = {
    "logprobs": pa.list_(pa.float32()),
    "top_ids": pa.list_(pa.list_(pa.int32())),
    "top_logprobs": pa.list_(pa.list_(pa.float32())),
    "values": pa.list_(pa.float32()),
}
"""The type of each kind of further column. Its name in the file is the kind, or the kind, "/" and a name."""
Tops = tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]
"""The ids and the log-probabilities of the likeliest tokens of n sequences, [t, k] each."""


@dataclass(frozen=True)
class ColumnSource:
    """The source of a column of log-probabilities. An empty string or None means unknown."""

    engine: str = ""  # the program that computed the column: "vllm 0.32.0", "jax", "transformers"
    dtype: str = ""  # the dtype of the weights and activations: float32, bfloat16, float16
    weights_hash: str = ""  # "sha256:...", or another name; hashes are compared with hashes, and names with names
    temperature: float | None = None  # 1 for raw log-probabilities, the sampling temperature for processed ones
    role: str = ""  # the column's role in the formulas of the mismatch: "trainer" or "rollout"
    form: str = ""  # the 8-bit form of the engine's weights or cache, such as "fp8_e5m2 cache"
    cut: bool = False  # whether the numbers are normalised over the tokens that could be sampled (top_k, top_p, min_p)

    def __post_init__(self) -> None:
        for name in _SOURCE_TEXTS:
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} of a column must be text, got {getattr(self, name)!r:.60}")
        if not isinstance(self.cut, bool):
            raise ValueError(f"cut of a column must be true or false, got {self.cut!r:.60}")
        if self.role and self.role not in ROLES:
            raise ValueError(f"role of a column must be one of {', '.join(ROLES)} or empty, got {self.role!r}")
        is_number = type(self.temperature) in (int, float)
        if self.temperature is not None and not (is_number and 0.0 < self.temperature < 1e30):
            raise ValueError(f"temperature of a column must be positive and finite, got {self.temperature!r:.60}")

    @classmethod
    def read(cls, document: Any) -> ColumnSource:
        """Reads a source from its JSON object in a file. Raises ValueError if the object has another form."""
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(document, dict) or not set(document) <= set(known):
            raise ValueError(f"the source of a column has the keys {', '.join(known)}, got {document!r:.80}")
        return cls(**document)

    def document(self) -> dict[str, Any]:
        """Returns the source as a JSON object for a file; ``cut`` and ``form`` are left out if false or empty."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value or name not in ("cut", "form")}


@dataclass(frozen=True)
class TokenDump:
    """Tokenised sequences with columns of log-probabilities, one column for each engine that scored them.

    ``sampling`` has the settings that fixed the samples, JSON values: temperature, top_p, top_k, seed and others. Its
    entry ``column`` names the column of the engine that sampled.
    """

    sequence_ids: tuple[str, ...]  # n distinct names
    token_ids: tuple[np.ndarray, ...]  # n int32 vectors [t] of prompt and response, with at least one token each
    response_mask: tuple[np.ndarray, ...]  # n bool vectors [t], True at response tokens; holes are allowed
    columns: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)  # n arrays [t] or [t, k] by file name
    sources: Mapping[str, ColumnSource] = field(default_factory=dict)  # the source of each of ``logprobs``, by its name
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, Mapping):
            raise ValueError(f"sampling must be an object, got {self.sampling!r:.60}")
        if not all(isinstance(name, str) for name in self.sequence_ids):
            raise ValueError("a sequence has no id")
        if twice := [name for name, count in Counter(self.sequence_ids).items() if count > 1]:
            raise ValueError(f"sequence ids must be distinct, got {twice[:3]} more than once")
        if set(self.sources) != set(self.logprobs):
            raise ValueError(f"columns and sources must match, got {sorted(self.logprobs)}, {sorted(self.sources)}")
        if "" in self.logprobs:
            raise ValueError("a column must have a name, got an empty string")
        for name, arrays in {"response_mask": self.response_mask, **self.columns}.items():
            _check_column(name, arrays, self)
        for name, ids in self.of_kind("top_ids").items():
            other = self.columns.get(f"top_logprobs/{name}" if name else "top_logprobs", ())
            if [array.shape for array in ids] != [array.shape for array in other]:
                raise ValueError("top_ids and top_logprobs must have the same shapes")
            if name and name not in self.logprobs:
                raise ValueError(f"likeliest tokens must be of a column, got {name!r:.60}")

    def of_kind(self, kind: str) -> dict[str, tuple[np.ndarray, ...]]:
        """Returns the columns ``<kind>/<name>`` by ``<name>``. A column that is just ``<kind>`` has the name ""."""
        names = {name: name.partition("/") for name in self.columns}
        return {own: self.columns[name] for name, (of, _, own) in names.items() if of == kind}

    @functools.cached_property
    def logprobs(self) -> dict[str, tuple[np.ndarray, ...]]:
        """The columns of log-probabilities by name, n float32 [t] each (nats), NaN if unknown."""
        return self.of_kind("logprobs")

    @functools.cached_property
    def values(self) -> dict[str, tuple[np.ndarray, ...]]:
        """Further numbers of the tokens by name, such as ``advantage``, n float32 [t] each, NaN if unknown."""
        return self.of_kind("values")

    def role(self, name: str) -> str:
        """Returns the role of a column: "trainer", "rollout", or an empty string if it is unknown.

        The role comes from the column's source, from ``sampling``, or from the name itself.
        """
        if self.sources[name].role:
            return self.sources[name].role
        if name == self.sampling.get("column"):
            return "rollout"
        return name if name in ROLES else ""

    @property
    def first_runs(self) -> list[str]:
        """The names of the columns in the order of the file, without further runs of a scorer."""
        return [name for name in self.logprobs if not name.endswith(tuple(OTHER_RUNS.values()))]

    def with_roles(self, roles: Mapping[str, str]) -> TokenDump:
        """Returns this dump with the roles of some columns set; ``roles`` maps column names to roles."""
        declared = {name: dataclasses.replace(self.sources[name], role=role) for name, role in roles.items()}
        return dataclasses.replace(self, sources={**self.sources, **declared})

    def with_column(self, name: str, vectors: Sequence[np.ndarray], source: ColumnSource) -> TokenDump:
        """Returns this dump with the log-probabilities ``name`` added, or replaced if there are some already."""
        columns = {**self.columns, f"logprobs/{name}": tuple(np.asarray(vector, np.float32) for vector in vectors)}
        return dataclasses.replace(self, columns=columns, sources={**self.sources, name: source})


def make_dump(
    sequence_ids: Sequence[str],
    token_ids: Sequence[Sequence[int] | np.ndarray],
    response_mask: Sequence[Sequence[bool] | np.ndarray],
    logprobs: Mapping[str, Sequence[Sequence[float | None] | np.ndarray]],
    sources: Mapping[str, ColumnSource] | None = None,
    sampling: Mapping[str, Any] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> TokenDump:
    """Makes a dump from plain lists or arrays. None in a column becomes NaN; a missing source becomes an unknown one.

    ``columns`` has further columns by their names in the file, such as ``values/advantage`` or ``top_ids``.

    Raises ValueError if lengths do not match, ids repeat, a token id does not fit int32, or a source has no column.
    """
    names = [f"sequence {name!r}" for name in sequence_ids]

    def converted(column: str, arrays: Sequence[Any]) -> tuple[np.ndarray, ...]:
        if _is_nested(column):
            return tuple(np.asarray(array, _dtype(column)) for array in arrays)
        return tuple(to_float32(f"{name}: {_label(column)}", each) for name, each in zip(names, arrays, strict=True))

    every = {f"logprobs/{name}": vectors for name, vectors in logprobs.items()} | dict(columns or {})
    return TokenDump(
        sequence_ids=tuple(map(str, sequence_ids)),
        token_ids=tuple(to_int32(name, ids) for name, ids in zip(names, token_ids, strict=True)),
        response_mask=tuple(map(to_mask, names, response_mask)),
        columns={name: converted(name, arrays) for name, arrays in every.items()},
        sources={name: ColumnSource() for name in logprobs} | dict(sources or {}),
        sampling={} if sampling is None else sampling,
    )


def after_prompts(prompts: Sequence[np.ndarray], vectors: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Extends vectors [r] of response tokens to whole sequences, float32 [s + r], with NaN at the prompt tokens."""
    unknown = (np.full(len(prompt), np.nan, np.float32) for prompt in prompts)
    return [np.concatenate(pair) for pair in zip(unknown, vectors, strict=True)]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of token ids that two vectors share from their beginning."""
    shorter = min(len(a), len(b))
    return int(np.argmin(np.append(a[:shorter] == b[:shorter], False)))


def write_dump(path: str | os.PathLike[str], dump: TokenDump) -> Path:
    """Writes a dump and returns its path. An older file of this name is replaced once the new one is complete.

    Raises OSError if the file cannot be written.
    """
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    sources = {name: source.document() for name, source in dump.sources.items()}
    note = {"version": FORMAT_VERSION, "columns": sources, "sampling": dict(dump.sampling)}
    document = json.dumps(note, sort_keys=True).encode()
    columns = {"token_ids": dump.token_ids, "response_mask": dump.response_mask}
    columns |= {name: dump.columns[name] for name in sorted(dump.columns, key=_place)}
    lists = {name: _lists(arrays, _type(name)) for name, arrays in columns.items()}
    table = pa.table({"sequence_id": pa.array(dump.sequence_ids, pa.string()), **lists})
    table = table.replace_schema_metadata({_KEY: document, _SUM: _checksum(document, table)})
    with replacing(out) as partial:
        # Hardly any number occurs twice, so a dictionary would take most of the time and make the file larger.
        pq.write_table(table, partial, compression="zstd", use_dictionary=False, write_page_checksum=True)
    return out


@contextlib.contextmanager
def parquet_file(path: str | os.PathLike[str]) -> Iterator[pq.ParquetFile]:
    """Opens a Parquet file. The checksums of its pages are verified when they are read; not every file has them.

    Arrow opens the file itself. If it read a file of Python, its threads would need the interpreter's lock to free
    memory. That aborts the process if the interpreter ends meanwhile.

    Raises:
      OSError: The file cannot be opened.
      ValueError: It is not a Parquet file, or is damaged. Errors of Arrow in the ``with`` block become this error, too.
    """
    Path(path).open("rb").close()  # an OSError of Python names the file
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            rows = sum(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
            if rows != file.metadata.num_rows:
                raise OSError(f"its row groups have {rows} rows, and its footer says {file.metadata.num_rows}")
            yield file
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from error


def read_dump(path: str | os.PathLike[str]) -> TokenDump:
    """Reads a dump that ``write_dump`` wrote.

    Raises OSError if the file cannot be opened, and ValueError if it is damaged or no dump of this version.
    """
    with parquet_file(path) as file:
        table = file.read()
    metadata = table.schema.metadata or {}
    if _KEY not in metadata:
        raise ValueError(f"{path} is a Parquet file but not a token dump: its metadata has no {_KEY.decode()!r}")
    if metadata.get(_SUM, expected := _checksum(metadata[_KEY], table)) != expected:
        cause = f"a program that changed them must remove {_SUM.decode()!r} from the metadata, else the file is damaged"
        raise ValueError(f"{path}: the checksum of its column names and of {_KEY.decode()!r} is wrong: {cause}")
    try:
        note = parse_json(metadata[_KEY])
    except ValueError as error:
        raise ValueError(f"{path}: its metadata is {error}") from error
    if not isinstance(note, dict) or not isinstance(note.get("columns"), dict) or "sampling" not in note:
        raise ValueError(f"{path}: its metadata must be an object with version, columns and sampling")
    if note.get("version") != FORMAT_VERSION:
        raise ValueError(f"{path} has dump version {note.get('version')!r:.60}, expected {FORMAT_VERSION}")
    names = [name for name in table.column_names if name.partition("/")[0] in ("logprobs", "top_ids", "values")]
    names += [name.replace("top_ids", "top_logprobs", 1) for name in names if name.startswith("top_ids")]
    for name in (*_PLAIN, *sorted(names, key=_place)):
        got = table.schema.field(name).type if name in table.column_names else None
        if got != _type(name):
            raise ValueError(f"{path}: column {name!r} must be {_type(name)}, got {got or 'none'}")
    with naming(path):
        return TokenDump(
            sequence_ids=tuple(table["sequence_id"].to_pylist()),
            token_ids=_arrays(table["token_ids"], "token_ids"),
            response_mask=_arrays(table["response_mask"], "response_mask"),
            columns={name: _arrays(table[name], name) for name in names},
            sources={name: ColumnSource.read(source) for name, source in note["columns"].items()},
            sampling=note["sampling"],
        )


def _checksum(document: bytes, table: pa.Table) -> bytes:
    """Returns the CRC-32 of the metadata and of the column names, which no checksum of a page covers."""
    return f"{zlib.crc32(document + repr(table.column_names).encode()):08x}".encode()


def _type(name: str) -> pa.DataType:
    """Returns the type of a column of the file."""
    return _PLAIN.get(name) or _KINDS[name.partition("/")[0]]


def _is_nested(name: str) -> bool:
    return pa.types.is_list(_type(name).value_type)


def _dtype(name: str) -> np.dtype[Any]:
    kind = _type(name).value_type
    return np.dtype((kind.value_type if pa.types.is_list(kind) else kind).to_pandas_dtype())


def _place(name: str) -> tuple[int, str, int]:
    """Returns the key that sorts further columns for a file, with both columns of likeliest tokens together."""
    kind, _, own = name.partition("/")
    order = list(_KINDS).index(kind)
    return (1, own, order) if kind.startswith("top_") else (order, "", 0)


def _label(name: str) -> str:
    """Returns the name of a column in messages: ``column 'x'`` for ``logprobs/x``."""
    kind, _, own = name.partition("/")
    return f"{'column' if kind == 'logprobs' else kind} {own!r}" if own else kind


def _check_column(name: str, arrays: Sequence[Any], dump: TokenDump) -> None:
    """Raises ValueError unless the column has an entry for each token, and each of its lists has the same k."""
    what, tokens, names = _label(name), dump.token_ids, dump.sequence_ids
    if not len(arrays) == len(tokens) == len(names):
        raise ValueError(f"{what} must have {len(names)} sequences, got {len(arrays)} for {len(tokens)} of token ids")
    lists = arrays[0].shape[1:] if arrays and _is_nested(name) else ()
    for sequence, array, ids in zip(names, arrays, tokens, strict=True):
        if ids.ndim != 1 or len(ids) < 1:
            got = f"got shape {ids.shape}"
            raise ValueError(f"sequence {sequence!r}: token ids must be a vector of at least one, {got}")
        if array.shape != (len(ids), *lists) or 0 in lists:
            entries = f"{len(ids)} lists of {lists[0] or 'at least 1'} tokens" if lists else f"{len(ids)} entries"
            raise ValueError(f"sequence {sequence!r}: {what} must have {entries}, got shape {array.shape}")


def _lists(arrays: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Returns arrays [t] as lists, or [t, k] as lists of lists, without a Python object for each token."""
    flat = np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(0)
    starts = pa.array(np.cumsum([0, *map(len, arrays)]), pa.int32())
    if not pa.types.is_list(kind.value_type):
        return pa.ListArray.from_arrays(starts, pa.array(flat, kind.value_type))
    ends = np.arange(0, len(flat) + 1, arrays[0].shape[1] if arrays else 1)
    inner = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat, kind.value_type.value_type))
    return pa.ListArray.from_arrays(starts, inner)


def _arrays(column: pa.ChunkedArray, name: str) -> tuple[np.ndarray, ...]:
    """Returns the list of each row as an array [t], or the lists of a row as an array [t, k].

    Raises ValueError if a list is missing, an integer is missing, or the lists of a row have several lengths.
    """
    dtype, found = _dtype(name), []
    for row in column:
        if not row.is_valid:
            raise ValueError("a row has no list where one is expected")
        values, shape = row.values, (len(row.values), -1)
        if _is_nested(name):
            lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
            if len(lengths) != 1:
                raise ValueError(f"the likeliest tokens of a row have lists of several lengths: {lengths[:4].tolist()}")
            values = values.flatten()
        if dtype.kind != "f" and values.null_count:
            raise ValueError("a row has a null in its token ids or its mask")
        flat = np.asarray(values.to_numpy(zero_copy_only=False), dtype)
        found.append(flat.reshape(shape) if _is_nested(name) else flat)
    return tuple(found)
