"""A resume and a fork compare data and settings with those of the run before, even of an earlier rljax."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import scripted_runs
import tokenizers
from changed_configs import changed
from scripted_engine import ScriptedEngine
from scripted_runs import MESH, POLICY
from toy_problems import load_once
from toy_runs import TOY_BASE, comparable, completed, outcome, printed

from rljax.commands.config import main
from rljax.data.tokenizer import load_tokenizer
from rljax.errors import ConfigError
from rljax.record.rows import read_rows
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.run.build import Inputs, build, load_problems
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import REMOVED, Config, EvalConfig, RunConfig
from rljax.run.config_file import config_to_yaml, dotted
from rljax.run.directory import FORK_MAY_DIFFER, check_same_run, prepare_directory, recorded_config
from rljax.run.step import Progress
from rljax.run.stop import StopRequest


def settings(base, **data):
    model, data = {"path": str(base)}, {"max_prompt_tokens": 64, **data}
    return scripted_runs.settings(base, model=model, data=data, packing={"row_tokens": 80}, eval={"every": 0})


@contextlib.contextmanager
def parts_of(config, tmp_path):
    tokenizer = load_tokenizer(config.model.path)
    problems = load_problems(config, tokenizer) if config.data.path else load_once(config, tokenizer)
    engine = ScriptedEngine(tokenizer, lambda prompt, sample, seed: "1$")
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints")) as checkpointer:
        parts = build(Inputs(config, POLICY, tokenizer, MESH), engine, checkpointer, problems, StopRequest())
        with contextlib.closing(parts.source):
            yield parts


def saved(config, tmp_path):
    with parts_of(config, tmp_path) as parts:
        return json.loads(json.dumps(parts.state_dict(Progress(step=3))))


def resumed(config, tmp_path, host):
    with parts_of(config, tmp_path) as parts:
        return parts.load_state_dict(host).step


@pytest.fixture
def base(tmp_path):
    return shutil.copytree(TOY_BASE, tmp_path / "base")


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def exchange(content):
    vocab = content["model"]["vocab"]
    vocab["1"], vocab["7"] = vocab["7"], vocab["1"]


def save_with_limits(path):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding()
    tokenizer.save(str(path))


def test_another_tokenizer_is_refused_but_not_another_form(base, tmp_path, capsys):
    host = saved(settings(base), tmp_path)
    other = shutil.copytree(base, tmp_path / "other")
    before = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(before, sort_keys=True, indent=7))
    assert resumed(settings(other), tmp_path, host) == 3
    save_with_limits(other / "tokenizer.json")
    assert resumed(settings(other), tmp_path, host) == 3
    assert capsys.readouterr().err == ""
    said = f"^{other}: the tokenizer reads or writes texts otherwise than before: put back the tokenizer that the run "
    for change in (exchange, lambda content: content.update(normalizer={"type": "Lowercase"})):
        (other / "tokenizer.json").write_text(json.dumps(before))
        rewrite(other / "tokenizer.json", change)
        with pytest.raises(ValueError, match=said):
            resumed(settings(other), tmp_path, host)


def test_another_chat_template_is_refused_by_name(base, tmp_path):
    """The prompts of the toy are plain texts, so only the template differs."""
    text, file = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", base / "chat_template.jinja"
    rewrite(base / "tokenizer_config.json", lambda content: content.update(chat_template=text))
    host = saved(settings(base), tmp_path)
    rewrite(base / "tokenizer_config.json", lambda content: content.pop("chat_template"))
    file.write_text(text + "\n")
    assert resumed(settings(base), tmp_path, host) == 3
    file.write_text(text + " ")
    with pytest.raises(ValueError, match=f"^{base}: the chat template is not the one before: put back the template"):
        resumed(settings(base), tmp_path, host)


def problems_file(path, order=range(4), **extra):
    rows = [{"prompt": f"{100 + i}+{200 + i}=", "answer": str(300 + 2 * i), "extra_info": {"i": i}} for i in range(4)]
    rows[2] |= extra
    path.write_text("".join(json.dumps(rows[i]) + "\n" for i in order))
    return {"task": "file", "path": str(path), "reward": "addition"}


@pytest.mark.parametrize("extra", [{"extra_info": {"i": 3}}, {"data_source": "another"}])
def test_other_extra_info_is_refused_by_name(base, tmp_path, extra):
    host = saved(settings(base, **problems_file(tmp_path / "p.jsonl")), tmp_path)
    config = settings(base, **problems_file(tmp_path / "p.jsonl", **extra))
    with pytest.raises(ValueError, match=r"p.jsonl: the extra_info of the training problems, or another entry for the"):
        resumed(config, tmp_path, host)
    for other in ({"answer": "1"}, {"order": (1, 0, 2, 3)}):
        config = settings(base, **problems_file(tmp_path / "p.jsonl", **other))
        with pytest.raises(ValueError, match=r"p.jsonl: the training problems or their order are not those before: "):
            resumed(config, tmp_path, host)
    config = settings(base, **problems_file(tmp_path / "p.jsonl"))
    assert resumed(config, tmp_path, host) == 3


def recorded(tmp_path, **changes):
    config = changed(Config(run=RunConfig(dir=str(tmp_path))), **changes)
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    return config


@pytest.mark.parametrize("may_differ", [(), FORK_MAY_DIFFER])
def test_an_evaluation_may_be_added_changed_and_removed(tmp_path, may_differ):
    for evaluation in (
        {"every": 5, "datasets": ("toy", "toy_swaps")},
        {"n": 4, "temperature": 1.0, "pass_k": (1, 2)},
        {"every": 0, "max_response_tokens": 3000},
    ):
        check_same_run(changed(recorded(tmp_path), eval=evaluation), tmp_path, may_differ=may_differ)
        config = recorded(tmp_path, eval=evaluation)
        check_same_run(changed(config, eval=dataclasses.asdict(EvalConfig())), tmp_path, may_differ=may_differ)


LONG, SHORT = ({"eval": {"max_response_tokens": limit}} for limit in (30000, 5))
EXACT, PLAYED = {"rollout": {"engine": "exact"}}, {"rollout": {"environment": "a.b:C"}}
WATCHED, LONGER = {"schedule": {"metric": "eval/toy/accuracy"}}, {"run": {"steps": 30}}
IDLE = {"loss": {"kind": "policy_gradient", "old_logprobs": "rollout"}}  # does nothing


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (WATCHED, {}),
        (EXACT, SHORT),
        (PLAYED, SHORT),
        ({}, LONGER),
        ({"schedule": {"kind": "linear", "horizon": 40}}, LONGER),
        ({}, {"precision": {"remat": "blocks"}, "diagnosis": {"self_every": 5}, "policy": {"attention": "xla"}}),
        ({}, {"rollout": {"episode": EpisodeConfig(max_rows=2, workers=2)}}),
    ],
)
def test_settings_that_may_change(tmp_path, before, now):
    check_same_run(changed(recorded(tmp_path, **before), **now), tmp_path)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (WATCHED, {"eval": {"n": 4, "temperature": 1.0}}, r"eval.n \("),
        (WATCHED, {"eval": {"every": 7}}, r"eval.every \("),
        (EXACT, LONG, r"eval.max_response_tokens \("),
        (PLAYED, LONG, r"eval.max_response_tokens \("),
        ({"schedule": {"kind": "linear"}}, LONGER, r"run.steps \("),
        ({"run": {"steps": 21}} | WATCHED, LONGER, r"run.steps \("),
        (EXACT, {"precision": {"remat": "blocks"}}, r"precision.remat \("),
        ({"schedule": {"metric": "mismatch_self/k3_kl"}}, {"diagnosis": {"self_every": 5}}, r"diagnosis.self_every \("),
    ],
)
def test_a_setting_is_bound_where_it_changes_the_training(tmp_path, before, now, said):
    with pytest.raises(ConfigError, match=f"holds a run with other settings: {said}"):
        check_same_run(changed(recorded(tmp_path, **before), **now), tmp_path)


def test_a_fork_may_have_other_steps_but_no_idle_setting(tmp_path):
    config = recorded(tmp_path)
    check_same_run(changed(config, run={"steps": 30}, schedule={"kind": "cosine"}), tmp_path, FORK_MAY_DIFFER)
    check_same_run(changed(recorded(tmp_path, **IDLE), rollout={"top_logprobs": 20}), tmp_path, FORK_MAY_DIFFER)
    with pytest.raises(ConfigError, match="old_logprobs = rollout does nothing"):
        check_same_run(changed(recorded(tmp_path), rollout={"top_logprobs": 20}, **IDLE), tmp_path, FORK_MAY_DIFFER)

    # A refusal names the setting that gave the other run.
    config = changed(recorded(tmp_path), rollout={"temperature": 0.5})
    for key, place in (("resume", tmp_path), ("fork", tmp_path / "checkpoints/3")):
        run = {"dir": "new", key: str(place)}
        with pytest.raises(ConfigError, match=rf"rollout.temperature \(1.0 there, 0.5 now\); give another run.{key}$"):
            check_same_run(changed(config, run=run), tmp_path)


@pytest.fixture
def two_places(tmp_path):
    """Returns a directory with the record and the checkpoint of a run, and the place of another run."""
    first = tmp_path / "first"
    (first / "checkpoints/1").mkdir(parents=True)
    (first / "metrics.jsonl").write_text('{"step": 1}\n')
    return first, tmp_path / "second"


def test_a_run_goes_on_in_another_directory_with_its_best_step(two_places, capsys):
    """The run there began as a fork. Once it has checkpoints of its own, the first directory is not needed."""
    first, second = two_places
    before = recorded(first)
    recorded(first, run={"fork": "elsewhere/checkpoints/1"})
    (first / "best/1").mkdir(parents=True)
    config = changed(before, run={"dir": str(second), "resume": str(first)})
    with pytest.raises(ConfigError, match=r"no checkpoint of its own yet; give run.fork = .*first/checkpoints/1$"):
        prepare_directory(config, second)
    (first / "checkpoints/2").mkdir()
    prepare_directory(config, second)
    assert sorted(path.name for path in second.iterdir()) == ["best", "checkpoints", "config.yaml", "metrics.jsonl"]
    assert (second / "best/1").is_dir()
    shutil.rmtree(first)
    prepare_directory(config, second)
    assert capsys.readouterr().err == ""
    prepare_directory(changed(config, run={"resume": "a/third"}), second)
    said = f"warning: run.resume = a/third is not read: {second} holds a run, which goes on\n"
    assert capsys.readouterr().err == said
    with pytest.raises(ConfigError, match=r"rollout.temperature \(1.0 there, 0.5 now\); give another run.dir$"):
        prepare_directory(changed(config, rollout={"temperature": 0.5}), second)


def test_a_fork_without_a_step_of_its_own_may_be_corrected(two_places):
    """Its first start may have failed for the very setting, such as the dtype of the server's cache."""
    first, second = two_places
    fork = changed(recorded(first), run={"dir": str(second), "fork": f"{first}/checkpoints/1"})
    prepare_directory(fork, second)
    other = changed(fork, optimizer={"learning_rate": 2 * fork.optimizer.learning_rate})
    prepare_directory(other, second)
    (second / "checkpoints/2").mkdir()
    with pytest.raises(ConfigError, match=r"other settings: optimizer.learning_rate .*; give another run.dir$"):
        prepare_directory(other, second)


# ---- runs of an earlier rljax ----


BEFORE = Path(__file__).parents[1] / "data/run_of_a478350f"


def test_it_goes_on_from_its_checkpoint(tmp_path):
    config = recorded_config(BEFORE)
    assert (config.data.batch_size, config.rollout.group_size, config.data.reward) == (2, 4, "parity_reward:reward")
    assert config.diagnosis.position_edges == (4, 8, 16, 24)
    run_dir = shutil.copytree(BEFORE, tmp_path / "run")
    words = [run_dir / "config.yaml", "--run.dir", run_dir, "--model.path", BEFORE / "base", "--run.steps", "3"]
    output = completed(words)
    assert "damaged" not in output
    rows = read_rows(run_dir / "metrics.jsonl")
    assert rows[:2] == read_rows(BEFORE / "metrics.jsonl")
    assert len(comparable(run_dir)) == 3
    assert rows[2]["optimizer/grad_norm"] == pytest.approx(0.463695, rel=1e-3)  # of the run that was not interrupted


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_may_have_its_default_alone(key, tmp_path):
    assert key not in dict(dotted(dataclasses.asdict(Config())))
    default, remedy = REMOVED[key]
    file = tmp_path / "old.yaml"
    above = "\n".join(f"{'  ' * depth}{name}:" for depth, name in enumerate(key.split(".")))
    file.write_text(f"{above} {json.dumps(default)}\n")
    printed(main, [file])
    file.write_text(f"{above} [7]\n")
    status, _, said = outcome(main, [file])
    assert status == 2
    assert f"{file}:{key.count('.') + 1}: {key} was removed " in said
    assert f"got [7]: {remedy}; delete this key" in said
    status, _, said = outcome(main, [f"--{key.replace('_', '-')}", "7"])
    assert (status, said.strip()) == (2, f"error: command line: {key} was removed: {remedy}; leave this option out")
