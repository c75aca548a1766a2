"""``rljax diagnose``: the page, the JSON object, the exit status and a caller's mistakes."""

import dataclasses
import gzip
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from isolated import rljax_with_only
from toy_runs import ROOT, outcome, refused

from rljax.commands import compare, plot, replay, view
from rljax.commands.diagnose import declared_of, main
from rljax.compare.importers import read_tokens
from rljax.diagnose.evidence import CAUSES, TABLES, first_remedy
from rljax.diagnose.signals import PROJECTS
from rljax.diagnose.token_facts import read_facts
from rljax.rollout.types import InjectConfig, RolloutConfig, ServerForm
from rljax.run.config import Config

LOGS = ROOT / "tests" / "data" / "planted_logs"
DOCS = (ROOT / "docs/diagnose.md").read_text(encoding="utf-8")
REMEDIES = DOCS.partition("## Remedies\n")[2]
SECTIONS = ("Remedies", "What is measured", "Limits of the field", "Where it comes from", "What to measure next")


@pytest.fixture
def log(tmp_path):
    def unpack(cause):
        path = tmp_path / f"{cause}.jsonl"
        path.write_bytes(gzip.decompress((LOGS / f"{cause}.jsonl.gz").read_bytes()))
        return path

    return unpack


def test_the_page_answers_every_question_as_in_the_docs(log, monkeypatch):
    path = log("eight_bits")
    monkeypatch.chdir(path.parent)
    status, page, err = outcome(main, [path.name, "--tokens", LOGS / "eight_bits.parquet"])
    lines = page.splitlines()
    assert (status, err) == (1, "")
    assert lines[0].startswith("eight_bits.jsonl: eight_bits (")
    assert [line for line in lines if line in SECTIONS] == list(SECTIONS)
    assert "CROSSED" in page
    assert "rljax docs diagnose#eight_bits" in page
    assert max(map(len, lines)) <= 120
    shown = re.search(r"```text\n(.*?)```", DOCS, re.DOTALL)[1].splitlines()
    left = iter(lines)
    assert [line for line in shown if line.strip() != "..." and line not in left] == []


def test_json_has_the_whole_diagnosis(log, tmp_path):
    status, out, _ = outcome(main, [log("temperature"), "--json", "-"])
    found = json.loads(out)
    assert (status, found["cause"], found["kind"]) == (1, "temperature", "settings")
    assert found["measured"]["log"]["columns"]["k3_kl"] == "mismatch/k3_kl"
    assert found["remedies"] == "rljax docs diagnose#temperature"
    _, page, _ = outcome(main, [log("temperature"), "--json", tmp_path / "out.json"])
    assert page.startswith(str(tmp_path))
    assert json.loads((tmp_path / "out.json").read_text()) == found
    (tmp_path / "run/rollouts").mkdir(parents=True)  # a run directory brings its newest dump
    log("head_dtype").rename(tmp_path / "run/metrics.jsonl")
    for step, name in ((20, "healthy"), (40, "head_dtype")):
        shutil.copyfile(LOGS / f"{name}.parquet", tmp_path / f"run/rollouts/step_{step:06d}.parquet")
    status, page, _ = outcome(main, [tmp_path / "run"])
    assert (status, page.splitlines()[0].endswith("head_dtype (sure)")) == (1, True)
    assert "lie on bfloat16's grid" in " ".join(page.split())


def test_the_form_of_a_server_is_declared():
    servers = RolloutConfig(engine="vllm", server_form=ServerForm(kv_cache="fp8_e5m2"))
    assert declared_of(Config(rollout=servers), None, None).forms == "fp8_e5m2 cache"
    own = RolloutConfig(inject=InjectConfig(quantize="int8"))
    assert declared_of(Config(rollout=own), None, None).forms == "int8 weights"
    dump = read_tokens(LOGS / "healthy.parquet")
    sources = dict(dump.sources) | {"rollout": dataclasses.replace(dump.sources["rollout"], form="fp8_e5m2 cache")}
    dump = dataclasses.replace(dump, sources=sources)
    assert declared_of(None, dump, read_facts(dump)).forms == "fp8_e5m2 cache"


TEXTS = "a log of texts and scores without token ids and log-probabilities"
SUMMARY = {"_step": 60, "_runtime": 9.0, "_timestamp": 1.0, "response_length/mean": 90, "reward/mean": 0.5}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.json", SUMMARY, "is a summary of W&B: it has only the last value of each metric and is no log. Export"),
        ("x.jsonl", {"reward/mean": 0.5, "_wandb": {}}, "is a summary of W&B"),
        ("1.jsonl", {"input": "1+1=", "output": "2", "score": 1.0}, f"is the rollout data of verl, {TEXTS}"),
        ("completions_00001.parquet", None, f"is the completions of TRL, {TEXTS}"),
        ("x.parquet", None, f"is the completions of TRL, {TEXTS}"),
    ],
)
def test_what_is_neither_log_nor_tokens_is_named(tmp_path, monkeypatch, name, content, said):
    """Only what reads tokens opens x.parquet, and a diagnosis has one row of a summary."""
    monkeypatch.chdir(tmp_path)
    path = Path("data", name)
    path.parent.mkdir()
    if content is None:
        pq.write_table(pa.table({"prompt": ["1+1="], "completion": ["2"], "reward": [1.0]}), path)
    else:
        path.write_text(json.dumps(content) + "\n")
    commands = [view.main, compare.main, *([] if name == "x.parquet" else [replay.main, plot.main])]
    if "summary" in said:
        status, page, _ = outcome(main, [path])
        assert (status, page.splitlines()[0]) == (1, f"{path}: one_row (sure)")
    else:
        commands.insert(0, main)
    for command in commands:
        assert f"{path} {said}" in refused(command, [path])
        if TEXTS in said and name != "x.parquet" and command is not plot.main:
            assert said in outcome(command, ["data"])[2]
    assert [each.name for each in tmp_path.rglob("*")] == ["data", name]


def test_one_of_several_runs_is_chosen(tmp_path):
    """A chart of W&B has a column for each run, and a table of runs a column with their names or numbers."""
    chart, table = tmp_path / "chart.csv", tmp_path / "table.jsonl"
    names = [f"{run} - {name}" for run in "ab" for name in ("critic/score/mean", "rollout_corr/k3_kl")]
    lines = [f"{step},0.{step + 10},0.0005,0.5,{0.002 * step**2}" for step in range(1, 13)]
    chart.write_text("\n".join([",".join(["Step", *(f'"{name}"' for name in names)]), *lines]))
    rows = [
        {"step": step, "run_id": run, "vllm_kl": kl} for step in range(1, 13) for run, kl in ((17, 0.01), (18, 0.4))
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path, runs, bad in ((chart, "ab", "mismatch_growth"), (table, ("17", "18"), "cannot_tell")):
        status, page, _ = outcome(main, [path])
        assert (status, page.splitlines()[0]) == (1, f"{path}: several_runs (sure)")
        assert f"one run: --run {runs[0]}" in page
        assert outcome(main, [path, "--run", runs[0]])[0] == 0
        assert json.loads(outcome(main, [path, "--run", runs[1], "--json", "-"])[1])["cause"] == bad
        assert f"no run 'c' in the log, which has {', '.join(runs)}" in outcome(main, [path, "--run", "c"])[2]


def test_a_healthy_log_needs_numpy_alone_a_mistake_is_a_line(log, tmp_path):
    """A token file needs another package, which is named."""
    path = log("healthy")
    status, page, err = rljax_with_only(["numpy"], "diagnose", path)
    assert (status, err) == (0, "")
    assert page.splitlines()[0].endswith("healthy")
    (path.parent / "1.jsonl").write_text('{"input": "1+1=", "output": "2"}\n')  # a folder may also have texts
    path.rename(path.parent / "history.jsonl")
    assert outcome(main, [path.parent])[0] == 0
    status, _, err = rljax_with_only(["numpy"], "diagnose", LOGS / "healthy.parquet")
    assert (status, err.count("\n")) == (2, 1)
    assert "a token file or a run directory needs the package" in err
    (tmp_path / "loss.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "notes.jsonl").write_text("hello\n")
    for words, said in (
        ([tmp_path / "none.jsonl"], "none.jsonl: no such file or directory"),
        ([tmp_path / "loss.jsonl"], "no mismatch, reward or gradient norm of a known name"),
        ([tmp_path / "notes.jsonl"], "notes.jsonl: line 1 is"),
        ([LOGS / "healthy.parquet", "--trainer", "hf"], "no column 'hf' in the dump, which has ['rollout', 'trainer']"),
        ([LOGS / "healthy.parquet", "--trainer", "rollout", "--rollout", "rollout"], "got 'rollout' twice"),
    ):
        assert said in refused(main, words)


def test_limits_and_remedies_of_the_docs_are_those_of_the_table():
    """Each cause has a list with rljax's own options, and three remedies have a column with those of each project."""
    written = {(name, float(limit)) for name, limit in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", DOCS, re.MULTILINE)}
    assert written == {(signal, round(limit, 6)) for signal, limit, *_ in TABLES["limits"]}
    options = {name: project["options"] for name, project in TABLES["projects"].items()}
    own = {name: options["rljax"].get(name, (of_any,))[0] for name, (_, of_any) in TABLES["remedies"].items()}
    for cause, (_, _, names) in TABLES["causes"].items():
        assert bool(names) == (cause != "healthy")
        listed = REMEDIES.partition(f"### {cause}\n\n")[2].partition("\n\n")[0].splitlines()
        assert listed == [f"{i}. {TABLES['remedies'][name][0]}: {own[name]}" for i, name in enumerate(names, 1)]
        assert f"`{cause}`" in DOCS
    columns = ("truncate", "cut", "room")
    text = REMEDIES.partition("### in_your_framework\n")[2].partition("###")[0]
    lines = (line for line in text.splitlines() if line[:1] == "|")
    first, _, *rows = ([cell.strip() for cell in line.split("|")[2:-1]] for line in lines)
    assert first == [TABLES["remedies"][name][0] for name in columns]
    others = [options[name] for name in options if name != "rljax"]
    assert rows == [[each.get(name, ("",))[0] for name in columns] for each in others]
    assert set(options) < set(PROJECTS)
    kinds = {"none", "numerics", "staleness", "settings", "weights", "optimisation", "rewards", "cannot tell"}
    assert {kind for kind, _ in CAUSES.values()} == kinds
    for project in PROJECTS:  # a remedy without an option of the project names no key of rljax's configuration either
        own = dict(TABLES["projects"].get(project, {"options": {}})["options"].values())
        for first in (first_remedy(cause, project) for cause in CAUSES if cause != "healthy"):
            assert first["source"].endswith(own.get(first["option"], "")), project
            assert first["option"] in own or not re.search(r"--[a-z]+\.[a-z-]+ ", first["option"]), project
    # Each remedy has a cost, a source and the numbers on record.
    listed = re.findall(r"^\d+\. (.+?): `.+$", REMEDIES, re.MULTILINE)
    costs = REMEDIES.partition("### What each remedy costs")[2].partition("|---|---|---|\n")[2]
    table = re.findall(r"^\| (.+?) \| (.+?) \| (.+) \|$", costs, re.MULTILINE)
    assert set(listed) == {name for name, _, _ in table}
    for _, _, source in table:
        pages = re.findall(r"\]\((\w+\.md)\)", source)
        assert pages or re.search(r"arXiv \d{4}\.\d{5}", source)
        assert all((ROOT / "docs" / page).is_file() for page in pages)
    measured = json.loads((ROOT / "benchmarks" / "correction_bias.json").read_text())["remedies"]
    drifts = {"`token_tis`": "0.063", "`two_sided_tv`": "0.024", "`score_centering`, k = 2": "0.33"}
    for name, said in (drifts | {"no correction": "0.97"}).items():
        assert f"{measured[name]['large']['drift']:.2g}" == said
    assert all(f"drift {said} for 0.97" in REMEDIES for said in drifts.values())
