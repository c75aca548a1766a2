"""The metrics, options, files and anchors in docs/troubleshooting.md and the links of four pages must exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from rljax.run.config import Config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
GLOSSARY = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)


def options(section: type, prefix: str = "") -> set[str]:
    """Returns the dotted keys of a configuration section with its defaults."""
    found: set[str] = set()
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        nested = dataclasses.is_dataclass(value)
        found |= options(value, f"{prefix}{field.name}.") if nested else {prefix + field.name}
    return found


def is_key(name: str) -> bool:
    patterns = (re.sub(r"<[a-z]+>", "[^/]+", key) for key in GLOSSARY)
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def test_every_metric_is_in_the_glossary():
    groups = {key.split("/")[0] for key in GLOSSARY if "/" in key}
    named = set(re.findall(rf"(?<![\w/.])(?:{'|'.join(groups)})/[\w<>]+(?:/[\w<>]+)*", TEXT))
    keys = {name for name in named if not (ROOT / name).exists() and not name.startswith("rollouts/")}
    assert len(keys) > 30
    assert [name for name in sorted(keys) if not is_key(name)] == []


def test_every_option_is_one_of_the_configuration():
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z]+\.[a-z.-]+[a-z])", TEXT)}
    assert len(named) > 12
    assert named <= options(Config())


@pytest.mark.parametrize("page", ["troubleshooting.md", "metrics.md", "others.md", "view.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    heads = {
        re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.+)$", text, re.M)
    }
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in heads, target
        elif not target.startswith("http"):
            assert (ROOT / "docs" / target.split("#")[0]).exists(), target


def test_files_that_are_named_exist():
    names = re.findall(r"\b(?:tools|launch|configs|rljax)/[\w/.]+\.(?:py|sh|yaml)", TEXT)
    assert names
    for name in names:
        assert (ROOT / name).is_file(), name
