"""The examples of docs/compare.md run, and what its exporters write is read back as the framework held it."""

import json
import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.compare.importers import read_tokens
from rljax.compare.sampling import split_sampler
from rljax.compare.scorers import split_spec

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")


def example(language, part):
    (block,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if part in text]
    return block


def run(part, **names):
    scope = {"json": json, **names}
    exec(compile(example("python", part), "docs/compare.md", "exec"), scope)
    return scope


def batch():
    """Two rows: prompts padded on the left to 3, responses on the right to 4; token 0 is padding."""
    return {
        "prompts": torch.tensor([[0, 5, 6], [7, 8, 9]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "responses": torch.tensor([[1, 2, 0, 0], [3, 4, 5, 6]]),
        "response_attention": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]]),
        "rollout": -torch.arange(1.0, 9.0).reshape(2, 4) / 8,
        "trainer": -torch.arange(1.0, 9.0).reshape(2, 4) / 4,
    }


def check(dump, masked):
    np.testing.assert_array_equal(dump.token_ids[0], [5, 6, 1, 2])
    np.testing.assert_array_equal(dump.token_ids[1], [7, 8, 9, 3, 4, 5, 6])
    np.testing.assert_array_equal(dump.response_mask[0], [False, False, True, True])
    np.testing.assert_array_equal(dump.response_mask[1], [False] * 3 + [True, not masked, True, True])
    np.testing.assert_array_equal(dump.logprobs["rollout"][0], np.float32([np.nan, np.nan, -0.125, -0.25]))
    if "trainer" in dump.logprobs:
        np.testing.assert_array_equal(dump.logprobs["trainer"][1][3:], np.float32([-1.25, -1.5, -1.75, -2.0]))


def test_the_verl_exporter_writes_what_is_read(tmp_path):
    data = batch()
    attention = torch.cat([data["prompt_mask"], data["response_attention"]], dim=1)
    names = {"rollout": "rollout_log_probs", "trainer": "old_log_probs"}
    held = {key: data[key] for key in ("prompts", "responses", "response_mask")}
    held |= {"attention_mask": attention} | {theirs: data[ours] for ours, theirs in names.items()}
    with (tmp_path / "t.jsonl").open("w") as file:
        run("def export")["export"](SimpleNamespace(batch=held), 3, file)
    dump = read_tokens(tmp_path / "t.jsonl")
    assert dump.sequence_ids == ("3/0", "3/1")
    check(dump, masked=True)


@pytest.mark.parametrize("has_old", [True, False])
def test_the_trl_exporter_writes_what_is_read(tmp_path, monkeypatch, has_old):
    data = batch()
    out = {
        "prompt_ids": data["prompts"],
        "prompt_mask": data["prompt_mask"],
        "completion_ids": data["responses"],
        "completion_mask": data["response_attention"],
        "sampling_per_token_logps": data["rollout"],
    } | ({"old_per_token_logps": data["trainer"]} if has_old else {})

    class Base:
        accelerator, state = SimpleNamespace(process_index=1), SimpleNamespace(global_step=2)

        def _generate_and_score_completions(self, inputs):
            return out

    monkeypatch.chdir(tmp_path)
    trainer = run("ExportingTrainer", GRPOTrainer=Base)["ExportingTrainer"]()
    assert trainer._generate_and_score_completions(None) is out
    dump = read_tokens(tmp_path / "tokens_1.jsonl")
    assert dump.sequence_ids == ("2/1/0", "2/1/1")
    assert ("trainer" in dump.logprobs) == has_old
    check(dump, masked=False)


def test_the_jsonl_and_the_dump_of_the_page(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl").write_text(example("json", "rljax_tokens"))
    dump = read_tokens(tmp_path / "x.jsonl")
    assert dump.sequence_ids == ("a", "b")
    np.testing.assert_array_equal(dump.logprobs["rollout"][1], np.float32([np.nan, np.nan, -2.0]))
    monkeypatch.chdir(tmp_path)
    run("make_dump")
    assert read_tokens("tokens.parquet").sources["trainer"].dtype == "bfloat16"


def test_every_command_of_the_page_is_understood():
    """A server's URL stands in a file that the page's own commands write."""
    tool = runpy.run_path(str(ROOT / "tools" / "compare_mismatch.py"))
    joined = PAGE.replace("\\\n", " ")
    commands = re.findall(r"^python tools/compare_mismatch\.py (.*)$", joined, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        options = tool["parse"](
            shlex.split(re.sub(r"\$\(cat [\w/.]+\.url\)", "http://127.0.0.1:1", command), comments=True)
        )
        assert (options.tokens is None) != (options.toy_prompts is None)
        for spec in options.scorer:
            split_spec(spec)
        if options.sample is not None:
            split_sampler(options.sample)
    head = [line for line in PAGE.split("```")[1].replace("\\\n", " ").splitlines()[1:] if line]
    assert [line.split()[1].split("/")[-1] for line in head] == [
        "vllm_server.sh",
        "compare_mismatch.py",
    ]
