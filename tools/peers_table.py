"""Writes one row of the table in docs/others.md: the result of a package's tests, the versions and the day.

    python tools/peers_table.py docs/others.md NAME==VERSION TESTS REPORT

The package's own interpreter runs this program (tools/test_peers.sh), which needs only the standard library. REPORT is
pytest's JUnit file of TESTS. The package's row is replaced, and every other line of the page stays.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RUNTIMES = ("jax", "torch")


def outcome(report: Path) -> str:
    """Returns the counts of a JUnit file in pytest's words."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, failed, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", 0))
    counts = {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "no test ran"


def day(report: Path) -> str:
    """Returns the day on which the tests ran, as YYYY-MM-DD."""
    return str(next(ElementTree.parse(report).iter("testsuite")).get("timestamp"))[:10]


def installed(name: str) -> str:
    """Returns the version of a distribution in this interpreter's environment, or ""."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def row(package: str, tests: str, report: Path) -> str:
    """Returns the line of the table."""
    with_ = ", ".join(f"{name} {installed(name)}" for name in RUNTIMES if installed(name))
    python = ".".join(map(str, sys.version_info[:3]))
    cells = [package, installed(package), python, with_, day(report), f"`{tests}`", outcome(report)]
    return f"| {' | '.join(cells)} |"


def with_row(page: str, line: str) -> str:
    """Returns the page with this row instead of the package's old row, or at its place in the order of names.

    Raises:
      ValueError: If the page has no table of packages.
    """
    lines = page.splitlines()
    start = next((i for i, text in enumerate(lines) if text.startswith("| package |")), None)
    if start is None:
        raise ValueError("the page has no table that begins with '| package |'")
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    key = line.split("|")[1]
    rows = {text.split("|")[1]: text for text in lines[start + 2 : end]} | {key: line}
    return "\n".join([*lines[: start + 2], *(rows[name] for name in sorted(rows)), *lines[end:]]) + "\n"


def main(argv: Sequence[str]) -> int:
    page, requirement, tests, report = argv
    text = Path(page).read_text(encoding="utf-8")
    Path(page).write_text(with_row(text, row(requirement.partition("==")[0], tests, Path(report))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
