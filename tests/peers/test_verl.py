"""The exporters of docs/compare.md run on verl's classes, and the patch of docs/torch_peers.md in a copy of verl."""

import numpy as np
import pytest
from pages import run_block
from patched import check_rates_of_updates, patched_copy

from rljax.compare.importers import read_tokens
from rljax.mismatch import framework_metrics, mismatch_statistics
from rljax.mismatch import read_tokens as read_arrays

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

PROMPTS = [[5, 6], [7, 8, 9]]
RESPONSES = [[1, 2], [3, 4, 5, 6]]
MASKS = [[1, 1], [1, 0, 1, 1]]
TRAINER = [[-0.25, -0.5], [-1.25, -1.5, -1.75, -2.0]]
ROLLOUT = [[-0.125, -0.25], [-0.625, -0.75, -0.875, -1.0]]


def check(path, names):
    dump = read_tokens(path)
    assert dump.sequence_ids == names
    assert (dump.role("trainer"), dump.role("rollout")) == ("trainer", "rollout")
    assert dump.sources["trainer"].temperature == dump.sampling["temperature"] == 0.5
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        front = len(prompt)
        np.testing.assert_array_equal(dump.token_ids[i], prompt + response)
        np.testing.assert_array_equal(dump.response_mask[i], np.array([0] * front + MASKS[i], bool))
        np.testing.assert_array_equal(dump.logprobs["trainer"][i][front:], np.float32(TRAINER[i]))
        np.testing.assert_array_equal(dump.logprobs["rollout"][i][front:], np.float32(ROLLOUT[i]))


@pytest.fixture
def queue():
    import ray
    import transfer_queue

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    yield transfer_queue
    transfer_queue.close()
    ray.shutdown()


class Workers:
    """A group of workers like verl's, which puts the log-probabilities for the trainer into the queue."""

    def __init__(self, queue):
        self.queue = queue

    def compute_log_prob(self, batch):
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        fields = []
        for prompt, values in zip(PROMPTS, TRAINER, strict=True):
            # Values for every token of the sequence, shifted by one: the last entry is for the token after the end.
            whole = torch.tensor([0.0] * (len(prompt) - 1) + values + [0.0])
            fields.append({"log_probs": whole, "entropy": torch.zeros_like(whole)})
        data = list_of_dict_to_tensordict(fields)
        return self.queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)


def test_the_exporter_writes_what_its_queue_holds(tmp_path, queue):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    names = run_block("compare.md", "class TokenFile")
    names |= {"tq": queue, "PPOTrainerSync": PPOTrainerSync, "register_trainer": register_trainer}
    exporter = run_block("compare.md", "class ExportingTrainer(PPOTrainerSync)", **names)["ExportingTrainer"]
    fields = ("prompts", "responses", "response_mask", "rollout_log_probs", "input_ids")
    wholes = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    columns = zip(PROMPTS, RESPONSES, MASKS, ROLLOUT, wholes, strict=True)
    rows = [dict(zip(fields, map(torch.tensor, values), strict=True)) for values in columns]
    tags = [{"seq_len": len(row["input_ids"])} for row in rows]
    batch = queue.kv_batch_put(
        keys=["u_0_0", "v_0_0"], partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags
    )
    trainer = exporter.__new__(exporter)  # its __init__ starts a cluster
    actor = {"loss_agg_mode": "token-mean", "loss_scale_factor": None}
    config = {"algorithm": {"rollout_correction": None}, "trainer": {"default_local_dir": str(tmp_path)}}
    config["actor_rollout_ref"] = {"rollout": {"temperature": 0.5, "calculate_log_probs": True}, "actor": actor}
    trainer.config = OmegaConf.create(config)
    trainer.actor_rollout_wg, trainer.global_steps = Workers(queue), 3
    trainer._compute_old_log_prob(batch, {})
    (path,) = tmp_path.glob("tokens_*.jsonl")
    check(path, ("3/u_0_0/1", "3/v_0_0/2"))


def padded(rows, left, width):
    out = torch.zeros(len(rows), width, dtype=torch.tensor(rows[0]).dtype)
    for target, row in zip(out, rows, strict=True):
        place = slice(width - len(row), None) if left else slice(len(row))
        target[place] = torch.tensor(row)
    return out


def test_the_exporter_of_a_data_proto(tmp_path):
    from verl import DataProto

    names = run_block("compare.md", "class TokenFile")
    prompts, responses = padded(PROMPTS, True, 3), padded(RESPONSES, False, 4)
    tensors = {"prompts": prompts, "responses": responses, "response_mask": padded(MASKS, False, 4)}
    tensors["attention_mask"] = (torch.cat([prompts, responses], dim=1) > 0).long()  # no id is 0
    tensors |= {"old_log_probs": padded(TRAINER, False, 4), "rollout_log_probs": padded(ROLLOUT, False, 4)}
    export = run_block("compare.md", "def export(batch")["export"]
    export(DataProto.from_single_dict(tensors), 3, names["TokenFile"](tmp_path, 0.5))
    (path,) = tmp_path.glob("tokens_*.jsonl")
    check(path, ("3/1", "3/2"))


def test_verls_own_mismatch_functions_and_ours_agree():
    """All 17 numbers must agree: those of its trainer, by verl's names, and its debug metrics of a DataProto."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    draw = np.random.default_rng(3)
    rollout = -draw.exponential(0.7, (6, 40)).astype(np.float32)
    trainer = np.minimum(rollout + 0.05 * draw.standard_normal((6, 40)), -1e-6).astype(np.float32)
    mask = np.arange(40) < np.array([[40], [3], [17], [2], [25], [9]])
    mask[0, 4:7] = False  # a tool's tokens
    tensors = {
        "old_log_probs": torch.tensor(trainer),
        "rollout_log_probs": torch.tensor(rollout),
        "response_mask": torch.tensor(mask, dtype=torch.long),
        "responses": torch.zeros(6, 40, dtype=torch.long),
    }
    off_policy = compute_offpolicy_metrics(*list(tensors.values())[:3])
    theirs = {f"rollout_corr/{name}": value for name, value in off_policy.items()}
    theirs |= calculate_debug_metrics(DataProto.from_single_dict(tensors))
    assert theirs.pop("training/rollout_probs_diff_valid") == 1
    ours = framework_metrics(mismatch_statistics(read_arrays(trainer, rollout, mask)), "verl")
    assert set(ours) == set(theirs)
    assert len(ours) == 17
    for name, value in ours.items():
        assert float(value) == pytest.approx(float(theirs[name]), rel=1e-4, abs=1e-6), name


def test_the_patch_sets_the_rate_of_every_update(tmp_path):
    """verl's trainer sends the length, and its worker trains."""
    patched_copy("verl", tmp_path)
    options = ("lr_scheduler_type", "lr_scheduler_kwargs")
    platform = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_ENGINE_DEVICE": "cuda"}
    check_rates_of_updates("verl_updates.py", tmp_path, 1000.0, "actor_rollout_ref.actor.optim", options, **platform)
