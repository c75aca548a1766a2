"""Finds functions and classes of a user's own code by name, and describes the errors of that code in one line."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib.util
import os
import pkgutil
import re
import sys
import sysconfig
import threading
import traceback
import zlib
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rljax.errors import describe

_MODULE = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")
_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+(\.\w+)*)", re.DOTALL)
_OURS = os.path.join(os.path.dirname(__file__), "")
_NOT_THEIRS = (_OURS, "<", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_LOOPS = threading.local()  # the runner of each thread


def find(path: str, kind: str) -> Any:
    """Returns the object of a user's code with the name ``package.module:name`` or ``FILE.py:name``.

    Modules of the current directory are found, however the program was started. ``kind`` is the word for such an object
    in messages.

    Raises:
      ValueError: The name has another form, there is no such file, module or object, or its import fails.
    """
    if not (_MODULE.fullmatch(path) or _FILE.fullmatch(path)):
        raise ValueError(f"{kind} {path!r} is not of the form package.module:name or FILE.py:name")
    try:
        return load(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a person's module may raise anything, SystemExit included
        raise ValueError(f"{kind} {path!r} cannot be imported: {located(error)}") from error


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine of a user's code. The tasks that it leaves are cancelled.

    All coroutines of a thread run in one event loop, because a client of theirs keeps its connections in a loop. Each
    has its own copy of the context variables.
    """
    if not hasattr(_LOOPS, "runner"):
        _LOOPS.runner = asyncio.Runner()
    return _LOOPS.runner.run(_alone(coroutine), context=contextvars.copy_context())


async def _alone(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def load(path: str) -> Any:
    """Returns the object with a name as for ``find``. Raises whatever the import raises."""
    match = _FILE.fullmatch(path)
    if match is None:
        with _searched(os.getcwd()):
            return pkgutil.resolve_name(path)
    module = _load_file(Path(match["file"]).expanduser().resolve())
    try:
        return functools.reduce(getattr, match["name"].split("."), module)
    except AttributeError:
        known = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise AttributeError(f"{module.__file__} has no {match['name']}, only: {known or 'nothing'}") from None


def _load_file(file: Path) -> ModuleType:
    """Imports a file once, under a name that no other module has. The file can import modules from its directory."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = f"{file.stem}_{zlib.crc32(os.fsencode(file)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _searched(str(file.parent)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _searched(directory: str) -> Iterator[None]:
    """Searches a directory for modules: before all others during a ``with`` block.

    After the block the directory is searched last, so that it hides no installed module.
    """
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)


def located(error: BaseException) -> str:
    """Describes an exception in one line, with the file and line of the user's code that was reached last.

    Code of Python, rljax and installed packages does not count. If no other code was reached, the line names no file.
    """
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    places = [place for place in frames if not place[0].startswith(_NOT_THEIRS)]
    if not places:
        return describe(error)
    file, line = places[-1]
    near = os.path.relpath(file)
    return f"{describe(error)} ({file if near.startswith('..') else near}:{line})"
