"""The examples of docs/compare.md run, and what its exporters write is read back unchanged.

``tests/peers`` runs the exporters in the frameworks themselves.
"""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pages import code_block, run_block

from rljax.commands import compare
from rljax.compare.importers import read_tokens
from rljax.compare.sampling import split_sampler
from rljax.compare.scorers import split_spec

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")


@pytest.fixture
def token_file():
    return run_block("compare.md", "class TokenFile")["TokenFile"]


def batch():
    """Returns two rows: prompts padded on the left to 3, responses on the right to 4.

    Token 0 is padding.
    """
    return {
        "prompts": torch.tensor([[0, 5, 6], [7, 8, 9]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "responses": torch.tensor([[1, 2, 0, 0], [3, 4, 5, 6]]),
        "response_attention": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]]),
        "rollout": -torch.arange(1.0, 9.0).reshape(2, 4) / 8,
        "trainer": -torch.arange(1.0, 9.0).reshape(2, 4) / 4,
    }


def check(dump, columns):
    np.testing.assert_array_equal(dump.token_ids[0], [5, 6, 1, 2])
    np.testing.assert_array_equal(dump.token_ids[1], [7, 8, 9, 3, 4, 5, 6])
    np.testing.assert_array_equal(dump.response_mask[0], [False, False, True, True])
    np.testing.assert_array_equal(dump.response_mask[1], [False] * 3 + [True, False, True, True])
    assert set(dump.logprobs) == set(columns)
    for column in columns:
        assert (dump.role(column), dump.sources[column].temperature) == (column, 0.7)
    np.testing.assert_array_equal(dump.logprobs["rollout"][0], np.float32([np.nan, np.nan, -0.125, -0.25]))
    if "trainer" in columns:
        np.testing.assert_array_equal(dump.logprobs["trainer"][1][3:], np.float32([-1.25, -1.5, -1.75, -2.0]))


def written(folder):
    (path,) = folder.glob("tokens_*.jsonl")
    return read_tokens(path)


def test_the_verl_exporter_writes_what_is_read(tmp_path, token_file):
    data = batch()
    attention = torch.cat([data["prompt_mask"], data["response_attention"]], dim=1)
    names = {"rollout": "rollout_log_probs", "trainer": "old_log_probs"}
    held = {key: data[key] for key in ("prompts", "responses", "response_mask")}
    held |= {"attention_mask": attention} | {theirs: data[ours] for ours, theirs in names.items()}
    export = run_block("compare.md", "def export(batch")["export"]
    export(SimpleNamespace(batch=held), 3, token_file(tmp_path, 0.7))
    dump = written(tmp_path)
    assert dump.sequence_ids == ("3/1", "3/2")
    check(dump, ("trainer", "rollout"))


def test_verls_default_trainers_exporter_writes_what_is_read(tmp_path, token_file):
    data, rows = batch(), {}
    for key, ours in {"responses": "responses", "response_mask": "response_mask", "old_log_probs": "trainer"}.items():
        rows[key] = [data[ours][0][:2], data[ours][1]]
    rows |= {"prompts": [torch.tensor([5, 6]), torch.tensor([7, 8, 9])]}
    rows |= {"rollout_log_probs": [data["rollout"][0][:2], data["rollout"][1]]}

    class Base:
        config = SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(temperature=0.7, top_p=0.9, top_k=-1)),
            trainer=SimpleNamespace(default_local_dir=str(tmp_path)),
        )
        global_steps = 4

        def _compute_old_log_prob(self, batch, metrics):
            return batch

    def kv_batch_get(*, keys, partition_id, select_fields):
        assert (keys, partition_id) == (["a", "b"], "train")
        return {field: rows[field] for field in select_fields}

    names = {"TokenFile": token_file, "PPOTrainerSync": Base, "register_trainer": lambda name: lambda cls: cls}
    names |= {"tq": SimpleNamespace(kv_batch_get=kv_batch_get)}
    trainer = run_block("compare.md", "class ExportingTrainer(PPOTrainerSync)", **names)["ExportingTrainer"]()
    meta = SimpleNamespace(keys=["a", "b"], partition_id="train")
    assert trainer._compute_old_log_prob(meta, {}) is meta
    dump = written(tmp_path)
    assert dump.sequence_ids == ("4/a/1", "4/b/2")
    assert dump.sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": -1}
    check(dump, ("trainer", "rollout"))


@pytest.mark.parametrize("has_old", [True, False])
def test_the_trl_exporter_writes_what_is_read(tmp_path, token_file, has_old):
    data = batch()
    empty = torch.zeros(1, 4, dtype=torch.long)  # mask_truncated_completions leaves this of a response
    out = {
        "prompt_ids": torch.cat([data["prompts"], data["prompts"][:1]]),
        "prompt_mask": torch.cat([data["prompt_mask"], data["prompt_mask"][:1]]),
        "completion_ids": torch.cat([data["responses"], data["responses"][:1]]),
        "completion_mask": torch.cat([data["response_attention"], empty]),
        "tool_mask": torch.cat([data["response_mask"], empty]),
        "sampling_per_token_logps": torch.cat([data["rollout"], data["rollout"][:1]]),
    } | ({"old_per_token_logps": torch.cat([data["trainer"], data["trainer"][:1]])} if has_old else {})

    class Base:
        accelerator, state = SimpleNamespace(process_index=1), SimpleNamespace(global_step=2)
        args = SimpleNamespace(output_dir=str(tmp_path), top_p=1.0, top_k=0, min_p=None)
        temperature = 0.7

        def _generate_and_score_completions(self, inputs):
            return out

    names = {"TokenFile": token_file, "GRPOTrainer": Base}
    trainer = run_block("compare.md", "class ExportingTrainer(GRPOTrainer)", **names)["ExportingTrainer"]()
    assert trainer._generate_and_score_completions(None) is out
    check(written(tmp_path), ("trainer", "rollout") if has_old else ("rollout",))
    trainer._generate_and_score_completions(None)
    assert written(tmp_path).sequence_ids == ("2/1/1", "2/1/2", "2/1/3", "2/1/4")


def test_the_jsonl_and_the_dump_of_the_page(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl").write_text(code_block("compare.md", "rljax_tokens", "json"))
    dump = read_tokens(tmp_path / "x.jsonl")
    assert dump.sequence_ids == ("a", "b")
    np.testing.assert_array_equal(dump.logprobs["rollout"][1], np.float32([np.nan, np.nan, -2.0]))
    monkeypatch.chdir(tmp_path)
    run_block("compare.md", "make_dump")
    assert read_tokens("tokens.parquet").sources["trainer"].dtype == "bfloat16"


def test_every_command_of_the_page_is_understood():
    """A server's URL is in a file that the page's own commands write."""
    joined = PAGE.replace("\\\n", " ")
    commands = re.findall(r"^rljax compare (.*)$", joined, re.MULTILINE)
    assert len(commands) == 8
    for command in commands:
        options = compare.parse(
            shlex.split(re.sub(r"\$\(cat [\w/.]+\.url\)", "http://127.0.0.1:1", command), comments=True)
        )
        if options.serve:
            continue
        assert (options.tokens is None) != (options.toy_prompts is None)
        for spec in options.scorer:
            split_spec(spec)
        if options.sample is not None:
            split_sampler(options.sample)
    head = [line for line in PAGE.split("```")[1].replace("\\\n", " ").splitlines()[1:] if line]
    assert [" ".join(line.split()[:2]) for line in head] == ["bash launch/vllm_server.sh", "rljax compare"]
