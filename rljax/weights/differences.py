"""Whether a server holds the trainer's weights: which tensors' checksums differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljax.weights.checksum import Checksum, checksum

# A tied head is no tensor of the trainer's: it is the embedding.
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_NAMED = 4  # differing tensors that a message names


def differences(expected: Mapping[str, Checksum], workers: Sequence[Mapping[str, Checksum | None]]) -> list[str]:
    """Each tensor whose bits differ, with how in brackets; none when a server holds exactly ``expected``.

    A tensor may be whole on several workers, or in parts whose counts add up to the whole, or in parts of which each
    is on as many workers as others (key-value heads, where there are more workers than heads).

    Args:
      expected: the trainer's tensors by name.
      workers: of each worker the tensors it holds by name; None for one that was not loaded.
    """
    found = []
    for name in dict.fromkeys([*expected, *(name for worker in workers for name in worker)]):
        wanted = expected.get(name) or expected.get(_TIED.get(name, ""))
        parts = [worker[name] for worker in workers if name in worker]
        if wanted is None:
            found.append(f"{name} (the trainer has none)")
        elif not parts or None in parts:
            found.append(f"{name} (not loaded)")
        elif how := _difference(wanted, [part for part in parts if part is not None]):
            found.append(f"{name} ({how})")
    return found


def _difference(wanted: Checksum, parts: Sequence[Checksum]) -> str:
    if all(part.count == wanted.count for part in parts):
        return "" if all(part == wanted for part in parts) else "other bits"
    count = sum(part.count for part in parts)
    if count % wanted.count:
        return f"{count} elements instead of {wanted.count}"
    copies = count // wanted.count
    # The places of parts are the workers' affair, so their third sums say nothing here.
    together = checksum(count, sum(part.first for part in parts), sum(part.second for part in parts), 0)
    same = together == checksum(count, copies * wanted.first, copies * wanted.second, 0)
    return "" if same else "other bits"


def described(found: Sequence[str]) -> str:
    """How many of :func:`differences` there are, and the first few."""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{len(found)} {'tensors differ' if found[1:] else 'tensor differs'}: {', '.join(found[:_NAMED])}{more}"
