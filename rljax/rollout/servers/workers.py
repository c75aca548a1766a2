"""What is asked of a server's workers, whatever the server's kind: pulls, and the checksums of what was loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljax.errors import ReplyError, ServerGoneError, VerificationError
from rljax.rollout.servers.backend import Loaded
from rljax.weights.checksum import Checksum
from rljax.weights.directory import WeightVersion

_POLL_S = 0.05

# (method, arguments) to the answer of each worker.
Ask = Callable[..., Sequence[Any]]


def pull(
    ask: Ask, url: str, version: WeightVersion, timeout_s: float, *, keep_delta: bool = False
) -> Mapping[str, Any]:
    """See Backend.prepare. The workers start the pull, and are asked how far it is, so that no request waits for it."""
    if not version.source:
        return {}
    name, begun = version.path.name, time.monotonic()
    ask("rljax_pull", name, *([True] if keep_delta else []))
    while time.monotonic() - begun < timeout_s:
        answers = ask("rljax_pulled", name)
        try:
            done = [worker for worker in answers if worker is not None]
            failed = [worker["error"] for worker in done if worker["error"]]
        except (KeyError, TypeError) as error:
            raise ReplyError(f"{url} answered without {error}: {str(answers)[:300]}") from error
        if failed:
            raise ServerGoneError(f"{url} could not pull {version.tag}: {failed[0]}")
        if len(done) == len(answers):
            return max(done, key=lambda worker: worker["seconds"])
        time.sleep(_POLL_S)
    raise ServerGoneError(f"{url} did not pull {version.tag} within {timeout_s:g} s")


def loaded(ask: Ask, url: str, version: WeightVersion) -> Sequence[Loaded]:
    """See Backend.loaded."""
    answers = ask("rljax_checksums")
    try:
        tags = {worker["tag"] for worker in answers}
        if tags != {version.tag}:
            raise VerificationError(f"{url} was last given the weights {sorted(tags)}, not {version.tag!r}")
        return [
            Loaded(
                {name: sums and Checksum(*sums) for name, sums in each["tensors"].items()},
                each["seconds"],
                bool(each.get("in_place")),
            )
            for each in answers
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ReplyError(f"{url} answered without {error}: {str(answers)[:300]}") from error
