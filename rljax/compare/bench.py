"""The rows of a mismatch bench: each form of an engine scores the same tokens, with its noise floors beside it.

A form is an engine in one dtype that computes log-probabilities on one path. Its gap is measured against a reference,
which is the forward pass of this library unless another scorer is named.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.compare.scorers import check_vocabulary, counted, local_source, score_column
from rljax.mismatch import mismatch_metrics
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.record.token_dumps import SECOND_RUN, ColumnSource, TokenDump
from rljax.rollout.kinds import engines_that
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.exact import ExactPass
from rljax.trainer.objective import Objective
from rljax.trainer.precision import PrecisionConfig

PATHS = {
    "jax": {"forward": "jax", "prefill": "jax-prefill", "decode": "jax-decode"},
    "exact": {"forward": "exact"},
    "transformers": {"forward": "hf"},
    "vllm": {"prefill": "vllm", "decode": "vllm-decode"},
}
"""The kind of scorer of each path, by the engine's name in the bench."""

METRICS = ("logprob_abs_diff_mean", "k3_kl", "logprob_abs_diff_max", "extreme_rate", "log_ppl_abs_diff")
COUNTS = ("token_count", "nonfinite_count")
Floor = Literal["shape", "repeat"]
FLOORS: tuple[Floor, ...] = ("shape", "repeat")
"""The noise floors: the same engine at another batch size, and the same engine at the same size once more."""

Vectors = Sequence[np.ndarray]
Score = Callable[[int], tuple[Vectors, ColumnSource]]


class Form(NamedTuple):
    """One row of a bench."""

    engine: str
    dtype: str
    path: str
    length: int  # the length of the scored responses, in tokens

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Form:
        """Returns the form of a row of the bench's document."""
        return cls(*(row[name] for name in cls._fields))

    @property
    def column(self) -> str:
        """The name of the form's column in the dump of its length, as ``rljax compare`` names columns."""
        return f"{PATHS[self.engine][self.path]}:{self.dtype}".replace("vllm-decode", "vllm-forced")


def score_form(
    form: Form, dump: TokenDump, model: Path, address: str, batch_size: int, progress: Callable[[int], object]
) -> tuple[Vectors, ColumnSource]:
    """Scores a dump with a form. Returns the log-probabilities of each sequence, float32 [t] (nats), and their source.

    ``address`` is the URL of the form's server. It is empty if this process computes the log-probabilities.
    """
    if form.engine in engines_that("is_exact"):
        vectors = list(counted(exact_logprobs(model, form.dtype, dump, batch_size), progress))
        return vectors, local_source("exact", form.dtype, 1.0, model)
    spec = f"{PATHS[form.engine][form.path]}:{address or form.dtype}"
    return score_column(spec, dump, model, batch_size=batch_size, progress=progress)


def exact_logprobs(model: Path, dtype: str, dump: TokenDump, batch_size: int) -> Iterator[np.ndarray]:
    """Yields the log-probabilities of each sequence from the exact engine's executable, float32 [t] (nats).

    The engine samples and trains with this executable. Position 0 is NaN.
    """
    policy, longest = read_config(model), max(map(len, dump.token_ids))
    check_vocabulary(dump, policy.vocab_size)
    objective = Objective(LossConfig(), CorrectionConfig(), batch_size, longest)
    exact = ExactPass(
        policy,
        make_mesh(MeshConfig(), jax.devices()[:1]),
        precision=PrecisionConfig(dtype),  # type: ignore[arg-type]
        objective=objective,
        rows=batch_size,
        row_tokens=longest,
    )
    params = load_params(model, policy)
    for start in range(0, len(dump.token_ids), batch_size):
        tokens, lengths = np.zeros((batch_size, longest), np.int32), np.zeros(batch_size, np.int32)
        for row, ids in enumerate(dump.token_ids[start : start + batch_size]):
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        after = exact.log_softmax(params, tokens, lengths, 1.0)
        picked = np.asarray(jnp.take_along_axis(after[:, :-1], tokens[:, 1:, None], axis=-1))[..., 0]
        for row, length in enumerate(lengths[lengths > 0]):
            yield np.concatenate([np.full(1, np.nan, np.float32), picked[row, : length - 1]])


def of_responses(dump: TokenDump, vectors: Vectors) -> np.ndarray:
    """Returns the log-probabilities of the response tokens, [n, t]. All responses must have the same length."""
    return np.stack([vector[mask] for vector, mask in zip(vectors, dump.response_mask, strict=True)])


def measure_form(
    form: Form, dump: TokenDump, reference: str, score: Score, batch_size: int, floors: Sequence[Floor]
) -> tuple[dict[str, Any], TokenDump]:
    """Measures one row of a bench. Returns its numbers, and the dump with the form's new columns.

    The dump gets the form's log-probabilities. With the floor "shape" (of ``FLOORS``) it also gets those at the other
    batch size: half of ``batch_size``, or 2 if that is 1. The gap is measured against the column ``reference``, which
    the dump has unless it is the form's own. ``score`` scores the dump in batches of the size that it gets.

    Raises:
      ValueError: The engine has another dtype than the form or other weights than the reference, or no token has a
        finite number on both sides.
    """
    start = time.perf_counter()
    vectors, source = score(batch_size)
    seconds = time.perf_counter() - start
    if source.dtype and source.dtype != form.dtype:
        raise ValueError(f"the engine computes in {source.dtype}, expected {form.dtype}")
    dump = dump.with_column(form.column, vectors, source)
    hashes = {source.weights_hash, dump.sources[reference].weights_hash} - {""}
    if len(hashes) > 1:
        raise ValueError("the engine holds other weights than the reference")
    own, theirs = of_responses(dump, vectors), of_responses(dump, dump.logprobs[reference])
    row: dict[str, Any] = {
        "program": source.engine,
        "form": source.form,
        "reference": reference,
        **_gap(theirs, own),
        "seconds": seconds,
    }
    for floor in floors:
        again, _ = score(batch_size if floor == "repeat" else batch_size // 2 or 2)
        row[f"floor_{floor}"] = _gap(own, of_responses(dump, again))["logprob_abs_diff_mean"]
        if floor == "shape":
            dump = dump.with_column(form.column + SECOND_RUN, again, source)
    return row, dump


def _gap(trainer: np.ndarray, rollout: np.ndarray) -> dict[str, float]:
    metrics = mismatch_metrics(trainer, rollout, np.ones(trainer.shape, bool))
    if not metrics["token_count"]:
        raise ValueError(f"none of the {trainer.size} tokens has a finite log-probability on both sides")
    return {name: metrics[name] for name in (*METRICS, *COUNTS)}


def reason_of(error: BaseException) -> str:
    """Returns the first line of an error's message, at most 300 characters, without this machine's paths and URLs.

    The type of the error is named, too, unless it is a ValueError, RuntimeError or OSError with a message.
    """
    first = next(filter(None, map(str.strip, str(error).splitlines())), "")
    named = first if first and isinstance(error, (ValueError, RuntimeError, OSError)) else repr(error)
    return without_places(named)[:300].rstrip(":")


def without_places(text: str) -> str:
    """Returns a text in which only the last part of each absolute path is left, and "URL" stands for each URL."""
    part = r"[^\s/'\":;,()]+"
    return re.sub(rf"(?<![\w.~/-])~?(?:/{part})*/({part})/?", r"\1", re.sub(r"https?://\S+", "URL", text))


HEAD = (
    *("engine", "path", "dtype", "length", "tokens", "mean gap", "floor: shape", "floor: repeat", "k3", "max gap"),
    *("beyond 0.5", "log_ppl_abs_diff", "seconds", "note"),
)


def bench_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Returns the table of a bench as rows of cells, the head first, sorted by length, dtype, engine and path."""
    order = sorted(document["rows"], key=lambda row: (row["length"], row["dtype"], row["engine"], row["path"]))
    return [list(HEAD), *map(_cells, order)]


def _cells(row: Mapping[str, Any]) -> list[str]:
    form = [str(row[name]) for name in ("engine", "path", "dtype", "length")]
    form[2] += f" ({row['form']})" if row.get("form") else ""
    if "reason" in row:
        return [*form, *[""] * (len(HEAD) - len(form) - 1), row["reason"]]
    names = ("logprob_abs_diff_mean", "floor_shape", "floor_repeat", *METRICS[1:], "seconds")
    numbers = [f"{row[name]:.3g}" if name in row else "" for name in names]
    lost = f"{row['nonfinite_count']:.0f} tokens are not finite" if row["nonfinite_count"] else ""
    note = "the reference" if row["reference"] == Form.of(row).column else lost
    return [*form, f"{row['token_count']:.0f}", *numbers, note]
