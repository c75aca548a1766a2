"""Runs the code blocks of the pages in docs/ exactly as the pages show them."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def code_block(page, part, language="python"):
    """Returns the block of ``docs/<page>`` that contains ``part``; there must be exactly one."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if part in block]
    return block


def run_block(page, part, **names):
    """Executes this block with ``names`` defined, and returns everything that is defined after it."""
    space = dict(names)
    exec(compile(code_block(page, part), f"docs/{page}: {part}", "exec"), space)
    return space
