"""Checks of the tests' imports and names, and that each test can fail; checks of modules' names, too."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
PACKAGES = sorted({path.parent for path in (ROOT / "rljax").rglob("*.py")})
LONGEST = 59  # letters in the name of a test, at most
# A function whose name contains one of these words can fail by itself.
ASSERTING = ("assert", "check", "expect", "raises", "fails", "warns", "agree", "compare", "refuse", "verify", "until")


def name_of(node):
    """Returns the last part of a dotted name; for ``np.testing.assert_allclose`` it is "assert_allclose"."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def asserts(node, helpers):
    """Whether a part of a test can fail, or a function that it calls from its module."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assert | ast.Raise):
            return True
        if name_of(part).startswith("assert"):  # called, or passed to ``jax.tree.map``
            return True
        if isinstance(part, ast.Call):
            name = name_of(part.func)
            if any(word in name.lower() for word in ASSERTING) or name in helpers:
                return True
    return False


def asserting_helpers(tree):
    """Returns the names of a module's functions that can fail, directly or through each other."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    helpers: set[str] = set()
    while True:
        more = {each.name for each in functions if each.name not in helpers and asserts(each, helpers)}
        if not more:
            return helpers
        helpers |= more


def functions_of_tests(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def faults(text):
    """Yields a line for each fault in the text of a test module."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (f"{node.lineno}: imports {name}" for name in modules if name.split(".")[-1].startswith("test_"))
    helpers = asserting_helpers(tree)
    for test in functions_of_tests(tree):
        if len(test.name) > LONGEST:
            yield f"{test.lineno}: {test.name} has {len(test.name)} letters"
        if not asserts(test, helpers):
            yield f"{test.lineno}: {test.name} cannot fail"


def twins(names):
    """Returns the groups of names that are equal except for a plural s."""
    stems: dict[str, list[str]] = {}
    for name in sorted(names):
        stems.setdefault(name.removesuffix("s"), []).append(name)
    return [group for group in stems.values() if len(group) > 1]


def test_every_module_of_tests_is_sound():
    assert [
        f"{path.relative_to(ROOT)}:{fault}" for path in TESTS for fault in faults(path.read_text(encoding="utf-8"))
    ] == []


def test_no_two_modules_of_a_package_have_one_stem():
    for package in PACKAGES:
        modules = [path.stem for path in package.glob("*.py")] + [path.parent.name for path in package.glob("*/*.py")]
        assert twins(set(modules)) == [], package


def test_faults_are_seen():
    sound = """
def helper(x):
    assert x

def test_a():
    helper(1)

def test_b():
    with pytest.raises(ValueError):
        int("x")
"""
    assert list(faults(sound)) == []
    empty = "from test_other import helper\n\ndef test_a():\n    print(1)\n\n"
    empty += f"def test_{'x' * 60}():\n    assert 1\n"
    assert [fault.split(" ")[1] for fault in faults(empty)] == ["imports", "test_a", "test_" + "x" * 60]
    assert twins({"version", "versions", "pull", "store"}) == [["version", "versions"]]
