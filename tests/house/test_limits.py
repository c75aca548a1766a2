"""The size of the house: lines, configuration keys, words of the docs, and names that stand once."""

import ast
import collections
from pathlib import Path

from rljax.run.config import Config
from rljax.run.options import options_of

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "rljax").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Each limit is the size of today. A change that makes the house smaller lowers it, and none raises it without a reason.
LINES = 48_999
TEST_LINES = 47_560
EXPERIMENT_LINES = 5_500
KEYS = 181
WORDS = 80_000
PAGE_COUNT = 46
FILE_LINES = 405
DOUBLED_NAMES = 0


def lines(folder):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))


def names_of_types(tree):
    """Yields the names of a module's classes, nested ones included, and of its type aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
            yield target.id


def doubled(trees):
    """Returns the names that are classes or aliases in more than one place, each with its number of places."""
    counts = collections.Counter(name for tree in trees for name in names_of_types(tree))
    return {name: count for name, count in counts.items() if count > 1}


def test_the_code_stays_small():
    assert lines("rljax") <= LINES
    assert lines("tests") <= TEST_LINES
    assert lines("experiments") <= EXPERIMENT_LINES
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES) <= FILE_LINES


def test_the_configuration_stays_small():
    assert len(options_of(Config)) <= KEYS


def test_the_docs_stay_small():
    pages = [path for path in PAGES if "reference" not in path.parts]
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in PAGES) <= WORDS
    assert len(pages) <= PAGE_COUNT


def test_a_name_of_a_type_stands_once():
    assert len(doubled(ast.parse(path.read_text(encoding="utf-8")) for path in MODULES)) <= DOUBLED_NAMES


def test_a_doubled_name_is_seen():
    one = ast.parse("class A:\n    class _B:\n        pass\n\nShape = tuple[int, ...]\nLIMIT = 3\n")
    two = ast.parse("Shape: TypeAlias = str\nclass _B:\n    pass\nLIMIT = 4\n")
    assert doubled([one, two]) == {"_B": 2, "Shape": 2}
