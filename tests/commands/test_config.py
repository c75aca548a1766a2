"""``rljax config`` prints the settings of a run, and ``rljax docs`` a page that messages of the package name."""

import re
from pathlib import Path

from toy_runs import outcome, refused

from rljax.commands.config import main
from rljax.commands.docs import main as docs
from rljax.commands.docs import part_of
from rljax.diagnose.evidence import TABLES
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml

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


def test_settings_are_printed_as_yaml_or_one_a_line(tmp_path):
    status, out, _ = outcome(main, ["quickstart", "--run.steps", "7"])
    assert status == 0
    (tmp_path / "written.yaml").write_text(out)
    assert outcome(main, [tmp_path / "written.yaml"])[1] == out
    assert "steps: 7" in out
    assert outcome(main, [])[1] == config_to_yaml(Config())
    words = ["--show", "rollout.dtype,max_engine_tokens,run.dir", "quickstart", "--rollout.dtype", "float16"]
    assert outcome(main, words)[:2] == (0, "float16\n44\nruns/quickstart\n")


def test_a_mistake_is_one_line():
    is_key = (
        "rollout.dtype is a key: rljax config --show rollout.dtype prints its value; rljax train --help all explains it"
    )
    for words, message in (
        (["rollout.dtype"], is_key),
        (["nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["--show", "run.step", "quickstart"], "unknown key run.step; did you mean run.steps?"),
        (["--show"], "--show needs a key, as in: rljax config --show rollout.dtype quickstart"),
    ):
        assert refused(main, words).endswith(f"{message}\n")


def test_pages_are_listed_printed_and_named_by_messages():
    status, out, err = outcome(docs, [])
    assert (status, err) == (0, "")
    assert {"compare", "diagnose", "studies"} <= set(out.split())
    assert outcome(docs, ["diagnose"])[:2] == (0, (ROOT / "docs/diagnose.md").read_text(encoding="utf-8"))
    first = PAGE[PAGE.index("## A") : PAGE.index("\n\n## Second")]  # a part ends before the next heading of its depth
    assert part_of(PAGE, "a-first_one-here") == first
    assert part_of(PAGE, "deeper") == "### Deeper\n\nmore"
    assert part_of(PAGE, "second") == "## Second\nlast"
    for words, said in (
        ("diagnos", "no page 'diagnos'; did you mean diagnose?"),
        ("diagnose#the-limit", "no heading 'the-limit'; did you mean the-limits?"),
        ("../README", "no page '../README'"),
    ):
        assert said in refused(docs, [words])
    # Messages name pages that are there.
    paths = (*(ROOT / "rljax").rglob("*.py"), ROOT / "rljax/diagnose/causes.json")
    texts = [path.read_text(encoding="utf-8") for path in paths]
    named = {name for text in texts for name in re.findall(r"rljax docs ([a-z_]+)", text)}
    assert {"compare", "diagnose", "studies"} <= named
    assert [name for name in named if not (ROOT / f"docs/{name}.md").is_file()] == []
    assert not any("rljax's page" in text for text in texts)
    assert any("rljax docs studies" in source for _, _, source, _ in TABLES["limits"])
