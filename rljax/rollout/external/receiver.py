"""The HTTP server at which the trainer receives trajectories of another program.

``POST /trajectories`` takes rows as JSON (one object, or an array), as JSON lines, or as msgpack (an array). It answers
once the rows are in a file of the run. So a trainer that is killed loses no row that it acknowledged. ``GET /policy``
tells the newest policy version. docs/external_trajectories.md lists the answers.

Of a body only the rows are decoded. So memory is bounded by a small multiple of the body's size, whatever it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rljax.distributed.files import write_durably
from rljax.errors import naming
from rljax.rollout.external.queue import TrajectoryQueue, parse_address
from rljax.rollout.external.rows import PostedRow, RowLimits, Trajectory, read_trajectories, row_type
from rljax.weights.access import KEY_FILE, listen, serving_key
from rljax.weights.http_limits import WAIT_S, limited_server

MOST_ROWS = 8192
"""The most rows of one request. To check them takes a few seconds, in which other requests wait."""
JSON, LINES, MSGPACK = "application/json", ("application/jsonl", "application/x-ndjson"), "application/msgpack"
"""The content types: JSON (one object, or an array), JSON lines, and msgpack (an array)."""

_PYTHON = {b"NaN": b"null", b"Infinity": b"1e308"}  # what JSON has for the numbers that Python writes
MOST_BYTES = 64 * 2**20  # the largest request (bytes)
_SMALL_BYTES = 2**20  # the most bytes of a request that may arrive without one of the places for large requests
_LARGE_AT_ONCE = 4  # the most large requests that are in memory at the same time; further ones wait
_LEAST_RATE = 256 * 2**10  # the least rate at which a body must arrive, after ``WAIT_S`` (bytes a second)
_START_S = 10.0  # the longest time that the server may take to start (seconds)


class RefusedError(ValueError):
    """An error of a request that is refused. The answer has the HTTP status ``status`` and one line of text."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


class Receiver:
    """Receives trajectories for a queue. The rows of each request stay in a file of the queue until steps used them.

    ``url`` is the address of the server. After ``start`` it has the port that was chosen.
    """

    def __init__(
        self,
        url: str,
        queue: TrajectoryQueue,
        *,
        max_groups: int,
        facts: dict[str, int],
        api_key_file: str | None = None,
    ) -> None:
        """Checks the address and the key. It opens nothing yet.

        Args:
          url: The address to bind to, http://HOST:PORT. Port 0 means a free one.
          max_groups: The most groups that may wait. A request that would exceed it is answered with 429.
          facts: The numbers of the run that ``GET /policy`` tells besides the version.
          api_key_file: The file with the key that requests must carry. None: the file that ``$RLJAX_API_KEY_FILE``
            names, or no key if that is not set.

        Raises:
          ValueError: The address or the key cannot be used, or other machines could reach the address without a key.
        """
        self._host, self._port = parse_address(url)
        remedy = f"rollout.api_key_file or {KEY_FILE} must name a key file"
        with naming("rollout.trajectories"):
            self._key_file = serving_key(self._host, api_key_file, remedy)
        self.url = url
        self._queue = queue
        self._max_groups, self._facts = max_groups, facts
        self._last = 0
        self._keys: set[str] = set()  # the digest of the idempotency key of each request whose file is there
        self._read = make_reader(queue.limits)
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._decoding = asyncio.Semaphore(1)
        self._writing = threading.Lock()

    def start(self) -> None:
        """Starts the server on a thread.

        Raises OSError if the address cannot be bound, and RuntimeError if the server does not start in time.
        """
        for path in self._queue.directory.glob("*.jsonl"):
            number, _, digest = path.stem.partition("-")
            self._last = max(self._last, int(number) if number.isdecimal() else 0)
            self._keys |= {digest} - {""}
        self._socket, self.url = listen(self._host, self._port)
        routes = [Route("/trajectories", self._post, methods=["POST"]), Route("/policy", self._policy)]
        self._server = limited_server(routes, self._host, self._key_file)
        run = functools.partial(self._server.run, sockets=[self._socket])
        self._thread = threading.Thread(target=run, name="rljax-trajectories", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"the server of rollout.trajectories did not start at {self.url}")
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the server. Requests under way have a few seconds to be answered, and are then given up."""
        self._server.should_exit = True
        self._thread.join(5.0)
        self._server.force_exit = True
        self._socket.close()

    def delete_finished(self, step: int) -> None:
        """Deletes the files whose last row was used at ``step`` or before, and forgets the keys of their requests."""
        self._keys -= {name.removesuffix(".jsonl").partition("-")[2] for name in self._queue.delete_finished(step)}

    async def _policy(self, _: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self._told))

    async def _post(self, request: Request) -> Response:
        key = request.headers.get("idempotency-key")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if kind not in (JSON, *LINES, MSGPACK):
                known = ", ".join((JSON, *LINES, MSGPACK))
                raise RefusedError(415, f"POST: content-type must be one of {known}, got {kind[:60] or 'none'}")
            async with contextlib.AsyncExitStack() as place:
                body = await self._body(request, place)
                async with self._decoding:
                    return JSONResponse(await run_in_threadpool(self._accept, body, kind, key))
        except RefusedError as error:
            headers = {"retry-after": "1"} if error.status == 429 else {}
            return PlainTextResponse(f"{error}\n", error.status, headers=headers)

    async def _body(self, request: Request, place: contextlib.AsyncExitStack) -> bytearray:
        """Returns the body of a request. Only a few large bodies are read at a time, until ``place`` is left.

        Raises RefusedError if the body is too large or too slow, or the client goes away.
        """
        too_large = RefusedError(413, f"POST: a request may have {MOST_BYTES} bytes at most; send fewer rows at a time")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MOST_BYTES:
            raise too_large
        body, left, clock = bytearray(), WAIT_S, asyncio.get_running_loop().time
        parts = aiter(request.stream())
        try:
            while True:
                began = clock()
                async with asyncio.timeout(left):
                    part = await anext(parts, None)
                if part is None:
                    return body
                left = min(WAIT_S, left - (clock() - began) + len(part) / _LEAST_RATE)
                if len(body) <= _SMALL_BYTES < len(body) + len(part):
                    await place.enter_async_context(self._large)
                body += part
                if len(body) > MOST_BYTES:
                    raise too_large
        except TimeoutError as error:
            raise RefusedError(408, f"POST: the request kept this server waiting for {WAIT_S:g} s") from error
        except ClientDisconnect as error:
            raise RefusedError(400, "POST: the connection was closed") from error

    def _accept(self, body: bytearray, kind: str, key: str | None) -> dict[str, int]:
        """Checks the rows of a request, keeps them unless ``key`` was there before, and returns the answer."""
        digest = "" if key is None else hashlib.sha256(key.encode()).hexdigest()[:32]
        refused = ""
        try:
            trajectories, lines = self._check(body, kind)
        except (ValueError, TypeError, OverflowError) as error:
            refused = " ".join(str(error).split())
        if refused:  # not raised from the error, which keeps all that was decoded
            raise RefusedError(400, refused)

        def write() -> str:
            self._last = max(time.time_ns(), self._last + 1)
            name = f"{self._last:020d}-{digest}.jsonl" if digest else f"{self._last:020d}.jsonl"
            write_durably(self._queue.directory / name, b"\n".join([*lines, b""]))
            self._keys |= {digest} - {""}
            return name

        whole = sum(-(-size // self._queue.group_size) for size in Counter(one.group for one in trajectories).values())
        if whole > self._max_groups:
            raise RefusedError(
                413, f"POST: {whole} groups, and at most {self._max_groups} may wait; send fewer at once"
            )
        full = f"POST: {self._max_groups} groups wait already, complete or not; complete them, or send the rows later"
        try:
            with self._writing:
                if digest not in self._keys and not self._queue.add(trajectories, self._max_groups, write):
                    raise RefusedError(429, full)
        except OSError as error:
            said = f"POST: the rows cannot be kept in {self._queue.directory}: {error.strerror}"
            raise RefusedError(503, said) from error
        return {"rows": len(lines)} | self._told()

    def _check(self, body: bytearray, kind: str) -> tuple[list[Trajectory], list[bytes]]:
        """Returns the trajectories of a body, and a line of JSON for each row. Raises ValueError if a row is wrong."""
        rows = self._read(body, kind)
        trajectories = read_trajectories(rows, "POST", self._queue.limits)
        self._queue.check_versions(trajectories, "POST")
        return trajectories, [msgspec.json.encode(row) for _, row in rows]

    def _told(self) -> dict[str, int]:
        return {
            "policy_version": self._queue.version,
            "waiting_groups": sum(self._queue.counts()[:2]),  # the complete ones
            "max_waiting_groups": self._max_groups,
            **self._facts,
        }


def make_reader(limits: RowLimits) -> Callable[[bytes | bytearray, str], list[tuple[int, PostedRow]]]:
    """Returns a function from a body and its content type to the rows with their numbers, from 1.

    The function raises ValueError with one line if the body cannot be read, or has no row or more than ``MOST_ROWS``.
    """
    row: Any = row_type(limits)
    rows: Any = Annotated[list[row], msgspec.Meta(max_length=MOST_ROWS)]
    one, several = msgspec.json.Decoder(row), msgspec.json.Decoder(rows | row)
    packed = msgspec.msgpack.Decoder(rows | row)

    def read(body: bytes | bytearray, kind: str) -> list[tuple[int, PostedRow]]:
        if kind in LINES:
            found = []
            for number, line in enumerate((line for line in io.BytesIO(body) if line.strip()), 1):
                if number > MOST_ROWS:
                    raise ValueError(f"POST: a request may have {MOST_ROWS} rows at most")
                found.append(_decode(one, line, f"POST: row {number}"))
        else:
            values = _decode(packed if kind == MSGPACK else several, body, "POST")
            found = values if isinstance(values, list) else [values]
        if not found:
            raise ValueError("POST: the request has no row")
        return list(enumerate(found, 1))

    return read


def _decode(decoder: Any, body: bytes | bytearray, place: str) -> Any:
    """Returns the decoded values. Raises ValueError with one line that names the row and the column."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if not isinstance(decoder, msgspec.json.Decoder) or not re.search(rb"NaN|Infinity", body):
                raise
            return decoder.decode(_without_nan(body))
    except msgspec.ValidationError as error:
        raise ValueError(f"{place}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON or msgpack that can be read ({error})") from error


def _without_nan(text: bytes | bytearray) -> bytes:
    """Returns a JSON text that has null for each NaN outside of strings, and 1e308 for each Infinity."""
    hidden = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    plain, end, in_string = bytearray(), 0, False
    for found in re.finditer(rb"NaN|Infinity", hidden):
        in_string ^= hidden.count(b'"', end, found.start()) % 2 == 1
        plain += text[end : found.start()] + (found[0] if in_string else _PYTHON[found[0]])
        end = found.end()
    return bytes(plain + text[end:])
