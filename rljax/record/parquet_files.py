"""Opens Parquet files so that damage is an error, and so that no thread of Arrow disturbs the end of the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


@contextlib.contextmanager
def parquet_file(path: str | os.PathLike[str]) -> Iterator[pq.ParquetFile]:
    """Opens a Parquet file. The checksums of its pages are verified when they are read; not every file has them.

    Arrow opens the file itself. If it read a file of Python, its threads would need the interpreter's lock to free
    memory. That aborts the process if the interpreter ends meanwhile.

    Raises:
      OSError: The file cannot be opened.
      ValueError: It is not a Parquet file, or it is damaged; errors of Arrow in the block become this error, too.
    """
    Path(path).open("rb").close()  # an OSError of Python names the file
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        rows = sum(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        if rows != file.metadata.num_rows:
            raise ValueError(f"its row groups have {rows} rows, and its footer says {file.metadata.num_rows}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    with file:
        try:
            yield file
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error


def _unreadable(path: str | os.PathLike[str], error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}")
