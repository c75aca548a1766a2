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
from toy_runs import outcome, refused

from rljax.commands import compare, plot, replay, view
from rljax.commands.diagnose import declared_of, main
from rljax.compare.importers import read_tokens
from rljax.diagnose.evidence import CAUSES, TABLES, first_remedy
from rljax.diagnose.signals import PROJECTS
from rljax.diagnose.token_facts import read_facts
from rljax.record.token_dumps import ColumnSource, make_dump, write_dump
from rljax.rollout.types import InjectConfig, RolloutConfig, ServerForm
from rljax.run.config import Config

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "data" / "planted_logs"
REMEDIES = (ROOT / "docs/diagnose.md").read_text(encoding="utf-8").partition("## Remedies\n")[2]
KINDS = {"none", "numerics", "staleness", "settings", "weights", "optimisation", "rewards", "cannot tell"}
SECTIONS = ("Remedies", "What is measured", "Limits of the field", "Where it comes from", "What to measure next")


@pytest.fixture
def log(tmp_path):
    def unpack(cause):
        path = tmp_path / f"{cause}.jsonl"
        path.write_bytes(gzip.decompress((LOGS / f"{cause}.jsonl.gz").read_bytes()))
        return path

    return unpack


def test_the_page_answers_every_question(log):
    status, page, err = outcome(main, [log("eight_bits")])
    assert (status, err) == (1, "")
    assert page.splitlines()[0].endswith("eight_bits.jsonl: eight_bits (likely)")
    assert [line for line in page.splitlines() if line in SECTIONS] == list(SECTIONS)
    assert "CROSSED" in page
    assert "rljax docs diagnose#eight_bits" in page
    assert max(map(len, page.splitlines())) <= 120


def test_the_example_of_the_docs_is_what_is_printed(log, monkeypatch):
    path = log("eight_bits")
    monkeypatch.chdir(path.parent)
    _, page, _ = outcome(main, [path.name, "--tokens", LOGS / "eight_bits.parquet"])
    text = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)[1].splitlines()
    lines = iter(page.splitlines())
    assert [line for line in shown if line.strip() != "..." and line not in lines] == []


def test_the_limits_of_the_docs_are_those_in_use():
    text = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    written = {(name, float(limit)) for name, limit in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE)}
    known = {(signal, round(limit, 6)) for signal, limit, *_ in TABLES["limits"]}
    assert written == known
    assert all(f"`{cause}`" in text for cause in CAUSES)


def test_json_has_the_whole_diagnosis(log, tmp_path):
    status, out, _ = outcome(main, [log("temperature"), "--json", "-"])
    found = json.loads(out)
    assert (status, found["cause"], found["kind"]) == (1, "temperature", "settings")
    assert found["measured"]["log"]["columns"]["k3_kl"] == "mismatch/k3_kl"
    assert found["remedies"] == "rljax docs diagnose#temperature"
    _, page, _ = outcome(main, [log("temperature"), "--json", tmp_path / "out.json"])
    assert page.startswith(str(tmp_path))
    assert json.loads((tmp_path / "out.json").read_text()) == found


def test_a_run_directory_brings_its_newest_dump(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_bytes(gzip.decompress((LOGS / "head_dtype.jsonl.gz").read_bytes()))
    shutil.copyfile(LOGS / "healthy.parquet", tmp_path / "rollouts" / "step_000020.parquet")
    shutil.copyfile(LOGS / "head_dtype.parquet", tmp_path / "rollouts" / "step_000040.parquet")
    status, page, _ = outcome(main, [tmp_path])
    assert status == 1
    assert page.splitlines()[0].endswith("head_dtype (sure)")
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
        ("wandb-summary.json", {"reward/mean": 0.5}, "is a summary of W&B: it has only the last value of each metric"),
        ("x.json", SUMMARY, "is a summary of W&B: it has only the last value of each metric and is no log. Export"),
        ("x.jsonl", {"reward/mean": 0.5, "_wandb": {}}, "is a summary of W&B"),
        (
            "1.jsonl",
            {"input": "1+1=", "output": "2", "gts": "2", "score": 1.0},
            f"is the rollout data of verl, {TEXTS}",
        ),
        ("completions_00001.parquet", None, f"is the completions of TRL, {TEXTS}"),
        ("x.parquet", None, f"is the completions of TRL, {TEXTS}"),
    ],
)
def test_what_is_neither_log_nor_tokens_is_named(tmp_path, monkeypatch, name, content, said):
    monkeypatch.chdir(tmp_path)
    path = Path("data", name)
    path.parent.mkdir()
    if content is None:
        pq.write_table(pa.table({"prompt": ["1+1="], "completion": ["2"], "reward": [1.0]}), path)
    else:
        path.write_text(json.dumps(content) + "\n")
    by_columns = name == "x.parquet"  # only what reads tokens opens it
    is_summary = content is not None and "reward/mean" in content  # of which a diagnosis says so
    readers = [view.main, compare.main, *([] if by_columns else [replay.main, plot.main])]
    commands = readers if is_summary else [main, *readers]
    if is_summary:
        status, page, _ = outcome(main, [path])
        assert (status, page.splitlines()[0]) == (1, f"{path}: one_row (sure)")
    for command in commands:
        assert f"{path} {said}" in refused(command, [path])
    if "texts" in said and not by_columns:
        for command in commands[:-1]:
            assert said in outcome(command, ["data"])[2]
    assert [each.name for each in tmp_path.iterdir()] == ["data"]
    assert [each.name for each in path.parent.iterdir()] == [name]


def test_one_of_several_runs_is_chosen(tmp_path):
    """A chart of W&B has a column for each run, and a table of runs a column with their names."""
    chart, table = tmp_path / "chart.csv", tmp_path / "table.jsonl"
    rows = [(step, run, 0.01 if run == "a" else 0.4) for step in range(1, 13) for run in ("a", "b")]
    names = [f"{run} - {name}" for run in "ab" for name in ("critic/score/mean", "rollout_corr/k3_kl")]
    lines = [f"{step},0.{step + 10},0.0005,0.5,{0.002 * step**2}" for step in range(1, 13)]
    chart.write_text("\n".join([",".join(["Step", *(f'"{name}"' for name in names)]), *lines]))
    table.write_text("".join(f'{{"step": {step}, "run": "{run}", "vllm_kl": {kl}}}\n' for step, run, kl in rows))
    for path, bad in ((chart, "mismatch_growth"), (table, "cannot_tell")):
        status, page, _ = outcome(main, [path])
        assert (status, page.splitlines()[0]) == (1, f"{path}: several_runs (sure)")
        assert "one run: --run a" in page
        assert outcome(main, [path, "--run", "a"])[0] == 0
        assert json.loads(outcome(main, [path, "--run", "b", "--json", "-"])[1])["cause"] == bad
        assert "no run 'c' in the log, which has a, b" in outcome(main, [path, "--run", "c"])[2]


def test_runs_may_have_numbers_for_names(tmp_path):
    table = tmp_path / "table.jsonl"
    rows = [(step, run) for step in range(1, 13) for run in (17, 18)]
    table.write_text("".join(f'{{"step": {step}, "run_id": {run}, "vllm_kl": 0.01}}\n' for step, run in rows))
    assert "one run: --run 17" in outcome(main, [table])[1]
    assert outcome(main, [table, "--run", "18"])[0] == 0


def test_a_folder_with_texts_beside_its_log_is_read(tmp_path, log):
    (tmp_path / "run").mkdir()
    log("healthy").rename(tmp_path / "run" / "history.jsonl")
    (tmp_path / "run" / "1.jsonl").write_text('{"input": "1+1=", "output": "2"}\n')
    assert outcome(main, [tmp_path / "run"])[0] == 0


def test_a_healthy_log_has_status_0_and_needs_numpy_alone(log):
    """A token file needs another package, which is named."""
    status, page, err = rljax_with_only(["numpy"], "diagnose", log("healthy"))
    assert (status, err) == (0, "")
    assert page.splitlines()[0].endswith("healthy")
    status, _, err = rljax_with_only(["numpy"], "diagnose", LOGS / "healthy.parquet")
    assert (status, err.count("\n")) == (2, 1)
    assert "a token file or a run directory needs the package" in err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.jsonl", None, "none.jsonl: no such file or directory"),
        ("loss.jsonl", '{"step": 1, "loss": 2.0}\n', "no mismatch, reward or gradient norm of a known name"),
        ("notes.jsonl", "hello\n", "notes.jsonl: line 1 is"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert said in refused(main, [tmp_path / name])


def test_a_column_that_is_not_there_or_has_two_roles_is_named():
    words = [LOGS / "healthy.parquet", "--trainer"]
    assert "no column 'hf' in the dump, which has ['rollout', 'trainer']" in refused(main, [*words, "hf"])
    both = refused(main, [*words, "rollout", "--rollout", "rollout"])
    assert "expected two different columns, got 'rollout' twice" in both


def test_a_named_column_comes_before_a_declared_one(tmp_path):
    """The file says that b is the trainer's and c the engine's."""
    columns = {name: [[-1.0, -2.0]] for name in "bac"}
    sources = {"b": ColumnSource(role="trainer"), "c": ColumnSource(role="rollout")}
    path = write_dump(tmp_path / "three.parquet", make_dump(["x"], [[5, 6]], [[True] * 2], columns, sources))
    for words, sides in (([], "bc"), (["--trainer", "a"], "ac"), (["--rollout", "a"], "ba")):
        found = json.loads(outcome(main, [path, *words, "--json", "-"])[1])["measured"]["tokens"]
        assert (found["trainer"] + found["rollout"], found["roles_known"]) == (sides, True)


def test_the_remedies_of_the_docs_are_those_of_the_table():
    """Each cause has a list with rljax's own options, and three remedies have a column with those of each project."""
    options = {name: project["options"] for name, project in TABLES["projects"].items()}
    own = {name: options["rljax"].get(name, (of_any,))[0] for name, (_, of_any) in TABLES["remedies"].items()}
    for cause, (_, _, names) in TABLES["causes"].items():
        assert bool(names) == (cause != "healthy")
        listed = REMEDIES.partition(f"### {cause}\n\n")[2].partition("\n\n")[0].splitlines()
        assert listed == [f"{i}. {TABLES['remedies'][name][0]}: {own[name]}" for i, name in enumerate(names, 1)]
    columns = ("truncate", "cut", "room")
    text = REMEDIES.partition("### in_your_framework\n")[2].partition("###")[0]
    first, _, *rows = (
        [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines() if line[:1] == "|"
    )
    assert first == [TABLES["remedies"][name][0] for name in columns]
    others = [options[name] for name in options if name != "rljax"]
    assert rows == [[each.get(name, ("",))[0] for name in columns] for each in others]
    assert set(options) < set(PROJECTS)
    assert {kind for kind, _ in CAUSES.values()} == KINDS


@pytest.mark.parametrize("project", PROJECTS)
def test_the_first_remedy_is_in_the_options_of_the_project(project):
    """A remedy without an option of the project names no key of rljax's configuration either."""
    own = dict(TABLES["projects"].get(project, {"options": {}})["options"].values())
    for first in (first_remedy(cause, project) for cause in CAUSES if cause != "healthy"):
        assert first["source"].endswith(own.get(first["option"], ""))
        assert first["option"] in own or not re.search(r"--[a-z]+\.[a-z-]+ ", first["option"])


def test_each_remedy_has_settings_and_a_source():
    listed = re.findall(r"^\d+\. (.+?): (`.+)$", REMEDIES, re.MULTILINE)
    costs = REMEDIES.partition("### What each remedy costs")[2].partition("|---|---|---|\n")[2]
    table = re.findall(r"^\| (.+?) \| (.+?) \| (.+) \|$", costs, re.MULTILINE)
    assert {name for name, _ in listed} == {name for name, _, _ in table}
    for _, settings in listed:
        for section, name in re.findall(r"--([a-z]+)\.([a-z0-9-]+)", settings):
            assert hasattr(getattr(Config(), section), name.replace("-", "_"))
    for _, _, source in table:
        pages = re.findall(r"\]\((\w+\.md)\)", source)
        assert pages or re.search(r"arXiv \d{4}\.\d{5}", source)
        assert all((ROOT / "docs" / page).is_file() for page in pages)


def test_numbers_of_the_bias_table_are_those_on_record():
    measured = json.loads((ROOT / "benchmarks" / "correction_bias.json").read_text())["remedies"]
    drifts = {"no correction": "0.97", "`token_tis`": "0.063", "`two_sided_tv`": "0.024"}
    drifts["`score_centering`, k = 2"] = "0.33"
    for name, said in drifts.items():
        assert f"{measured[name]['large']['drift']:.2g}" == said
    assert all(f"drift {said} for 0.97" in REMEDIES for name, said in drifts.items() if name != "no correction")
