"""The keys that docs/metrics.md explains."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def glossary() -> dict[str, re.Pattern[str]]:
    """Key, as it is written, -> what it matches."""
    keys = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(keys) == len(set(keys))
    return {key: re.compile(re.sub(r"<[a-z]+>", "[^/]+", key)) for key in keys}
