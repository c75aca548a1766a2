"""The exporter of docs/compare.md and the schedule run in TRL's own trainers, as released and with the patch."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pages import run_block
from patched import patched_copy, program_output
from waiting import free_port

from rljax.commands import compare
from rljax.compare.importers import read_tokens
from rljax.errors import run_cli
from rljax.schedule import LengthTriggeredLR, SurgeTracker

trl = pytest.importorskip("trl")
torch = pytest.importorskip("torch")

from trl_updates import BATCHES, RATE, RULES, trained  # noqa: E402

TEMPERATURE = 0.7
ROOT = Path(__file__).parents[2]
BASE = ROOT / "configs" / "toy-base"


def exporter_of(directory, model, prompts, evaluated=None, **settings):
    """Returns the exporting trainer of the docs over TRL's own. Responses are as good as they are long."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = run_block("compare.md", "class TokenFile") | {"GRPOTrainer": trl.GRPOTrainer}
    exporter = run_block("compare.md", "class ExportingTrainer(GRPOTrainer)", **names)["ExportingTrainer"]
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "seed": 0}
    return exporter(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=trl.GRPOConfig(output_dir=str(directory), **quiet, **settings),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=evaluated and Dataset.from_dict({"prompt": evaluated}),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
    )


def exported(tmp_path, tiny_model, **settings):
    """Returns the dumps of a run of two updates."""
    prompts = [f"w{i} w{i + 1} w{i + 2}" for i in range(8)]
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 2}
    settings |= {"save_strategy": "no", "learning_rate": 1e-2, "max_completion_length": 6}
    trainer = exporter_of(tmp_path, tiny_model, prompts, **sizes, **settings)
    trainer.train()
    return [read_tokens(path) for path in sorted(tmp_path.glob("tokens_*.jsonl"))]


@pytest.fixture(scope="module")
def run_on_the_toy_base(tmp_path_factory):
    """Returns the directory of a run of the toy base on two batches, two updates each, with the weights after each."""
    path, prompts = tmp_path_factory.mktemp("toy"), [f"{i}+{i + 3}=" for i in range(10, 26)]
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "num_iterations": 2, "max_completion_length": 24}
    settings = {"max_steps": 4, "save_steps": 2, "learning_rate": 3e-3, "temperature": TEMPERATURE}
    trainer = exporter_of(path, BASE, prompts, prompts[:2], **sizes, **settings)
    trainer.train()
    assert trainer.state.global_step == 4
    trainer.evaluate()
    trainer.evaluate()
    return path


def compared(run, model, step, out):
    """Compares the sequences of one step with ``model``'s own scores; returns the exit status and the report."""
    (path,) = run.glob("tokens_*.jsonl")
    dump, (head, *rows) = read_tokens(path), path.read_text().splitlines()
    assert len(set(dump.sequence_ids)) == len(dump.sequence_ids) > 16
    assert (dump.sources["trainer"].role, dump.sources["trainer"].temperature) == ("trainer", TEMPERATURE)
    assert dump.sampling == {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0, "min_p": None}
    chosen = [row for row in rows if json.loads(row)["sequence_id"].startswith(f"{step}/")]
    assert len(chosen) == 8
    out.mkdir()
    (out / "tokens.jsonl").write_text("\n".join([head, *chosen]) + "\n")
    words = [str(out / "tokens.jsonl"), "--model", str(model), "--scorer", "jax:float32", "--scorer", "hf:float32"]
    status = run_cli(compare.main, [*words, "--out", str(out)])
    return status, json.loads((out / "report.json").read_text())


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_on_the_toy_base_is_scored_by_the_program(run_on_the_toy_base, tmp_path, step):
    """The weights that sampled a sequence score it: the base, or the weights after two updates. Others fail."""
    models = [BASE, run_on_the_toy_base / "checkpoint-2"]
    status, report = compared(run_on_the_toy_base, models[step // 2], step, tmp_path / "out")
    assert status == 0
    assert report["columns"]["trainer"]["role"] == "trainer"
    gaps = {(pair["trainer"], pair["rollout"]): pair["metrics"]["logprob_abs_diff_mean"] for pair in report["pairs"]}
    assert set(gaps) == {("trainer", "jax:float32"), ("trainer", "hf:float32"), ("jax:float32", "hf:float32")}
    assert max(gaps.values()) < 1e-5
    if step == 2:
        status, report = compared(run_on_the_toy_base, BASE, step, tmp_path / "other")
        assert status == 1
        assert "pass" not in {one["verdict"]["status"] for one in report["pairs"] if one["trainer"] == "trainer"}


def test_other_settings_export_other_tokens(tmp_path, tiny_model):
    """The default settings export no column. Truncated responses that TRL masks are left out."""
    (dump,) = exported(tmp_path / "default", tiny_model)
    assert not dump.logprobs
    assert all(mask.any() for mask in dump.response_mask)
    (dump,) = exported(tmp_path / "masked", tiny_model, num_iterations=2, mask_truncated_completions=True)
    assert dump.sequence_ids
    assert all(ids[-1] in (0, 1) for ids in dump.token_ids)


def rates_of_the_law(run, multiplier):
    """Returns the host controller's rate for each logged length, and the step of its call."""
    law = LengthTriggeredLR(RATE, tracker=SurgeTracker(RULES), multiplier=multiplier)
    rates = [law.step(*batch) for batch in zip(run["lengths"], run["truncated"], strict=True)]
    assert len(rates) == BATCHES
    assert rates[-1] < rates[0] == RATE
    return rates, law.surge_step


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_iterations": 2},
        {"gradient_accumulation_steps": 2},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4},
    ],
)
def test_the_callback_sets_the_rate_of_every_update(tmp_path, tiny_model, settings):
    """The lengths that the trainer logged must give the rates of its optimizer, one for each batch."""
    names = run_block("schedule.md", "# TRL\n", GRPOTrainer=dict, model=None, config=None, others={})
    callback = names["LengthTriggeredCallback"](tracker=SurgeTracker(RULES), multiplier=2.0)
    run = trained(tiny_model, tmp_path, callbacks=[callback], **settings)
    rates, surge_step = rates_of_the_law(run, 2.0)
    expected = [rate for rate in rates for _ in range(settings.get("num_iterations", 1))]
    for update in range(settings.get("warmup_steps", 0)):
        expected[update] = RATE * update / 4
    assert run["used"] == run["logged"] == pytest.approx(expected, rel=1e-15)
    assert callback.surge_step == surge_step


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("patched")
    patched_copy("trl", directory)
    return directory


def program_runs(patched, model, **variables):
    return program_output("trl_updates.py", patched, {"model": str(model), "out": str(patched / "out")}, **variables)


@pytest.fixture(scope="module")
def runs_of_the_patched_trl(patched, tiny_model):
    return program_runs(patched, tiny_model)


@pytest.mark.parametrize("case", ["one update", "two updates", "two micro-batches", "RLOO", "Distillation"])
def test_with_the_patch_a_scheduler_follows_the_lengths(runs_of_the_patched_trl, case):
    """With multiplier 1 the update of the call itself is decayed, so the length came before the update."""
    run = runs_of_the_patched_trl[case]
    rates, surge_step = rates_of_the_law(run, 1.0)
    assert rates[surge_step - 1] < RATE
    updates = len(run["used"]) // BATCHES
    assert updates == (2 if case == "two updates" else 1)
    assert run["used"] == run["logged"] == [rate for rate in rates for _ in range(updates)]


def test_with_the_patch_a_warm_up_comes_first_and_a_run_resumes(runs_of_the_patched_trl):
    """SequentialLR takes over a rate in its own step, so the log has each rate one update late."""
    run = runs_of_the_patched_trl["warm-up"]
    rates, _ = rates_of_the_law(run, 2.0)
    warm = [RATE * share for share in (0.25, 0.4375, 0.625, 0.8125)]
    assert run["used"] == pytest.approx(warm + rates[4:], rel=1e-15)
    assert run["logged"][5:] == run["used"][4:-1]
    run = runs_of_the_patched_trl["resumed"]
    rates, _ = rates_of_the_law(run, 1.0)
    assert run["lengths"][:5] == runs_of_the_patched_trl["one update"]["lengths"][:5]
    assert run["used"] == rates[5:]


def test_two_processes_take_the_same_rates(patched, tiny_model):
    """Each process has half of the responses. Both use the mean over all, with the callback and with the patch."""
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(program_runs, patched, tiny_model, RANK=r, LOCAL_RANK=r, **place) for r in ("0", "1")]
    first, second = (rank.result() for rank in ranks)
    assert first == second
    for case, multiplier in [("callback", 2.0), ("scheduler", 1.0)]:
        assert first[case]["used"] == rates_of_the_law(first[case], multiplier)[0]
