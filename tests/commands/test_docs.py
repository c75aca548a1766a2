"""``rljax docs`` prints a page or a part of it, and each page that a message of the package names."""

import re
from pathlib import Path

from toy_runs import outcome, refused

from rljax.commands.docs import main, part_of
from rljax.diagnose.evidence import TABLES

ROOT = Path(__file__).parents[2]
PAGE = """# Top

## A `first_one` here

text

```
# no heading
```

### Deeper

more

## Second
last
"""


def test_the_names_are_listed_and_a_page_is_printed_whole():
    status, out, err = outcome(main, [])
    assert (status, err) == (0, "")
    assert {"compare", "diagnose", "studies"} <= set(out.split())
    assert outcome(main, ["diagnose"])[:2] == (0, (ROOT / "docs/diagnose.md").read_text(encoding="utf-8"))
    for words, said in (
        ("diagnos", "no page 'diagnos'; did you mean diagnose?"),
        ("diagnose#the-limit", "no heading 'the-limit'; did you mean the-limits?"),
        ("../README", "no page '../README'"),
    ):
        assert said in refused(main, [words])


def test_a_part_ends_before_the_next_heading_of_its_depth():
    first = PAGE[PAGE.index("## A") : PAGE.index("\n\n## Second")]
    assert part_of(PAGE, "a-first_one-here") == first
    assert part_of(PAGE, "deeper") == "### Deeper\n\nmore"
    assert part_of(PAGE, "second") == "## Second\nlast"


def test_messages_name_pages_that_are_there():
    paths = (*(ROOT / "rljax").rglob("*.py"), ROOT / "rljax/diagnose/causes.json")
    texts = [path.read_text(encoding="utf-8") for path in paths]
    named = {name for text in texts for name in re.findall(r"rljax docs ([a-z_]+)", text)}
    assert {"compare", "diagnose", "studies"} <= named
    assert [name for name in named if not (ROOT / f"docs/{name}.md").is_file()] == []
    assert not any("rljax's page" in text for text in texts)
    assert any("rljax docs studies" in source for _, _, source, _ in TABLES["limits"])
