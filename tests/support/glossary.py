"""The keys that docs/metrics.md explains."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def glossary() -> dict[str, re.Pattern[str]]:
    """Returns, for each key as the page writes it, the pattern of the metrics that it stands for."""
    keys = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(keys) == len(set(keys))
    return {key: re.compile(re.sub(r"<[a-z]+>", "[^/]+", key)) for key in keys}
