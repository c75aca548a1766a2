"""Prints a page of the documentation.

rljax docs                   the names of the pages
rljax docs PAGE              a page, as Markdown
rljax docs PAGE#HEADING      one part of a page
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import resources

from rljax.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Prints the names of the pages, or a page, and returns the exit status."""
    if len(argv) > 1 or (argv and argv[0].startswith("-")):
        print(__doc__)
        return 0 if argv[0] in ("-h", "--help") else 2
    folder = resources.files("rljax") / "docs"
    files = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    names = sorted(name.removesuffix(".md") for name in files if name.endswith(".md"))
    if not argv:
        print("\n".join(names))
        return 0
    name, _, heading = argv[0].partition("#")
    text = (folder / f"{_known(name, names, 'page')}.md").read_text(encoding="utf-8")
    print(part_of(text, heading) if heading else text.rstrip("\n"))
    return 0


def part_of(text: str, heading: str) -> str:
    """Returns the part of a page under a heading. Raises ConfigError if there is no such heading."""
    lines, parts = text.splitlines(), list(_headings(text))
    _known(heading, [name for _, _, name in parts], "heading")
    start, depth = next((at, depth) for at, depth, name in parts if name == heading)
    end = next((at for at, other, _ in parts if at > start and other <= depth), len(lines))
    return "\n".join(lines[start:end]).rstrip("\n")


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """Yields the line, the depth and the anchor of each heading."""
    is_code = False
    for at, line in enumerate(text.splitlines()):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and (found := re.match(r"(#+) (.+)", line)):
            yield at, len(found[1]), re.sub(r"[^\w\- ]", "", found[2].lower()).replace(" ", "-")


def _known(name: str, names: Sequence[str], what: str) -> str:
    if name not in names:
        similar = difflib.get_close_matches(name, names, n=1)
        advice = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(names)}"
        raise ConfigError(f"no {what} {name!r:.60}; {advice}")
    return name
