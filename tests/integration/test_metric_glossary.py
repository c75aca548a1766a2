"""docs/metrics.md holds every key of real rows, and no key that nothing writes."""

import json
import re
from pathlib import Path

from toy_runs import command, complete

ROOT = Path(__file__).parents[2]
# What the toy's run on the embedded engine cannot show.
ELSEWHERE = re.compile(r"publish/.*|rollout/(requests|retries|server_losses|servers_brought_back|executable_runs)")
SMALL = [
    *("--data.batch-size", "6", "--rollout.group-size", "4", "--packing.rows-per-micro-batch", "4"),
    *("--packing.row-tokens", "44", "--run.steps", "2", "--eval.every", "2", "--eval.at-start", "true"),
    *("--eval.n", "2", "--eval.pass-k", "1", "2", "--eval.temperature", "1", "--eval.max-response-tokens", "6"),
    *("--loss.kl", "k3", "--loss.kl-coefficient", "0.01", "--correction.preset", "token_tis"),
    *("--diagnosis.reference-steps", "1"),
]


def glossary() -> dict[str, re.Pattern[str]]:
    """Key, as it is written, -> what it matches."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(keys) == len(set(keys))
    return {key: re.compile(re.sub(r"<[a-z]+>", "[^/]+", key)) for key in keys}


def test_every_key_of_a_row_is_explained_and_every_explained_key_occurs(toy_base, tmp_path):
    code, output = complete(command(toy_base, tmp_path / "run", *SMALL))
    assert code == 0, output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    seen = {key.removesuffix("_at_start") for line in lines for key in json.loads(line)}
    assert any(key.endswith("accuracy_at_start") for key in json.loads(lines[0]))
    known = glossary()
    assert [key for key in sorted(seen) if not any(pattern.fullmatch(key) for pattern in known.values())] == []
    unseen = {key for key, pattern in known.items() if not any(pattern.fullmatch(key) for key in seen)}
    assert [key for key in sorted(unseen) if not ELSEWHERE.fullmatch(key)] == []


def test_keys_of_the_other_engines_are_in_their_code():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "rljax" / "rollout").glob("*.py"))
    for key in glossary():
        if ELSEWHERE.fullmatch(key):
            assert f'"{key}"' in code or f'"{key.removeprefix("rollout/")}"' in code, key
