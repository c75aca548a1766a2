"""Reads the data of a page that ``rljax view`` wrote."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import numpy as np


def page_data(path: Path):
    """Returns the JSON object in a page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def numbers(array):
    """Returns the numbers of a packed array."""
    return np.frombuffer(gzip.decompress(base64.b64decode(array["bytes"])), "<" + array["dtype"]).tolist()
