"""``rljax config`` prints the settings of a run, or some of their values."""

from toy_runs import outcome, refused

from rljax.commands.config import main
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml


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
