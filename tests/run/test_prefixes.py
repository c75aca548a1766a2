"""A run that shares prefixes has the rows of a run that does not, and says where it cannot share."""

import numpy as np
import pytest
import yaml
from changed_configs import changed
from toy_runs import TOY_BASE, comparable, completed, tiny

from rljax.plan.budget import TPUS
from rljax.plan.dry_run import dry_run
from rljax.policy.config import PolicyConfig
from rljax.record.rows import read_rows
from rljax.run.config import Config
from rljax.run.packing import flat_rows, settle_prefixes, shares_prefixes, tree_rows, why_apart

POLICY = PolicyConfig(16, 8, 16, 1, 1, 1, 128)
TURNS = ("--rollout.environment", "counting_environments:Doubling", "--rollout.episode.max-turns", "3")
# A shared token counts once in these, and other shapes round sums otherwise.
FREE = ("time/", "perf/", "optimizer/grad_noise")
SHARING, APART = ("--packing.share-prefixes", "true"), ("--packing.share-prefixes", "false")


@pytest.mark.parametrize("options", [(), TURNS], ids=["one turn", "several turns"])
def test_its_rows_are_those_of_separate_rows(options, tmp_path):
    options = (*options, "--precision.compute-dtype", "float32", "--rollout.max-response-tokens", "20")
    rows = []
    for words in (SHARING, APART):
        run_dir = tmp_path / words[1]
        assert "packing.share_prefixes: off" not in completed(tiny(TOY_BASE, run_dir, 2, *options, *words))
        rows.append(comparable(run_dir))
    assert all(0 < row["perf/shared_token_fraction"] < 1 for row in read_rows(tmp_path / "true/metrics.jsonl"))
    for shared, apart in zip(*rows, strict=True):
        assert shared.keys() == apart.keys()
        for name, value in apart.items():
            if isinstance(value, float) and not name.startswith(FREE):
                np.testing.assert_allclose(shared[name], value, rtol=4e-4, atol=1e-7, err_msg=name)


def test_a_run_that_began_with_separate_rows_keeps_them(tmp_path):
    run_dir = tmp_path / "run"
    completed(tiny(TOY_BASE, run_dir, 2, *APART))
    recorded = yaml.safe_load((run_dir / "config.yaml").read_text())
    del recorded["packing"]["share_prefixes"]  # as an rljax wrote it that knew no trees
    (run_dir / "config.yaml").write_text(yaml.safe_dump(recorded))
    completed(tiny(TOY_BASE, run_dir, 4, *SHARING))
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["packing"]["share_prefixes"] is False
    assert not any("perf/shared_token_fraction" in row for row in read_rows(run_dir / "metrics.jsonl"))


def test_a_run_that_resumes_another_one_keeps_its_rows(tmp_path, caplog):
    """The check of the same run, which comes next, refuses a damaged record in one line."""
    config = changed(Config(), run={"dir": str(tmp_path / "new"), "resume": str(tmp_path)})
    for text in (
        "packing: {share_prefixes: true}",
        "packing: {row_tokens: 64}",
        "",
        "[1]",
        "packing: 3",
        "packing: [x]",
    ):
        caplog.clear()
        (tmp_path / "config.yaml").write_text(text)
        assert settle_prefixes(config, POLICY).packing.share_prefixes == ("true" in text)
        assert (f"{tmp_path}/config.yaml has it off" in caplog.text) == ("true" not in text)


def test_it_says_where_it_cannot_share(tmp_path, caplog):
    """It shares wherever else it can, and so does the plan for another machine."""
    config = changed(Config(), run={"dir": str(tmp_path)})
    splash = changed(config, policy={"attention": "splash"})  # for a machine that is not here
    assert (settle_prefixes(config, POLICY), settle_prefixes(splash, POLICY)) == (config, splash)
    assert why_apart(config) == ""
    sizes = {"data": {"max_prompt_tokens": 64}, "rollout": {"max_response_tokens": 64}}
    planned = dry_run(changed(config, model={"path": str(TOY_BASE)}, **sizes), TPUS["v5e"])
    assert "rows of 320 tokens\nprefixes" in planned
    assert "whose responses are in rows of 320 tokens for the head" in planned
    assert caplog.text == ""
    for sections, fault, reason in (
        ({"mesh": {"context": 2}}, "", "mesh.context = 2 devices share a row"),
        ({"loss": {"router_balance": 0.1}}, "", "loss.router_balance counts a token as often"),
        ({"rollout": {"router_replay": "r2"}}, "", "rollout.router_replay = r2 reads the routes of separate rows"),
        ({}, "cudnn's attention of trees fails", "cudnn's attention of trees fails"),
    ):
        assert not settle_prefixes(changed(config, **sections), POLICY, lambda said=fault: said).packing.share_prefixes
        assert reason in caplog.text


def test_lengths_of_the_rows_of_a_run():
    sizes = {"data": {"max_prompt_tokens": 2048}, "rollout": {"max_response_tokens": 256, "group_size": 8}}
    config = changed(Config(), **sizes)
    assert (tree_rows(config, 3072), flat_rows(config, 4096)) == (4096, 2752)
    # A row that was asked for stays, and one device's tokens bound a row.
    assert tree_rows(changed(config, packing={"row_tokens": 2560}), 2560) == 2560
    assert tree_rows(changed(config, packing={"tokens_per_device": 3584}), 3072) == 3584
    apart = changed(config, packing={"share_prefixes": False})
    assert (shares_prefixes(apart), flat_rows(apart, 3072)) == (False, 0)
