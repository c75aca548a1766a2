"""Object stores by their URL: s3://, gs://, or any other that fsspec knows."""

from __future__ import annotations

from typing import Any


def open_store(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the URL's path in it; nothing is asked of the store yet.

    Raises whatever fsspec raises where nothing is installed that knows such URLs.
    """
    from fsspec.core import url_to_fs

    # What was listed is not kept: another machine may have written since.
    store, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    if hasattr(store, "auto_mkdir"):
        store.auto_mkdir = True  # folders of file:// URLs are made, as object stores have none
    return store, path
