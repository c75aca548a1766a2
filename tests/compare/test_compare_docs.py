"""The examples of docs/compare.md run; ``tests/peers`` runs all exporters in the frameworks themselves."""

import re
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from pages import code_block, run_block
from toy_runs import ROOT

from rljax.commands import compare
from rljax.compare.importers import read_tokens
from rljax.compare.sampling import split_sampler
from rljax.compare.scorers import split_spec

torch = pytest.importorskip("torch")

PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")


def test_the_trl_exporter_writes_what_is_read(tmp_path):
    """The masks of the last row are what mask_truncated_completions leaves of a response."""
    logprobs = -torch.arange(1.0, 9.0).reshape(2, 4)[[0, 1, 0]]
    masks = {"prompt_mask": [[0, 1, 1], [1, 1, 1], [0, 1, 1]], "completion_mask": [[1, 1, 0, 0], [1] * 4, [0] * 4]}
    ids = {
        "prompt_ids": [[0, 5, 6], [7, 8, 9], [0, 5, 6]],
        "completion_ids": [[1, 2, 0, 0], [3, 4, 5, 6], [1, 2, 0, 0]],
    }
    tools = {"tool_mask": [[1, 1, 0, 0], [1, 0, 1, 1], [0] * 4]}
    out = {name: torch.tensor(rows) for name, rows in (ids | masks | tools).items()}
    out |= {"sampling_per_token_logps": logprobs / 8, "old_per_token_logps": logprobs / 4}

    class Base:
        accelerator, state = SimpleNamespace(process_index=1), SimpleNamespace(global_step=2)
        args = SimpleNamespace(output_dir=str(tmp_path), top_p=1.0, top_k=0, min_p=None)
        temperature = 0.7

        def _generate_and_score_completions(self, inputs):
            return out

    names = run_block("compare.md", "class TokenFile") | {"GRPOTrainer": Base}
    trainer = run_block("compare.md", "class ExportingTrainer(GRPOTrainer)", **names)["ExportingTrainer"]()
    assert trainer._generate_and_score_completions(None) is out
    trainer._generate_and_score_completions(None)
    (path,) = tmp_path.glob("tokens_*.jsonl")
    dump = read_tokens(path)
    assert dump.sequence_ids == ("2/1/1", "2/1/2", "2/1/3", "2/1/4")
    assert [ids.tolist() for ids in dump.token_ids[:2]] == [[5, 6, 1, 2], [7, 8, 9, 3, 4, 5, 6]]
    assert [np.flatnonzero(mask).tolist() for mask in dump.response_mask[:2]] == [[2, 3], [3, 5, 6]]
    for column, scale in {"rollout": 8, "trainer": 4}.items():
        assert (dump.role(column), dump.sources[column].temperature) == (column, 0.7)
        assert dump.logprobs[column][1][3:].tolist() == (logprobs[1] / scale).tolist()


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
        command = re.sub(r"\$\(cat [\w/.]+\.url\)", "http://127.0.0.1:1", command)
        options = compare.parse(shlex.split(command, comments=True))
        if options.serve:
            continue
        assert (options.tokens is None) != (options.toy_prompts is None)
        for spec in options.scorer:
            split_spec(spec)
        if options.sample is not None:
            split_sampler(options.sample)
    head = [line.split()[:2] for line in joined.split("```")[1].splitlines()[1:] if line]
    assert head == [["bash", "launch/vllm_server.sh"], ["rljax", "compare"]]
