"""``rljax export``: mistakes that it names before it reads the run."""

import pytest
from toy_runs import refused

from rljax.commands.export import main


@pytest.mark.parametrize(("file", "more"), [("adapter_config.json", ()), ("config.json", ("--adapter",))])
def test_a_model_and_an_adapter_have_two_directories(file, more, tmp_path):
    (tmp_path / file).touch()
    said = refused(main, [tmp_path / "run", tmp_path, *more])
    assert said.startswith(f"error: {tmp_path} has {file}, and transformers would load both together: name another")


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    assert refused(main, [tmp_path / "run", tmp_path / "file"]) == f"error: {tmp_path}/file: File exists\n"
    assert "no model at" in refused(main, [tmp_path / "run", tmp_path / "new"])
    assert not (tmp_path / "new").exists()


def test_a_model_has_no_other_model(tmp_path):
    said = refused(main, [tmp_path / "run", tmp_path / "new", "--model", "configs/toy-base"])
    assert "run is not a run directory: it has no config.yaml" in said
