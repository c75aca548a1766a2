"""``rljax config`` prints the settings of a run, some of their values, and the explanation of a key."""

import dataclasses

import pytest
from toy_runs import outcome

from rljax.commands.config import explanation, main
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml, dotted


def test_every_setting_is_printed_as_yaml(tmp_path):
    status, out, _ = outcome(main, ["quickstart", "--run.steps", "7"])
    assert status == 0
    (tmp_path / "written.yaml").write_text(out)
    assert outcome(main, [tmp_path / "written.yaml"])[1] == out
    assert "steps: 7" in out
    assert outcome(main, [])[1] == config_to_yaml(Config())


def test_some_values_are_printed_one_a_line():
    words = ["--show", "rollout.dtype,max_engine_tokens,run.dir", "quickstart", "--rollout.dtype", "float16"]
    assert outcome(main, words)[:2] == (0, "float16\n44\nruns/quickstart\n")


def test_a_key_is_explained_with_its_source():
    _, out, _ = outcome(main, ["rollout.group_size", "quickstart"])
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    found = {words[0]: words[1] for words in lines if len(words) == 2}
    assert found["type"] == "int"
    assert found["default"] == "16"
    assert ["refused", "unless it is at least 2"] in lines
    assert "quickstart.yaml:" in found["value"]
    assert found["value"].startswith("8 (")
    assert "value    9 (command line)" in outcome(main, ["rollout.group_size", "--rollout.group-size", "9"])[1]
    assert "(the default)" in outcome(main, ["rollout.group_size"])[1]


def test_what_other_rooms_refuse_is_told():
    _, out, _ = outcome(main, ["rollout.max_staleness"])
    assert "colocated servers sleep while the trainer trains" in " ".join(out.split())


def test_a_section_lists_its_keys():
    _, out, _ = outcome(main, ["schedule"])
    assert [line.partition(":")[0] for line in out.splitlines()] == [
        f"schedule.{field.name}" for field in dataclasses.fields(Config().schedule)
    ]


@pytest.mark.slow
def test_every_key_can_be_explained():
    for key, value in dotted(dataclasses.asdict(Config())):
        if not isinstance(value, dict):
            text = explanation(key, value, value, "the default")
            assert any(line.startswith("  type ") for line in text)
            assert not text[1].startswith("  type "), key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rollout.groupsize"],
            "rollout.groupsize is neither a key nor a configuration; did you mean rollout.group_size?",
        ),
        (["nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["--show", "run.step", "quickstart"], "unknown key run.step; did you mean run.steps?"),
        (["--show"], "--show needs a key, as in: rljax config --show rollout.dtype quickstart"),
        (["run.steps", "quickstart", "--run.steps", "0"], "run.steps must be at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    status, out, err = outcome(main, words)
    assert (status, out) == (2, "")
    assert err.endswith(f"{message}\n")
    assert err.count("\n") == 1
