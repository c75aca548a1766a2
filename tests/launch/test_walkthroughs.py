"""The first runs of five pages are typed unchanged; stand-ins replace what needs a GPU, a cluster or the hub."""

import re

import pytest
import yaml
from typed_pages import ROOT, blocks, first_words, type_page, uncovered

from rljax import cli

NAMES = ("walkthroughs/one_gpu", "walkthroughs/one_machine", "slurm", "kubernetes", "tpu")
PAGES = [ROOT / f"docs/{name}.md" for name in NAMES]
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Returns a function that types a page once; it returns the output, the stand-ins' calls and the manifests."""
    done = {}

    def typing(page):
        if page not in done:
            place = tmp_path_factory.mktemp(page)
            status, printed, words = type_page(TEXTS[page], place)
            assert status == 0, printed
            done[page] = printed, words, (place / "record.manifests").read_text()
        return done[page]

    return typing


@pytest.mark.parametrize("page", TEXTS)
def test_every_command_has_a_rule(page):
    assert uncovered("\n".join(blocks(TEXTS[page], "bash"))) == set()


def test_a_command_without_a_rule_is_found():
    script = "A=1 curl x | cd y && f 'a; b' \\\n  wget\nf() { nmap; }\ncat - <<END\nssh\nEND\n"
    assert first_words(script) == ["curl", "cd", "nmap", "cat"]
    assert uncovered(script) == {"curl", "nmap", "cat"}


@pytest.mark.slow
@pytest.mark.parametrize("page", TEXTS)
def test_a_page_is_typed_and_prints_what_it_shows(page, typed):
    printed = typed(page)[0].splitlines()
    shown = [line for block in blocks(TEXTS[page], "text") for line in block.splitlines() if line]
    assert [line for line in shown if line not in printed] == []


@pytest.mark.slow
def test_the_objects_of_the_kubernetes_page_are_there(typed):
    """Everything that the page deletes must be created before under this name, by a file or on the page."""
    _, words, manifests = typed("kubernetes")
    files = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "launch/kubernetes").rglob("*.yaml"))]
    objects = [one for text in [manifests, *files] for one in yaml.safe_load_all(text) if one and "kind" in one]
    names = {(one["kind"].lower(), one.get("metadata", {}).get("name")) for one in objects}
    deleted = re.findall(r" delete (\w+) (\w+)", words)
    assert len(deleted) == 3
    assert set(deleted) < names


def test_the_options_of_rljax_prepare_are_there(capsys):
    lines = [line for text in TEXTS.values() for line in re.findall(r"rljax prepare (.*)", text)]
    used = {option for line in lines for option in re.findall(r"--[a-z][\w-]*", line)}
    with pytest.raises(SystemExit) as ended:
        cli.main(["prepare", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert used == {"--model", "--max-prompt-tokens"}
    assert [option for option in used if option not in told] == []
