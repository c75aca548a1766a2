"""Packs sequences into rows of prefix trees, and their responses into flat rows beside them.

The policy computes the trees, in which a token that several sequences begin with stands once. Everything else works on
the flat rows: the scores of a response's tokens come from the states of the tokens before them in the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from rljax.policy.trees import PrefixTrees
from rljax.sharding import zeros_to_put
from rljax.trainer.packing import PackedBatch, PackingConfig, TrainSequence, fill
from rljax.trainer.rows import Layout, deal_rows, lay_out_rows


def common_prefixes(sequences: Sequence[TrainSequence], *, two_levels: bool = False) -> list[int]:
    """Returns how many leading tokens each sequence shares with the one before it; 0 for the first.

    Tokens are shared if they, their routes and all tokens before them are equal. The last token of a sequence is not
    shared, because no token is predicted from it. With ``two_levels`` only whole prompts are shared, so a tree has a
    root and branches alone.
    """

    def common(a: TrainSequence, b: TrainSequence) -> int:
        n = min(len(a.ids), len(b.ids)) - 1
        differs = a.ids[:n] != b.ids[:n]
        if "routes" in a.columns:
            differs |= (a.columns["routes"][:n] != b.columns["routes"][:n]).reshape(n, -1).any(axis=1)
        found = int(np.argmax(differs)) if differs.any() else n
        if not two_levels:
            return found
        return a.prompt_length if a.prompt_length == b.prompt_length <= found else 0

    return [0, *itertools.starmap(common, itertools.pairwise(sequences))][: len(sequences)]


def in_tree_order(sequences: Sequence[TrainSequence], indices: Sequence[int]) -> list[int]:
    """Orders indices of sequences by their tokens, so that sequences with a common beginning are neighbours."""
    return sorted(indices, key=lambda i: (sequences[i].ids[:-1].astype(">u4").tobytes(), i))


def flat_row_tokens(row_tokens: int, prompt_tokens: int, response_tokens: int, group_size: int) -> int:
    """Returns the length of the flat rows of responses, a multiple of 64 or the length of a row of trees.

    A tree has a prompt of at most ``prompt_tokens`` tokens and ``group_size`` responses of at most ``response_tokens``.
    The head computes padding, too, so flat rows are short: they hold the responses of a full row of trees whose prompts
    have half of their largest length.
    """
    responses = group_size * response_tokens
    share = -(-row_tokens * responses // (responses + prompt_tokens // 2))
    return min(row_tokens, -(-max(share, response_tokens) // 64) * 64)


def tree_row_tokens(row_tokens: int, prompt_tokens: int, response_tokens: int, group_size: int) -> int:
    """Returns the length of rows of trees, at least ``row_tokens``, which holds one sequence of any length.

    A tree that does not fit a row goes on in another one, where its prompt is repeated. Rows are long enough for a
    whole group, or for so many of its longest responses that the repeated prompt has at most a quarter of their tokens.
    ``PackingConfig.resolve_row_tokens`` rounds the length up.
    """
    responses = min(group_size, -(-4 * prompt_tokens // response_tokens))
    wanted = max(row_tokens, prompt_tokens + responses * response_tokens)
    return PackingConfig().resolve_row_tokens(wanted)


def lay_out_trees(
    sequences: Sequence[TrainSequence], shape: tuple[int, int, int], flat_tokens: int, *, two_levels: bool = False
) -> Layout:
    """Lays out sequences in rows of trees of ``shape`` (m, b, t), each beside a flat row of ``flat_tokens`` tokens.

    The layout is the cheapest of three. In the first, trees of sequences that share half of a prompt stay whole where
    they fit a row. In the second, one row after the other is filled, and a tree goes on in the next row. The third
    places sequences as if they shared nothing, which always fits. ``two_levels`` is as in ``common_prefixes``.

    Raises:
      ValueError: A sequence is longer than a row, or the sequences need more rows than there are.
    """
    order = sorted(in_tree_order(sequences, range(len(sequences))), key=lambda i: not sequences[i].in_loss)
    common = common_prefixes([sequences[i] for i in order], two_levels=two_levels)
    limits, alone = (shape[2], flat_tokens), [(len(s.ids), len(s.response)) for s in sequences]
    trees, sizes = _runs(sequences, order, common, limits, 0.5)
    rows, _ = _runs(sequences, order, common, limits, 0.0)
    layouts = [
        _in_rows(sequences, trees, sizes, shape, flat_tokens, two_levels),
        deal_rows(rows, [s.in_loss for s in sequences], shape[1]),
        _in_rows(sequences, [[i] for i in range(len(sequences))], alone, shape, flat_tokens, two_levels),
    ]
    layouts = [layout for layout in layouts if layout.used <= shape[0]]
    if not layouts:
        raise ValueError(f"{len(sequences)} sequences do not fit {shape[0]} micro-batches of {shape[1]} rows")
    return min(layouts, key=lambda layout: layout.cost)


def _runs(
    sequences: Sequence[TrainSequence],
    order: Sequence[int],
    common: Sequence[int],
    limits: tuple[int, int],
    least_share: float,
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Cuts sequences in tree order into runs whose trees and flat rows have at most ``limits`` tokens.

    ``common`` are the ``common_prefixes`` in this order. A new run begins, too, where two neighbours share less than
    ``least_share`` of the shorter prompt. Returns the indices of each run, and the tokens of its tree and of its flat
    row.
    """
    runs: list[list[int]] = []
    sizes: list[tuple[int, int]] = []
    for i, shared in zip(order, common, strict=True):
        s = sequences[i]
        own, response = len(s.ids) - 1, len(s.response)
        if runs and shared >= least_share * min(s.prompt_length, sequences[runs[-1][-1]].prompt_length):
            grown = sizes[-1][0] + own - shared, sizes[-1][1] + response
            if grown[0] <= limits[0] and grown[1] <= limits[1]:
                runs[-1].append(i)
                sizes[-1] = grown
                continue
        runs.append([i])
        sizes.append((own, response))
    return runs, sizes


def _in_rows(
    sequences: Sequence[TrainSequence],
    runs: Sequence[Sequence[int]],
    sizes: Sequence[tuple[int, int]],
    shape: tuple[int, int, int],
    flat_tokens: int,
    two_levels: bool,
) -> Layout:
    """Lays out runs in rows. A run takes as much of a row as its tree, or as its flat row, whichever is more."""
    _, rows_per_micro_batch, row_tokens = shape
    lengths = [max(tree, -(-flat * row_tokens // flat_tokens)) for tree, flat in sizes]
    in_loss = [any(sequences[i].in_loss for i in run) for run in runs]
    layout = lay_out_rows(lengths, in_loss, (len(runs), rows_per_micro_batch, row_tokens))
    rows = {}
    for place, members in layout.rows.items():
        row = [i for run in members for i in runs[run]]
        # Another order of a row's sequences may part neighbours whose routes or prompts are equal.
        orders = in_tree_order(sequences, row), row
        rows[place] = max(
            orders, key=lambda each: sum(common_prefixes([sequences[i] for i in each], two_levels=two_levels))
        )
    return layout._replace(rows=rows)


def pack_trees(
    sequences: Sequence[TrainSequence],
    *,
    row_tokens: int,
    rows_per_micro_batch: int,
    micro_batches: int,
    flat_tokens: int,
    with_tops: bool = True,
    two_levels: bool = False,
) -> PackedBatch:
    """Packs sequences into trees [micro_batches, rows_per_micro_batch, row_tokens], and their responses into flat rows.

    The arrays of the batch have flat rows of ``flat_tokens`` tokens. Each row of trees has all that its flat row needs.
    ``with_tops`` is as in ``packing.fill``, and ``two_levels`` as in ``common_prefixes``. The result depends only on
    the sequences and their order.

    Raises:
      ValueError: The sequences do not fit, or only some of them have one of the optional arrays.
    """
    shape = (micro_batches, rows_per_micro_batch, row_tokens)
    layout = lay_out_trees(sequences, shape, flat_tokens, two_levels=two_levels)
    batch = fill(sequences, layout.rows, (*shape[:2], flat_tokens), with_tops=with_tops, responses_only=True)
    trees, routes = _fill_trees(sequences, layout, shape, flat_tokens, two_levels)
    return batch._replace(routes=routes, trees=trees, with_loss=np.asarray(layout.with_loss, np.int32))


def _fill_trees(
    sequences: Sequence[TrainSequence],
    layout: Layout,
    shape: tuple[int, int, int],
    flat_tokens: int,
    two_levels: bool,
) -> tuple[PrefixTrees, np.ndarray | None]:
    """Returns the trees of a layout, and the routes of their tokens; None if the sequences have none."""
    tokens, ends, positions = (zeros_to_put(shape, np.int32) for _ in range(3))
    sources = zeros_to_put((*shape[:2], flat_tokens), np.int32)
    routes: np.ndarray | None = None
    if sequences and "routes" in sequences[0].columns:
        like = sequences[0].columns["routes"]
        routes = zeros_to_put((*shape, int(np.prod(like.shape[1:]))), like.dtype)
    for row, members in layout.rows.items():
        chosen = [sequences[i] for i in members]
        path = np.zeros(max(len(s.ids) for s in chosen), np.int64)  # the places of a sequence's tokens
        place = first = before = 0
        for s, common in zip(chosen, common_prefixes(chosen, two_levels=two_levels), strict=True):
            ends[row][path[common:before]] = place  # no later sequence goes on from these tokens
            own = len(s.ids) - 1
            end = place + own - common
            path[common:own] = np.arange(place, end)
            tokens[row][place:end] = s.ids[common:own]
            positions[row][place:end] = np.arange(common, own)
            if routes is not None:
                routes[row][place:end] = s.columns["routes"][common:own].reshape(own - common, routes.shape[-1])
            count = own + 1 - s.prompt_length
            sources[row][first : first + count] = path[s.prompt_length - 1 : own]
            place, first, before = end, first + count, own
        ends[row][path[:before]] = place
    return PrefixTrees(tokens, ends, positions, sources), routes


def routes_of_paths(values: np.ndarray, batch: PackedBatch, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """Returns the routes of all tokens of each sequence, prompts included, from the routes of trees [m, b, t, ...].

    The last token of a sequence has the route 0, because it is not in the tree.
    """
    ends, sources = np.asarray(batch.trees.ends), np.asarray(batch.trees.sources)
    found: list[np.ndarray] = [values[:0]] * len(sequences)
    for row in zip(*np.nonzero(np.any(batch.segment_ids, axis=2)), strict=True):
        segments, ids = batch.segment_ids[row], batch.sequence_ids[row]
        lasts = np.flatnonzero(np.diff(segments, append=0) * (segments > 0))
        for last in lasts.tolist():
            source = int(sources[row][last])
            path = np.flatnonzero(ends[row][: source + 1] > source)  # the token and all before it on its path
            found[int(ids[last])] = np.concatenate([values[row][path], np.zeros_like(values[row][:1])])
    return found
