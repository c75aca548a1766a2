"""A whole run of a tiny mixture of experts with router replay: its rows, its resume, and the settings it refuses."""

import json

import pytest
from external_rows import make_row, write_file
from toy_runs import TOY_BASE, comparable, complete, completed, resumed_rows, tiny

from rljax.policy.families import config_from_hf, config_to_hf
from rljax.policy.hf import save_params
from rljax.policy.model import init_params

pytestmark = pytest.mark.slow
REWARD = ("--data.reward", "parity_reward:reward")  # a fresh policy earns this reward
REPLAY = (*REWARD, "--rollout.router-replay", "r3", "--diagnosis.free-routing-every", "2")
REPLAY = (*REPLAY, "--loss.router-balance", "0.01")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns the folder of a fresh mixture with the toy's tokenizer."""
    path = tmp_path_factory.mktemp("mixture")
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    dense = json.loads((TOY_BASE / "config.json").read_text())
    config = config_from_hf(dense | {"model_type": "qwen3_moe"} | sizes)
    assert config_to_hf(config, "float32")["architectures"] == ["Qwen3MoeForCausalLM"]
    save_params(path, init_params(config, 0), config, side_files_from=TOY_BASE)
    return path


@pytest.mark.harness
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(base, tmp_path):
    whole = resumed_rows(base, tmp_path, *REPLAY)
    for row in whole:
        assert row["router/dropped_fraction"] == 0.0
        assert row["router/load_max"] >= 1.0 >= row["router/load_min"]
        assert 0.0 < row["router/entropy"] < 2.08  # log(8)
        assert 0.0 <= row["router/disagreement"] < 0.5
        assert row["optimizer/skipped_updates"] == 0
        assert row["policy/router_balance"] > 1.9  # 2 if the experts are used alike
    assert [("mismatch_free_routing/k3_kl" in row) for row in whole] == [False, True, False, True]


@pytest.mark.harness
def test_routes_of_another_program_are_replayed(base, tmp_path):
    """All tokens of the rows went to the experts 0 and 1, which the trainer's own router would not choose."""
    place = tmp_path / "rows"
    place.mkdir()
    routes = [[0, 1] * 2] * 4
    write_file(place / "0.jsonl", [make_row(f"g{i // 4}", i % 4, routes=routes) for i in range(8)])
    words = tiny(base, tmp_path / "run", 1, *REPLAY, "--rollout.trajectories", str(place))
    completed(words, is_sound=False)  # the rows have made-up log-probabilities
    (row,) = comparable(tmp_path / "run")
    assert row["router/disagreement"] > 0.5


def test_what_does_not_fit_is_one_line(base, tmp_path):
    for model, options, said in (
        (base, ("r2",), "r2 is for several updates a batch"),
        (base, ("r3", "--rollout.engine", "exact"), "rollout.router_replay works with rollout.engine = "),
        (TOY_BASE, ("r3",), "is for a mixture of experts"),
    ):
        status, output = complete(tiny(model, tmp_path / "run", 2, "--rollout.router-replay", *options))
        assert status == 2
        assert said in output
        assert not (tmp_path / "run").exists()
