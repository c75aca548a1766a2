"""The part of ``rljax compare`` that looks into two scorers: the layer and operation at which they part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rljax.compare.layers.differences import compare_layers
from rljax.compare.layers.findings import judge_layers
from rljax.compare.layers.picture import plot_layers
from rljax.compare.layers.tables import Judged, layers_json, layers_markdown, layers_text
from rljax.compare.layers.tracers import check_traced, open_tracer
from rljax.compare.scorers import check_vocabulary
from rljax.errors import ConfigError
from rljax.policy.config import SIZES, PolicyConfig
from rljax.record.token_dumps import TokenDump, write_dump

if TYPE_CHECKING:
    from rljax.commands.compare import Arguments


def choose_sequence(dump: TokenDump, name: str | None, longest: int) -> np.ndarray:
    """Returns the first ``longest`` tokens of a sequence, int32 [t]. None for ``name`` means the longest sequence.

    Raises ConfigError if there is no such sequence, or it has fewer than 2 tokens.
    """
    if name is not None and name not in dump.sequence_ids:
        raise ConfigError(f"--sequence: no sequence {name!r} among the {len(dump.sequence_ids)} there")
    lengths = [len(ids) for ids in dump.token_ids]
    place = int(np.argmax(lengths)) if name is None else list(dump.sequence_ids).index(name)
    tokens = np.asarray(dump.token_ids[place][:longest], np.int32)
    if len(tokens) < 2:
        raise ConfigError(f"--layers needs a sequence of at least 2 tokens, got {len(tokens)}")
    return tokens


def run_layers(dump: TokenDump, options: Arguments) -> int:
    """Compares the first scorer with each other one, writes the reports, and returns the exit status."""
    scorers, model, out = options.scorer, options.model, options.out
    if len(scorers) < 2:
        raise ConfigError(f"--layers compares the first --scorer with each other one, got {len(scorers)}")
    if options.layer_tokens < 2:
        raise ConfigError(f"--layer-tokens must be at least 2, got {options.layer_tokens}")
    for spec in scorers:
        check_traced(spec)
    tokens = choose_sequence(dump, options.sequence, options.layer_tokens)
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
    for name in (*SIZES, "num_experts", "family"):
        got, wanted = getattr(config, name), getattr(expected, name)
        if got != wanted:
            raise ConfigError(f"scorer {spec!r} has {name} = {got}, expected {wanted}, that of {first}")
