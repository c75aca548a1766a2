"""Finds the files of a data set, which may be one file or several shards such as ``train-00000-of-00010.parquet``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

FILE_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
SHARD = re.compile(r"-\d+-of-(\d+)(?:-[0-9a-f]+)?(?=\.\w+$)")  # in a file's name: which shard it is, of how many
_NO_PROBLEMS = ("dataset_infos.json", "dataset_info.json")  # what the hub writes about a data set


def one_set(names: Iterable[str], where: str) -> list[str]:
    """Returns the name of the only file of problems among ``names``, or the names of all its shards in their order.

    Raises:
      ValueError: There is no such file, there are several, or a shard is missing. The message begins with ``where``.
    """
    sets: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(FILE_SUFFIXES) and not name.endswith(_NO_PROBLEMS):
            sets.setdefault(SHARD.sub("-*", name), []).append(name)
    if len(sets) != 1:
        raise ValueError(f"{where}FILE is needed, there are {len(sets)} files of problems: {', '.join(sets) or 'none'}")
    ((whole, found),) = sets.items()
    shard = SHARD.search(found[0])
    if shard and len(found) != int(shard[1]):
        raise ValueError(f"{where}{whole}: only {len(found)} of {int(shard[1])} shards are there")
    return found


def source_files(path: str | Path) -> list[Path]:
    """Returns the file of a path, or all shards of a directory or ``*`` pattern. Raises ValueError like ``one_set``."""
    path = Path(path)
    if path.is_file():
        return [path]
    folder, pattern = (path, "**/*") if path.is_dir() else (path.parent, path.name)
    names = [str(each.relative_to(folder)) for each in folder.glob(pattern) if each.is_file()]
    if not names:
        raise ValueError(f"no problems at {path}: there is no such file")
    return [folder / name for name in one_set(names, f"{folder}/")]
