"""Each sentence in a program or a page is plain English. These patterns betray sentences that are not."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("rljax", "tests", "experiments", "tools", "examples", "launch")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
LONGEST = 40  # words in a sentence, at most

# A line under Args, Attributes or Returns says what a thing is, so it does not begin with one of these words.
FRAGMENTS = {
    *("of", "that", "those", "as", "likewise", "what", "which", "where", "who", "whose", "how", "when", "see", "this"),
    *("by", "from", "in", "with", "to", "for", "on", "at", "under", "before", "after", "until", "since", "if"),
    *("is", "are", "was", "were", "has", "have", "had", "will", "may", "can", "gives", "makes", "takes", "given"),
    *("called", "asked", "asks", "they", "it", "its", "so", "not", "also", "else", "only", "there", "then"),
}
# A docstring opens with a sentence or a noun phrase, not with a clause that belongs to another sentence.
OPENINGS = {"of", "that", "those", "as", "likewise", "what", "which", "who", "whose", "where", "how", "also", "so"}
PHRASES = re.compile(
    r"\blikewise\b|\bas those\b|\bsee there\b|\bas there[.,;)]|\bthat of what\b|\bthose of what\b|\bthat which\b"
    r"|\bwho does not\b|\bwhat is not\b",
    re.IGNORECASE,
)
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|Reference|References):\s*$")
ENTRY = re.compile(r"^(\s+)(\*{0,2}[`\w][\w.`, *]*):\s+(\S.*)$")


def docstrings(tree):
    """Yields (line number, text) of every docstring of a module, a class, a function or a constant."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for child in node.body:
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, value.value


def comments(source):
    """Returns (line number, text) of each block of comment lines; consecutive lines are joined."""
    blocks: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:", "#!")):
            line, text = token.start[0], token.string.lstrip("#").strip()
            alone = token.line.strip().startswith("#")
            if alone and blocks and blocks[-1][1] == line - 1:
                first, _, before = blocks.pop()
                blocks.append((first, line, f"{before} {text}"))
            else:
                blocks.append((line, line if alone else -1, text))
    return [(first, text) for first, _, text in blocks]


def sentences(text):
    """Yields the sentences of a text without code, tables and headings; each item of a list is separate."""
    text = re.sub(r"```.*?```|~~~.*?~~~", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "code", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)|\n(?=\s*[#|>])", text):
        if not paragraph.lstrip().startswith(("#", "|", ">>>", "    ", "<", "!!!", "---")):
            yield from re.split(r"(?<=[.;:?!])[)\"']*\s+", paragraph.strip())


def entries(docstring):
    """Yields each description under Args, Attributes, Returns and Yields as (its label, its words)."""
    section, indent = "", None
    for line in ast.literal_eval(repr(docstring)).splitlines():
        heading = SECTION.match(line.strip())
        if heading:
            section, indent = heading[1], None
            continue
        if section not in {"Args", "Attributes", "Returns", "Yields"} or not line.strip():
            continue
        width = len(line) - len(line.lstrip())
        indent = width if indent is None else indent
        if width < indent:
            section = ""
        elif width == indent:
            found = ENTRY.match(line)
            if found and section in {"Args", "Attributes"}:
                yield found[2], found[3]
            elif section in {"Returns", "Yields"}:
                yield section, line.strip()
                section = ""


def first_word(text):
    found = re.match(r"[A-Za-z]+", text)
    return found[0].lower() if found else ""


def betrayed(path):
    """Yields a line for each fault in the sentences of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        texts = [(1, source)]
    else:
        texts = list(docstrings(ast.parse(source)))
        for line, text in texts:
            if first_word(text.strip()) in OPENINGS:
                yield f"{line}: a docstring begins with a clause: {text.strip().splitlines()[0][:70]}"
            for label, words in entries(text):
                if first_word(words) in FRAGMENTS:
                    yield f"{line}: {label} begins with a fragment: {words[:60]}"
        texts += comments(source)
    for line, text in texts:
        for found in PHRASES.finditer(re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)):
            yield f"{line}: {found[0]!r}"
        for sentence in sentences(text):
            words = re.findall(r"[A-Za-z][\w'-]*", sentence)
            if len(words) > LONGEST:
                yield f"{line}: {len(words)} words in a sentence: {' '.join(words[:8])} ..."


@pytest.mark.parametrize("folder", [*FOLDERS, "pages"])
def test_sentences_are_plain(folder):
    paths = PAGES if folder == "pages" else sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [f"{path.relative_to(ROOT)}:{fault}" for path in paths for fault in betrayed(path)] == []


FAULTY = '''
"""What is done, as those."""


def taken(of, rate):
    """Takes.

    Args:
      of: of the run.
      rate: The learning rate.

    Returns:
      as there; likewise.
    """
'''


def test_the_old_style_is_seen(tmp_path):
    module, page = tmp_path / "faulty.py", tmp_path / "faulty.md"
    module.write_text(FAULTY)
    page.write_text("# Head\n\n" + " ".join(["word"] * 41) + ".\n\nIt is so, likewise.\n\n```\nlikewise\n```\n")
    faults = list(betrayed(module))
    assert len(faults) == 6
    assert [fault for fault in faults if "rate" in fault] == []
    assert len(list(betrayed(page))) == 2
