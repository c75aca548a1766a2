"""``rljax export``: mistakes that it names before it reads the run, and what it says of adapters."""

import json
from types import SimpleNamespace

import pytest
from tiny_adapters import CONFIG, LORA, random_adapters
from toy_runs import printed, refused

from rljax.commands.export import main
from rljax.policy.peft import ADAPTER_CONFIG


def test_mistakes_are_named_before_the_run_is_read(tmp_path):
    (tmp_path / "file").touch()
    assert refused(main, [tmp_path / "run", tmp_path / "file"]) == f"error: {tmp_path}/file: File exists\n"
    assert "no model at" in refused(main, [tmp_path / "run", tmp_path / "new"])
    said = refused(main, [tmp_path / "run", tmp_path / "new", "--model", "configs/toy-base"])
    assert "run is not a run directory: it has no config.yaml" in said
    assert not (tmp_path / "new").exists()
    for file, more in (("adapter_config.json", ()), ("config.json", ("--adapter",))):
        (tmp_path / file).touch()
        said = refused(main, [tmp_path / "run", tmp_path, *more])
        assert said.startswith(f"error: {tmp_path} has {file}, and transformers would load both together: name another")


@pytest.mark.parametrize("shape", [{}, {"text_config": {}}])
def test_names_that_vllm_reads_otherwise_are_said(shape, tmp_path, monkeypatch):
    """A model that reads images has its text model one level below."""
    settings, state = SimpleNamespace(lora=LORA), SimpleNamespace(params=random_adapters())
    policy = SimpleNamespace(run="a run", step=3, hf_path=tmp_path, config=CONFIG, settings=lambda: settings)
    policy.load_state = lambda mesh: (state, None)
    monkeypatch.setattr("rljax.commands.export.find_policy", lambda *_, **__: policy)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    said = printed(main, ["a run", tmp_path / "out", "--adapter"])
    assert ("for vLLM, rename model.layers to model.language_model.layers" in said) == bool(shape)
    assert json.loads((tmp_path / "out" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == str(tmp_path)
