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

import dataclasses
import itertools
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rljax.distributed.files import replacing
from rljax.errors import parse_json
from rljax.record.parquet_files import parquet_file
from rljax.record.token_arrays import to_float32, to_int32, to_mask

FORMAT_VERSION = 1
"""The version written into every file; a reader refuses any other."""

ROLES = ("trainer", "rollout")
"""The roles of a column in the formulas of the mismatch: the trainer's forward, and the engine that sampled."""

PLACES = ("trainer", "", "rollout")
"""The roles in the order in which the columns of a pair take their places."""

SECOND_RUN = "@2"
"""The suffix of a scorer's second run; the part before it is the name of the first run's column."""

OTHER_RUNS = {"shape": SECOND_RUN, "mesh": "@mesh", "remat": "@remat"}
"""The suffixes of all further runs of a scorer, by the kind of difference from the first run."""

ABOVE_ZERO = 1e-5
"""The largest log-probability (nats) that rounding explains."""

_KEY, _SUM = b"rljax.dump", b"rljax.dump.crc32"
_PREFIX = "logprobs/"
_VALUES = "values/"
_SOURCE_TEXTS = ("engine", "dtype", "weights_hash", "role")
_TOPS = {"top_ids": pa.int32(), "top_logprobs": pa.float32()}
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
    logprobs: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)  # n float32 [t] (nats), NaN if unknown
    sources: Mapping[str, ColumnSource] = field(default_factory=dict)  # the source of each column, by column name
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # The sampler's likeliest tokens at each token, n int32 [t, k], or () if unknown; -1 where there are fewer than k.
    top_ids: tuple[np.ndarray, ...] = ()
    top_logprobs: tuple[np.ndarray, ...] = ()  # the sampler's numbers (nats), n float32 [t, k]; -inf where the id is -1
    # Further numbers of the tokens by name, n float32 [t] each, NaN if unknown: advantage, version, in_loss, entropy.
    values: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    # The likeliest tokens of other columns, by column name, in the form of ``top_ids`` and ``top_logprobs``.
    other_tops: Mapping[str, Tops] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, Mapping):
            raise ValueError(f"sampling must be an object, got {self.sampling!r:.60}")
        if not all(isinstance(name, str) for name in self.sequence_ids):
            raise ValueError("a sequence has no id")
        if twice := [name for name, count in Counter(self.sequence_ids).items() if count > 1]:
            raise ValueError(f"sequence ids must be distinct, got {twice[:3]} more than once")
        if set(self.sources) != set(self.logprobs):
            raise ValueError(f"columns and sources must match, got {sorted(self.logprobs)}, {sorted(self.sources)}")
        _check_vectors("response_mask", self.response_mask, self.sequence_ids, self.token_ids)
        for column, vectors in self.logprobs.items():
            if not column:
                raise ValueError("a column must have a name, got an empty string")
            _check_vectors(f"column {column!r}", vectors, self.sequence_ids, self.token_ids)
        for name, vectors in self.values.items():
            _check_vectors(f"values {name!r}", vectors, self.sequence_ids, self.token_ids)
        for tops in ((self.top_ids, self.top_logprobs), *self.other_tops.values()):
            _check_tops(self, *tops)
        if unknown := set(self.other_tops) - set(self.logprobs):
            raise ValueError(f"likeliest tokens must be of a column, got {sorted(unknown)[0]!r:.60}")

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
        """Returns this dump with the column ``name`` added, or replaced if there is one already."""
        columns = {**self.logprobs, name: tuple(np.asarray(vector, np.float32) for vector in vectors)}
        return dataclasses.replace(self, logprobs=columns, sources={**self.sources, name: source})


def make_dump(
    sequence_ids: Sequence[str],
    token_ids: Sequence[Sequence[int] | np.ndarray],
    response_mask: Sequence[Sequence[bool] | np.ndarray],
    logprobs: Mapping[str, Sequence[Sequence[float | None] | np.ndarray]],
    sources: Mapping[str, ColumnSource] | None = None,
    sampling: Mapping[str, Any] | None = None,
    tops: Sequence[tuple[np.ndarray, np.ndarray]] = (),
    values: Mapping[str, Sequence[Sequence[float | None] | np.ndarray]] | None = None,
    other_tops: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]] | None = None,
) -> TokenDump:
    """Makes a dump from plain lists or arrays. None in a column becomes NaN; a missing source becomes an unknown one.

    ``tops`` has the ids and log-probabilities of the likeliest tokens of each sequence, [t, k] each, or is empty.
    ``values`` has the further numbers of the tokens, by name. ``other_tops`` has the likeliest tokens of other columns.

    Raises ValueError if lengths do not match, ids repeat, a token id does not fit int32, or a source has no column.
    """
    names = [f"sequence {name!r}" for name in sequence_ids]

    def numbers(
        kind: str, columns: Mapping[str, Sequence[Sequence[float | None] | np.ndarray]]
    ) -> dict[str, tuple[np.ndarray, ...]]:
        return {
            column: tuple(to_float32(f"{name}: {kind} {column!r}", v) for name, v in zip(names, vectors, strict=True))
            for column, vectors in columns.items()
        }

    return TokenDump(
        sequence_ids=tuple(map(str, sequence_ids)),
        token_ids=tuple(to_int32(name, ids) for name, ids in zip(names, token_ids, strict=True)),
        response_mask=tuple(map(to_mask, names, response_mask)),
        logprobs=numbers("column", logprobs),
        sources={name: ColumnSource() for name in logprobs} | dict(sources or {}),
        sampling={} if sampling is None else sampling,
        **dict(zip(_TOPS, _split_tops(tops), strict=True)),
        values=numbers("values", values or {}),
        other_tops={name: _split_tops(pairs) for name, pairs in (other_tops or {}).items()},
    )


def _split_tops(tops: Sequence[tuple[np.ndarray, np.ndarray]]) -> Tops:
    return tuple(np.asarray(ids, np.int32) for ids, _ in tops), tuple(np.asarray(p, np.float32) for _, p in tops)


def dump_of_responses(
    sequence_ids: Sequence[str],
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    logprobs: Mapping[str, Sequence[np.ndarray]],
    sources: Mapping[str, ColumnSource],
    sampling: Mapping[str, Any],
    tops: Sequence[tuple[np.ndarray, np.ndarray]] = (),
    values: Mapping[str, Sequence[np.ndarray]] | None = None,
    sampled: Sequence[np.ndarray] | None = None,
    other_tops: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]] | None = None,
) -> TokenDump:
    """Makes a dump of n sampled responses, one row each; the log-probabilities of prompt tokens are unknown.

    Args:
      sequence_ids: The names of the sequences.
      prompts, responses: The token ids, n int32 vectors [s] and n int32 vectors [r].
      logprobs: The log-probabilities of the response tokens by column, n float32 vectors [r] each (nats).
      sources: The source of each column.
      sampling: The settings of the sampling, as in ``TokenDump``.
      tops: The ids and log-probabilities of the likeliest tokens of each response, [r, k] each; or empty.
      values: The further numbers of the response tokens by name, n float vectors [r] each.
      sampled: The marks of the response tokens that the policy sampled, n bool vectors [r]. None means all tokens.
      other_tops: The likeliest tokens of other columns by column, in the form of ``tops``.

    Raises:
      ValueError: Lengths do not match, names repeat, or a source has no column.
    """

    def after(tops: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [_tops_after(prompt, *each) for prompt, each in zip(prompts, tops, strict=True)] if tops else []

    pairs = list(zip(prompts, responses, strict=True))
    masks = [np.ones(len(response), np.bool_) for response in responses] if sampled is None else sampled
    return make_dump(
        sequence_ids,
        [np.concatenate(pair) for pair in pairs],
        [np.concatenate([np.zeros(len(p), np.bool_), own]) for (p, _), own in zip(pairs, masks, strict=True)],
        {name: after_prompts(prompts, vectors) for name, vectors in logprobs.items()},
        sources,
        sampling,
        after(tops),
        {name: after_prompts(prompts, vectors) for name, vectors in (values or {}).items()},
        {name: after(each) for name, each in (other_tops or {}).items()},
    )


def _tops_after(prompt: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    none = len(prompt), ids.shape[1]
    return (
        np.concatenate([np.full(none, -1, np.int32), ids]),
        np.concatenate([np.full(none, -np.inf, np.float32), logprobs]),
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
    columns = (dump.token_ids, dump.response_mask, *dump.logprobs.values())
    sources = {name: source.document() for name, source in dump.sources.items()}
    note = {"version": FORMAT_VERSION, "columns": sources, "sampling": dict(dump.sampling)}
    document = json.dumps(note, sort_keys=True).encode()
    schema = pa.schema(_types(dump.logprobs))
    lists = map(_lists, columns, (kind.value_type for kind in schema.types[1:]))
    table = pa.table([pa.array(dump.sequence_ids, pa.string()), *lists], schema=schema)
    every = {"": (dump.top_ids, dump.top_logprobs)} | {f"/{name}": tops for name, tops in dump.other_tops.items()}
    for end, tops in every.items():
        for (name, kind), matrices in zip(_TOPS.items(), tops, strict=True) if tops[0] else ():
            table = table.append_column(name + end, _nested(matrices, kind))
    for name, vectors in dump.values.items():
        table = table.append_column(_VALUES + name, _lists(vectors, pa.float32()))
    table = table.replace_schema_metadata({_KEY: document, _SUM: _checksum(document, table)})
    with replacing(out) as partial:
        # Hardly any number occurs twice, so a dictionary would take most of the time and make the file larger.
        pq.write_table(table, partial, compression="zstd", use_dictionary=False, write_page_checksum=True)
    return out


def read_dump(path: str | os.PathLike[str]) -> TokenDump:
    """Reads a dump that ``write_dump`` wrote.

    Raises ValueError if the file is not a dump, is damaged, has another version, or has columns of other types.
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
    columns = [name.removeprefix(_PREFIX) for name in table.column_names if name.startswith(_PREFIX)]
    ends = [name.removeprefix("top_ids") for name in table.column_names if name.partition("/")[0] == "top_ids"]
    tops = {name + end: kind for end in ends for name, kind in _TOPS.items()}
    values = [name for name in table.column_names if name.startswith(_VALUES)]
    more = {name: pa.list_(pa.list_(kind)) for name, kind in tops.items()} | dict.fromkeys(
        values, pa.list_(pa.float32())
    )
    for name, kind in (_types(columns) | more).items():
        got = table.schema.field(name).type if name in table.column_names else None
        if got != kind:
            raise ValueError(f"{path}: column {name!r} must be {kind}, got {got or 'none'}")
    try:
        read = {name: _matrices(table[name], kind.to_pandas_dtype()) for name, kind in tops.items()}
        return TokenDump(
            sequence_ids=tuple(table["sequence_id"].to_pylist()),
            token_ids=_vectors(table["token_ids"], np.dtype(np.int32)),
            response_mask=_vectors(table["response_mask"], np.dtype(bool)),
            logprobs={name: _vectors(table[_PREFIX + name], np.dtype(np.float32)) for name in columns},
            sources={name: ColumnSource.read(source) for name, source in note["columns"].items()},
            sampling=note["sampling"],
            values={name.removeprefix(_VALUES): _vectors(table[name], np.dtype(np.float32)) for name in values},
            other_tops={end[1:]: (read["top_ids" + end], read["top_logprobs" + end]) for end in ends if end},
            **{name: read[name] for name in _TOPS if name in read},
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _checksum(document: bytes, table: pa.Table) -> bytes:
    """Returns the CRC-32 of the metadata and of the column names, which no checksum of a page covers."""
    return f"{zlib.crc32(document + repr(table.column_names).encode()):08x}".encode()


def _types(columns: Iterable[str]) -> dict[str, pa.DataType]:
    """Returns the types of the table's fixed columns, and of a column of log-probabilities for each of ``columns``."""
    plain = {"sequence_id": pa.string(), "token_ids": pa.list_(pa.int32()), "response_mask": pa.list_(pa.bool_())}
    return plain | {_PREFIX + name: pa.list_(pa.float32()) for name in columns}


def _check_vectors(what: str, vectors: Sequence[Any], names: Sequence[str], tokens: Sequence[np.ndarray]) -> None:
    if not len(vectors) == len(tokens) == len(names):
        raise ValueError(f"{what} must have {len(names)} sequences, got {len(vectors)} for {len(tokens)} of token ids")
    for name, vector, ids in zip(names, vectors, tokens, strict=True):
        if ids.ndim != 1 or len(ids) < 1:
            raise ValueError(f"sequence {name!r}: token ids must be a vector of at least one, got shape {ids.shape}")
        if vector.shape != ids.shape:
            raise ValueError(f"sequence {name!r}: {what} must have {len(ids)} entries, got shape {vector.shape}")


def _check_tops(dump: TokenDump, top_ids: tuple[np.ndarray, ...], top_logprobs: tuple[np.ndarray, ...]) -> None:
    shapes = [[array.shape for array in arrays] for arrays in (top_ids, top_logprobs)]
    if shapes[0] != shapes[1]:
        raise ValueError("top_ids and top_logprobs must have the same shapes")
    if not top_ids:
        return
    if len(top_ids) != len(dump.token_ids):
        raise ValueError(f"top_ids must have {len(dump.token_ids)} sequences, got {len(top_ids)}")
    k = top_ids[0].shape[-1]
    for name, ids, tokens in zip(dump.sequence_ids, top_ids, dump.token_ids, strict=True):
        if ids.shape != (len(tokens), k) or not k:
            expected = f"{len(tokens)} lists of {k or 'at least 1'} tokens"
            raise ValueError(f"sequence {name!r}: top_ids must have {expected}, got shape {ids.shape}")


def _vectors(column: pa.ChunkedArray, dtype: np.dtype[Any]) -> tuple[np.ndarray, ...]:
    if column.null_count:
        raise ValueError("a row has no list where one is expected")
    if dtype.kind != "f" and any(chunk.flatten().null_count for chunk in column.chunks):
        raise ValueError("a row has a null in its token ids or its mask")
    found: list[np.ndarray] = []
    for chunk in column.chunks:
        flat = np.asarray(chunk.values.to_numpy(zero_copy_only=False), dtype)
        found += [flat[start:end] for start, end in itertools.pairwise(chunk.offsets.to_numpy().tolist())]
    return tuple(found)


def _lists(vectors: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Returns vectors [t] of one dtype as lists, without a Python object for each token."""
    flat = np.concatenate(vectors) if vectors else np.zeros(0)
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, vectors)]), pa.int32()), pa.array(flat, kind))


def _nested(matrices: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Returns matrices [t, k] as lists of lists, without a Python object for each token."""
    k = matrices[0].shape[1]
    flat = np.concatenate([matrix.ravel() for matrix in matrices])
    inner = pa.ListArray.from_arrays(pa.array(np.arange(0, len(flat) + 1, k), pa.int32()), pa.array(flat, kind))
    starts = np.cumsum([0, *map(len, matrices)])
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), inner)


def _matrices(column: pa.ChunkedArray, dtype: Any) -> tuple[np.ndarray, ...]:
    """Returns the lists of lists of each row as a matrix. Raises ValueError if they have several lengths."""
    found = []
    for row in column:
        tokens = row.values
        lengths = np.unique(tokens.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) != 1:
            raise ValueError(f"the likeliest tokens of a row have lists of several lengths: {lengths[:4].tolist()}")
        found.append(np.asarray(tokens.flatten().to_numpy(zero_copy_only=False), dtype).reshape(len(tokens), -1))
    return tuple(found)
