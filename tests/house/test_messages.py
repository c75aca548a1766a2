"""No message or help text of the package may name a file that the wheel lacks."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "rljax").rglob("*.py"))
# Folders of the checkout, and shell scripts. The wheel has a part of configs/, whose names are looked up below.
ELSEWHERE = re.compile(
    r"(?<![\w./:-])(?:launch|tools|docs|tests|experiments|examples|benchmarks)/[\w./-]*\w|(?<![\w./-])[\w./-]+\.sh\b"
)
CONFIGS = re.compile(r"(?<![\w./-])configs/[\w./-]*\w")


def texts(source):
    """Yields (line number, text) of every string that a program may print, including help texts.

    A docstring is printed where its module uses ``__doc__``, as the description of a command.
    """
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
