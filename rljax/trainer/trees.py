"""Packs sequences into rows of prefix trees, and their responses into flat rows beside them.

The policy computes the trees, in which a token that several sequences begin with stands once. Everything else works on
the flat rows: the scores of a response's tokens come from the states of the tokens before them in the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from rljax.policy.score import PrefixTrees
from rljax.trainer.packing import Layout, PackedBatch, TrainSequence, deal_rows, fill, lay_out_rows


def common_prefixes(sequences: Sequence[TrainSequence], *, two_levels: bool = False) -> list[int]:
    """Returns how many leading tokens each sequence shares with the one before it; 0 for the first.

    Tokens are shared if they, their routes and all tokens before them are equal. The last token of a sequence is not
    shared, because no token is predicted from it. With ``two_levels`` only whole prompts are shared, so each tree has
    only a root and its branches.
    """

    def common(a: TrainSequence, b: TrainSequence) -> int:
        found = min(len(a.ids), len(b.ids)) - 1
        for name in ("ids", "routes"):  # Only the routes of equal tokens are compared, because each token has many.
            x, y = (s.columns.get(name, s.ids)[:found] for s in (a, b))
            differs = (x != y).any(axis=tuple(range(1, x.ndim)))
            found = int(np.argmax(differs)) if differs.any() else found
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

    It is a multiple of 64, or of 256 above 1,024. A tree that does not fit a row goes on in another one, where its
    prompt is repeated. Candidates hold a prompt and 1, 2, ... responses, all of the largest lengths. The shortest one
    is chosen whose rows of a group have at most an eighth more tokens, with padding, than those of the best candidate.
    """
    lengths, tokens = [], []
    for responses in range(1, group_size + 1):
        length = max(row_tokens, prompt_tokens + responses * response_tokens)
        multiple = 64 if length <= 1024 else 256
        lengths.append(-(-length // multiple) * multiple)
        tokens.append(lengths[-1] * -(-group_size // responses))
    return next(length for length, each in zip(lengths, tokens, strict=True) if 8 * each <= 9 * min(tokens))


def lay_out_trees(
    sequences: Sequence[TrainSequence], shape: tuple[int, int, int], flat_tokens: int, *, two_levels: bool = False
) -> Layout:
    """Lays out sequences in rows of trees of ``shape`` (m, b, t), each beside a flat row of ``flat_tokens`` tokens.

    The layout is the cheapest of several, and of equal ones the first. In the first, the sequences that share half of a
    prompt are placed together, up to a whole row of them. In the second, one row after the other is filled, and a tree
    goes on in the next row. The next two place up to a half or a quarter of a row together, which leaves smaller gaps.
    The last one places each sequence by itself, which always fits. ``two_levels`` is as in ``common_prefixes``.

    Raises:
      ValueError: A sequence is longer than a row, or the sequences need more rows than there are.
    """
    micro_batches, rows_per_micro_batch, row_tokens = shape
    order = sorted(in_tree_order(sequences, range(len(sequences))), key=lambda i: not sequences[i].in_loss)
    common = common_prefixes([sequences[i] for i in order], two_levels=two_levels)

    def cut(limit: int, least_share: float) -> tuple[list[list[int]], list[int]]:
        return _runs(sequences, order, common, limit, least_share, (row_tokens, flat_tokens))

    def in_rows(runs: list[list[int]], lengths: list[int]) -> Layout:
        in_loss = [any(sequences[i].in_loss for i in run) for run in runs]
        layout = lay_out_rows(lengths, in_loss, (len(runs), rows_per_micro_batch, row_tokens))
        return layout._replace(rows={at: [i for run in row for i in runs[run]] for at, row in layout.rows.items()})

    layouts = [in_rows(*cut(row_tokens // parts, 0.5)) for parts in (1, 2, 4, row_tokens)]
    layouts.insert(1, deal_rows(cut(row_tokens, 0.0)[0], [s.in_loss for s in sequences], rows_per_micro_batch))
    layouts = [layout for layout in layouts if layout.used <= micro_batches]
    if not layouts:
        raise ValueError(f"{len(sequences)} sequences do not fit {micro_batches} micro-batches of {shape[1]} rows")
    best = min(layouts, key=lambda layout: layout.cost)

    def shared(row: Sequence[int]) -> int:
        return sum(common_prefixes([sequences[i] for i in row], two_levels=two_levels))

    # Another order of a row's sequences may part neighbours whose routes or prompts are equal.
    rows = {at: max(in_tree_order(sequences, row), row, key=shared) for at, row in best.rows.items()}
    return best._replace(rows=rows)


def _runs(
    sequences: Sequence[TrainSequence],
    order: Sequence[int],
    common: Sequence[int],
    limit: int,
    least_share: float,
    row_tokens: tuple[int, int],
) -> tuple[list[list[int]], list[int]]:
    """Cuts sequences in tree order into runs, lists of indices, which take at most ``limit`` places of a row.

    A run takes as much of a row as its tree, or as its flat row, whichever is more. ``row_tokens`` are the lengths of
    both rows. ``common`` are the ``common_prefixes`` in this order. A new run begins, too, where two neighbours share
    less than ``least_share`` of the shorter prompt. Returns the runs, and the places that each takes.
    """

    def places(tree: int, flat: int) -> int:
        return max(tree, -(-flat * row_tokens[0] // row_tokens[1]))

    runs, lengths = list[list[int]](), list[int]()
    size = 0, 0
    for i, shared in zip(order, common, strict=True):
        s, is_near = sequences[i], False
        if runs:
            is_near = shared >= least_share * min(s.prompt_length, sequences[runs[-1][-1]].prompt_length)
        grown = size[0] + len(s.ids) - 1 - shared, size[1] + len(s.response)
        if is_near and places(*grown) <= limit:
            runs[-1].append(i)
            size, lengths[-1] = grown, places(*grown)
        else:
            runs.append([i])
            size = len(s.ids) - 1, len(s.response)
            lengths.append(places(*size))
    return runs, lengths


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
    tokens, ends, positions = (np.zeros(shape, np.int32) for _ in range(3))
    sources = np.zeros((*shape[:2], flat_tokens), np.int32)
    routes: np.ndarray | None = None
    if sequences and "routes" in sequences[0].columns:
        like = sequences[0].columns["routes"]
        routes = np.zeros((*shape, int(np.prod(like.shape[1:]))), like.dtype)
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
    trees = PrefixTrees(tokens, ends, positions, sources)
    return batch._replace(routes=routes, trees=trees, with_loss=np.asarray(layout.with_loss, np.int32))
