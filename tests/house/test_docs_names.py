"""Every path, name, link, metric and option that a page or a message of the package mentions must be there."""

import ast
import functools
import importlib
import operator
import re
from pathlib import Path

from glossary import glossary

from rljax.run.config import Config
from rljax.run.options import options_of

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = "rljax|tools|experiments|launch|configs|tests|examples|benchmarks"
# In a page of docs/, a path that begins with "docs/" belongs to another project.
IN_README = f"{FOLDERS}|docs"
PLACEHOLDER = re.compile(r"NAME|FILE|\$")
REMOVED_IN = re.compile(r"de180d10|2aa00367|26410176")  # the commits that have what docs/studies.md says was removed
METADATA_KEYS = {"rljax.dump", "rljax.dump.crc32", "rljax.problems"}  # keys of Parquet files, not modules


def expanded(path):
    """Returns ``a/b.py`` and ``a/c.py`` for ``a/{b,c}.py``."""
    found = re.search(r"\{([^}]*)\}", path)
    if not found:
        return [path]
    return [each for part in found[1].split(",") for each in expanded(path.replace(found[0], part, 1))]


def paths(text, folders):
    for written in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./{{}},*$-]*", text):
        if not PLACEHOLDER.search(written):
            yield from (path.rstrip(".,") for path in expanded(written))


def removed():
    """Returns the paths that docs/studies.md says are only in an earlier commit."""
    text = (ROOT / "docs/studies.md").read_text(encoding="utf-8")
    return set(paths(text[text.index("## What was removed") :], IN_README))


def resolves(name):
    """Whether a dotted name is a module or a name in a module."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:count])
        if module.with_suffix(".py").is_file() or (module / "__init__.py").is_file():
            if count == len(parts):
                return True  # not imported: the plugin loads only beside vLLM
            try:
                operator.attrgetter(".".join(parts[count:]))(importlib.import_module(".".join(parts[:count])))
            except AttributeError:
                return False
            return True
    return False


def test_what_a_page_names_is_there_and_what_was_removed_is_not():
    assert len(removed()) > 90
    assert [path for path in removed() if any(ROOT.glob(path))] == []
    there = functools.cache(lambda path: any(ROOT.glob(path)))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        folders = IN_README if page.parent == ROOT else FOLDERS
        gone = removed() if REMOVED_IN.search(text) else set()
        assert [path for path in paths(text, folders) if path not in gone and not there(path)] == [], page
        names = set(re.findall(r"(?<![\w./-])rljax(?:\.[A-Za-z_]\w*)+", text)) - METADATA_KEYS
        assert sorted(name for name in names if not resolves(name)) == [], page


def test_the_tests_that_a_page_selects_are_there():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    selections = set(re.findall(r"(tests/[\w/]+\.py) -k (\"[^\"]+\"|\w+)", text))
    assert selections
    for path, expression in selections:
        text = (ROOT / path).read_text(encoding="utf-8")
        words = [word for word in re.findall(r"\w+", expression) if word not in {"and", "or", "not"}]
        assert [word for word in words if not re.search(rf"def test_\w*{word}|\"[\w-]*{word}", text)] == [], path


def test_a_name_that_is_not_there_is_seen():
    found = paths("see `rljax/{sharding,nowhere}.py`, launch/no.sh.", FOLDERS)
    assert [*found] == ["rljax/sharding.py", "rljax/nowhere.py", "launch/no.sh"]
    names = ("rljax.schedule.SurgeTracker.update", "rljax.schedule.SurgeTracker.updates", "rljax.training")
    assert [resolves(name) for name in names] == [True, False, False]


@functools.cache
def headings(page):
    """Returns the anchors of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_to_files_and_headings():
    found, lost = 0, []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target, found = page.parent / path if path else page, found + 1
            if not target.exists() or (anchor and anchor not in headings(target)):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert found > 400
    assert lost == []
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_metric_and_option_of_troubleshooting_is_there():
    text, known = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), glossary()
    groups = {key.split("/")[0] for key in known if "/" in key}
    named = set(re.findall(rf"(?<![\w/.])(?:{'|'.join(groups)})/[\w<>]+(?:/[\w<>]+)*", text))
    keys = {name for name in named if not (ROOT / name).exists() and not name.startswith("rollouts/")}
    assert len(keys) > 30
    assert [key for key in sorted(keys) if not any(pattern.fullmatch(key) for pattern in known.values())] == []
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z]+\.[a-z.-]+[a-z])", text)}
    assert len(named) > 12
    assert named <= options_of(Config).keys()


MODULES = sorted((ROOT / "rljax").rglob("*.py"))
# Folders of the checkout, and shell scripts. The wheel has a part of configs/, whose names are looked up below.
ELSEWHERE = re.compile(
    r"(?<![\w./:-])(?:launch|tools|docs|tests|experiments|examples|benchmarks)/[\w./-]*\w|(?<![\w./-])[\w./-]+\.sh\b"
)
CONFIGS = re.compile(r"(?<![\w./-])configs/[\w./-]*\w")


def texts(source):
    """Yields (line number, text) of every string that a program may print, such as a docstring beside ``__doc__``."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    first = [node.body[0].value for node in functions if isinstance(node.body[0], ast.Expr)]
    silent = {id(value) for value in first}
    if "__doc__" not in source and tree.body and isinstance(tree.body[0], ast.Expr):
        silent.add(id(tree.body[0].value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.lineno, node.value


def absent(source):
    """Yields (line number, name) of each file in a module's texts that a wheel lacks."""
    for line, text in texts(source):
        yield from ((line, name) for name in ELSEWHERE.findall(text))
        for name in CONFIGS.findall(text):
            if name != "configs/toy-base" and not re.match(r"configs/(quickstart|paper/)", name):
                yield line, name


def test_a_text_names_only_what_the_wheel_has():
    found = {str(path.relative_to(ROOT)): list(absent(path.read_text(encoding="utf-8"))) for path in MODULES}
    assert found
    assert {path: names for path, names in found.items() if names} == {}


def test_a_name_of_the_checkout_is_seen():
    source = """
def f(x):
    "Not printed: see docs/view.md."
    raise ValueError(f"run launch/x.sh for {x}, or configs/study/toy.yaml; not configs/quickstart.yaml")

START = "vllm_server.sh MODEL"
"""
    assert sorted(name for _, name in absent(source)) == ["configs/study/toy.yaml", "launch/x.sh", "vllm_server.sh"]
