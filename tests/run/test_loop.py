"""``train`` and ``one_step`` with an engine whose responses are known: rows by hand, saves, stops and resumes."""

import collections
import contextlib
import functools
import itertools
import re
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest
from scripted_engine import RowList, ScriptedEngine
from scripted_runs import POLICY, TOKENIZER, Stop, compiled_step, half_right, opened_parts, settings, sum_of, trained
from toy_runs import TOY_BASE, without_clock
from waiting import until

import rljax.trainer.update
from rljax.errors import ConfigError, OwnedError, StoppedWaitingError
from rljax.policy.hf import load_params, save_params
from rljax.run.checkpoint import Checkpointer
from rljax.run.evaluation import EVAL_SEED
from rljax.run.fingerprint import check_fingerprints
from rljax.run.sampling import step_seed
from rljax.run.stop import StopRequest


@pytest.fixture(scope="module")
def update(tmp_path_factory):
    return compiled_step(tmp_path_factory.mktemp("update"))


Finished = collections.namedtuple("Finished", "directory rows engine progress saved before after")


def trained_prompts(engine):
    return [prompts for prompts in engine.asked if len(prompts) == 2]


def without_evaluation(rows):
    return [{key: value for key, value in row.items() if not key.startswith("eval/")} for row in rows]


def resumed(go, rows, whole, **changes):
    """Returns a run that goes on after the rows. All rows but changed evaluations, and the weights, are as in whole."""
    second = go(last_row=rows[-1] if rows else None, **changes)
    compared = without_evaluation if "eval" in changes else list
    assert compared(without_clock(rows + second.rows)) == compared(without_clock(whole.rows))
    jax.tree.map(np.testing.assert_array_equal, second.after, whole.after)
    return second


class NotFinite:
    """An update whose advantages, and so gradients, are not finite at some of its calls. Calls count from 1."""

    def __init__(self, update, calls):
        self.update, self.calls, self.called = update, calls, 0

    def pack(self, sequences):
        return self.update.pack(sequences)

    def __call__(self, state, batch, sequences, options):
        self.called += 1
        if self.called in self.calls:
            batch = batch._replace(advantages=np.full_like(batch.advantages, np.inf))
        return self.update(state, batch, sequences, options)


def run_in(
    update, directory, *, engine=None, stop_after=None, last_row=None, rows=None, grace_s=0.0, bad=(), **changes
):
    """Runs ``train`` from the state of a directory. The updates ``bad`` are not finite."""
    engine = engine or ScriptedEngine(TOKENIZER, half_right)
    rows = RowList() if rows is None else rows
    stop, update = Stop(grace_s, lambda: engine.is_gone or len(rows) == stop_after), NotFinite(update, bad)
    with opened_parts(settings(directory, **changes), engine, update=update, stop=stop, keep=2) as (parts, saves):
        progress, before, after = trained(parts, rows, last_row, stop)
        return Finished(directory, rows, engine, progress, saves.all_steps(), before, after)


@pytest.fixture
def go(update, tmp_path):
    return lambda name="run", **options: run_in(update, tmp_path / name, **options)


@pytest.fixture(scope="module")
def whole(update, tmp_path_factory):
    return run_in(update, tmp_path_factory.mktemp("whole") / "run")


def test_rows_by_hand(whole):
    run = whole
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert (run.engine.published, run.saved) == ([0, 1, 2, 3, 4], [3, 4])
    known = {"reward/mean": 0.5, "response_length/max": 8.0, "response_length/truncated_fraction": 0.0}
    known |= {"rollout/staleness": 0.0, "rollout/requests": 4}
    for row in run.rows:
        assert known.items() <= row.items()
        # Sums have three or four digits, and the end token. A right answer has 4 or 5 tokens, and a wrong one eight.
        assert 6.0 <= row["response_length/mean"] <= 6.5
        assert row["rollout/policy_version"] == row["step"] - 1
        assert row["optimizer/grad_norm"] > 0
        # The rate halves at step 3, the decay period.
        assert row["schedule/learning_rate"] == np.float32(5e-4 if row["step"] >= 3 else 1e-3)
        assert row["mismatch/rollout_log_ppl"] == pytest.approx(1.0)
        assert row["mismatch/token_count"] == 4 * row["response_length/mean"]
        assert ("eval/toy/accuracy" in row) == (row["step"] in (2, 4))
    assert run.rows[1]["eval/toy/accuracy"] == 1.0
    assert [len(prompts) for prompts in run.engine.asked] == [2, 2, 200, 2, 2, 200]
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (run.before, run.after)), strict=True))


def test_an_evaluation_added_at_a_resume_changes_no_number(go, whole):
    first = go(stop_after=2, eval={"every": 0})
    assert (first.saved, first.progress.step) == ([2], 2)
    second = resumed(go, first.rows, whole, eval={"every": 1, "n": 2, "temperature": 1.0})
    assert (second.engine.published, second.saved) == ([2, 3, 4], [3, 4])
    assert all("eval/toy/accuracy" in row for row in second.rows)


def profiled_steps(run):
    (file,) = run.directory.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    return [dict(event.stats)["step_num"] for event in events if event.name == "step"]


@pytest.mark.harness
def test_the_profile_is_of_the_steps_asked_for(go, whole):
    """The second run goes on from the middle of these steps, and ends before the last of them."""
    assert not (whole.directory / "profile").exists()
    first = go("first", stop_after=2, run={"profile_steps": (1, 1)})
    assert profiled_steps(first) == [1]
    shutil.copytree(first.directory / "checkpoints", first.directory.with_name("second") / "checkpoints")
    assert profiled_steps(go("second", last_row=first.rows[-1], run={"profile_steps": (2, 9)})) == [3, 4]


def test_a_guard_warns_and_stops_saved(go, capsys):
    run = go(guard={"warn": ("reward/mean < 0.6",), "stop": ("response_length/mean > 1 for 2",)})
    assert (len(run.rows), run.saved) == (2, [2])
    (line,) = run.progress.stopped_by
    assert "(response_length/mean > 1 for 2)" in line
    # A warning comes once, when the rule begins to hold.
    warnings = [line for line in capsys.readouterr().err.splitlines() if "guard:" in line]
    assert warnings == ["warning: guard: step 1: reward/mean = 0.5 (reward/mean < 0.6)"]


def fails(problem, response, truncated):
    raise LookupError("no such key")


def test_a_run_whose_every_reward_fails_stops_saved(go, capsys, caplog):
    failing = {"data": {"reward": f"{__name__}:fails", "reward_workers": 0}}
    first = go(**failing)
    assert [row["reward/error_fraction"] for row in first.rows] == [1.0, 1.0, 1.0]
    assert first.saved == [3]
    assert first.progress.stopped_by == ["step 3: reward/error_fraction = 1 (reward/error_fraction = 1 for 3)"]
    said = caplog.records[0].getMessage()
    assert re.fullmatch(r"a response could .* earns 0: LookupError: no such key \(.*test_loop\.py:\d+\)", said)
    assert "warning: evaluation of toy: none of the 200 responses could be scored" in capsys.readouterr().err
    second = go(last_row=first.rows[-1], run={"steps": 5})
    assert [row["reward/error_fraction"] for row in second.rows] == [0.0, 0.0]
    assert not second.progress.stopped_by


SKIPPING = {"run": {"steps": 8}, "guard": {"max_skipped_updates": 3}, "eval": {"every": 0}}


def test_updates_skipped_in_a_row_stop_the_run(go):
    """Updates are skipped from step 3 to 5. Step 4 is not saved, so step 2 stays beside the last one, with two kept."""
    run = go(bad=range(3, 99), checkpoint={"every": 2}, **SKIPPING)
    assert (len(run.rows), run.saved) == (5, [2, 5])
    assert run.progress.stopped_by == [
        "3 updates in a row, since step 3, were skipped because their gradients are not finite "
        "(guard.max_skipped_updates = 3); the last good checkpoint, from before them, is "
        f"{run.directory / 'checkpoints/2'}"
    ]


def test_skipped_updates_not_in_a_row_do_not_stop_it(go):
    """The save that is due at step 6 is made at step 7, when an update is applied again."""
    run = go(bad=(1, 3, 5, 6), **SKIPPING)
    assert (len(run.rows), run.progress.stopped_by, run.saved) == (8, [], [7, 8])
    assert run.rows[-1]["precision/overflows"] == run.rows[-1]["optimizer/skipped_updates"] == 4


def test_a_resume_goes_on_counting_skipped_updates(go):
    first = go(bad=range(1, 99), stop_after=2, **SKIPPING | {"guard": {"max_skipped_updates": 0}})
    assert (first.progress.stopped_by, first.saved) == ([], [2])
    second = go(bad=range(1, 99), last_row=first.rows[-1], **SKIPPING)
    assert (len(second.rows), second.saved) == (1, [2, 3])
    (line,) = second.progress.stopped_by
    assert line.startswith("3 updates in a row, since step 1, were skipped")
    assert line.endswith("the last good checkpoint, from before them, does not exist")


def test_an_unknown_metric_is_the_callers_mistake(go):
    for changes in ({"guard": {"stop": ("reward/meen > 2",)}}, {"schedule": {"metric": "reward/meen"}}):
        with pytest.raises(ConfigError, match=r"no row has a metric 'reward/meen'; did you mean reward/mean\?"):
            go(next(iter(changes)), **changes)


def test_without_signal_the_update_is_skipped(go):
    run = go(engine=ScriptedEngine(TOKENIZER, lambda prompt, sample, seed: f"{sum_of(prompt)}$"))
    assert [row["optimizer/skipped_updates"] for row in run.rows] == [1, 2, 3, 4]
    assert [row["reward/groups_with_signal"] for row in run.rows] == [0.0] * 4
    assert [row["optimizer/grad_norm_ema"] for row in run.rows] == [None] * 4
    assert run.rows[2]["schedule/learning_rate"] == np.float32(5e-4)
    assert run.engine.published == [0, 1, 2, 3, 4]
    jax.tree.map(np.testing.assert_array_equal, run.before, run.after)


@pytest.mark.parametrize(("version", "steps"), [(2, 2), (0, 0)])
def test_servers_gone_at_a_publish_leave_the_step_whole(go, version, steps):
    run = go(engine=ScriptedEngine(TOKENIZER, half_right, gone_at_version=version))
    assert (len(run.rows), run.saved, run.progress.step) == (steps, [2][:steps], steps)
    if steps:
        assert not any(key.startswith("eval/") for key in run.rows[1])
        assert run.rows[1]["optimizer/grad_norm"] > 0
    else:
        assert run.engine.asked == []


def asked_to_stop(*, step, evaluation=False, saved=None):
    """Returns an engine that raises SIGTERM at the first response of a step or of its evaluation, once ``saved``."""
    asked = []

    def script(prompt, sample, seed):
        if seed not in asked and seed == (EVAL_SEED if evaluation else step_seed(0, step)):
            until(lambda: saved is None or saved.exists(), 60)
            signal.raise_signal(signal.SIGTERM)
        asked.append(seed)
        return half_right(prompt, sample, seed)

    return ScriptedEngine(TOKENIZER, script)


@pytest.mark.parametrize("every", [1, pytest.param(0, marks=pytest.mark.harness)])
def test_a_stop_with_time_to_spare_finishes_the_step(go, capsys, tmp_path, every):
    """The time of the first save is expected from the size of the state: 1 s and a moment here."""
    engine = asked_to_stop(step=3, saved=tmp_path / "run" / "checkpoints" / "1" if every else None)
    run = go(engine=engine, grace_s=600.0, eval={"every": 0}, checkpoint={"every": every})
    assert (len(run.rows), run.saved) == (3, [2, 3] if every else [3])
    assert "\nstopping after this step (once more to stop at once)\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("last_step_s", "size", "gives_up"),
    [
        (0.0, 2e9, False),  # the save takes 1 s and 2 GB at 0.3 GB/s, 7.7 s
        (0.0, 3e9, True),  # 11 s
        (5.0, 0, False),
        (11.5, 0, True),  # the step and the save take 12.5 s
        (None, 0, True),  # the first step
    ],
)
def test_what_a_step_and_the_first_save_are_expected_to_take(tmp_path, monkeypatch, last_step_s, size, gives_up):
    """The grace is 10 s, of which a slow machine may use 2 s before the question."""
    stop = StopRequest(10.0)
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints")) as checkpointer:
        stop.begin_step(last_step_s, checkpointer, int(size))
        stop.request(signal.SIGTERM)
        assert stop.gives_up() == gives_up
        if last_step_s == 5.0:  # a step that takes longer than the last one is given up in time
            later = time.monotonic() + 9.5
            monkeypatch.setattr(time, "monotonic", lambda: later)
            assert stop.gives_up()


def test_a_step_is_expected_to_take_no_evaluation(go, monkeypatch):
    expected = []
    monkeypatch.setattr(StopRequest, "begin_step", lambda stop, seconds, *more: expected.append(seconds))
    rows = go(eval={"every": 2, "at_start": True}).rows
    evaluated = [rows[0]["time/eval_at_start_s"], rows[1]["time/eval_s"], 0.0, rows[3]["time/eval_s"]]
    assert expected == [None, *(row["time/step_s"] - seconds for row, seconds in zip(rows, evaluated, strict=True))]


@pytest.mark.parametrize("every", [0, pytest.param(1, marks=pytest.mark.harness)])
def test_a_stop_without_time_gives_the_step_up(go, whole, capsys, every):
    changes = {"eval": {"every": 0}, "checkpoint": {"every": every}}
    engine = asked_to_stop(step=3)
    first = go(engine=engine, **changes)
    assert (len(first.rows), first.saved[-1], first.progress.step) == (2, 2, 2)
    said = capsys.readouterr().err
    assert "\nstopping without what is still sampled, which is not expected within run.grace_s = " in said
    assert said.endswith("step 3 is given up: asked to stop while responses were sampled\n")
    assert engine.metrics["rollout/requests"] == 1
    second = resumed(go, first.rows, whole, **changes)
    assert second.engine.asked == trained_prompts(whole.engine)[2:]


def test_a_step_given_up_saves_nothing_in_a_lost_directory(update, tmp_path):
    engine, stop = asked_to_stop(step=2), StopRequest(0.0)

    def check_owner():
        if len(engine.asked) == 2:
            raise OwnedError("taken over")

    with opened_parts(settings(tmp_path / "run"), engine, update=update, stop=stop) as (parts, saves):
        parts.check_owner = check_owner
        with pytest.raises(OwnedError):
            trained(parts, RowList(), stop=stop)
        assert saves.is_abandoned


def test_an_evaluation_is_given_up_and_its_step_kept(go, capsys):
    engine = asked_to_stop(step=2, evaluation=True)
    run = go(engine=engine, checkpoint={"every": 1})
    assert (len(run.rows), run.saved) == (2, [1, 2])
    assert not any(key.startswith("eval/") for key in run.rows[1])
    assert "the evaluation of step 2 is given up: asked to stop while responses" in capsys.readouterr().err


def test_the_best_evaluated_step_is_kept_beside_the_newest(go):
    """The policy is right in its first evaluation after a step only. A pass@k changes no accuracy."""
    evaluations = []

    def script(prompt, sample, seed):
        if seed == EVAL_SEED:
            evaluations.append(prompt)
            return f"{sum_of(prompt)}$" if 200 < len(evaluations) <= 400 else "1$"
        return half_right(prompt, sample, seed)

    run = go(engine=ScriptedEngine(TOKENIZER, script), eval={"at_start": True}, checkpoint={"keep_best": True})
    assert run.rows[0]["eval/toy/accuracy_at_start"] == 0.0
    assert [run.rows[i]["eval/toy/accuracy"] for i in (1, 3)] == [1.0, 0.0]
    more = {"run": {"steps": 6}, "eval": {"pass_k": (1,)}, "checkpoint": {"keep_best": True}}
    again = go(engine=ScriptedEngine(TOKENIZER, script), last_row=run.rows[-1], **more)
    assert again.rows[1]["eval/toy/accuracy"] == 0.0
    with contextlib.closing(Checkpointer(run.directory / "best", read_only=True)) as best:
        assert best.all_steps() == [2]


class Hooked(ScriptedEngine):
    """An engine that calls ``act`` with the name and number of what it does next, and counts its users at once."""

    def __init__(self, act, script=half_right):
        super().__init__(TOKENIZER, script)
        self.act, self.users, self.most = act, 0, 0

    def respond(self, *arguments):
        self.users += 1
        self.most = max(self.most, self.users)
        try:
            for count, response in enumerate(super().respond(*arguments)):
                self.act("respond", (len(self.asked), count))
                yield response
        finally:
            self.users -= 1

    def prepare(self, params, policy_version):
        self.act("prepare", policy_version)

    def publish(self, params, policy_version):
        self.act("publish", policy_version)
        return super().publish(params, policy_version)


def test_servers_gone_in_a_rollout_give_the_step_up(go, whole):
    def act(*place):
        if place == ("respond", (3, 0)):
            engine.is_gone = True
            raise StoppedWaitingError("no server answers, and the run is to stop")

    engine = Hooked(act)
    first = go(engine=engine, eval={"every": 0})
    assert (len(first.rows), first.saved, first.progress.step) == (2, [2], 2)
    second = resumed(go, first.rows, whole, eval={"every": 0})
    assert second.engine.asked == trained_prompts(whole.engine)[2:]


BROKEN = RuntimeError("it failed 6 times")


# The calls of ``generate`` are steps 1 and 2, the evaluation of step 2, steps 3 and 4, and the evaluation of step 4.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "where", "saved"),
    [
        (KeyboardInterrupt(), ("respond", (2, 3)), 1),
        (BROKEN, ("publish", 2), 2),
        pytest.param(BROKEN, ("respond", (2, 0)), 1, marks=pytest.mark.harness),
        pytest.param(BROKEN, ("respond", (3, 7)), 2, marks=pytest.mark.harness),
    ],
)
def test_a_failure_saves_the_newest_step(error, where, saved, go, whole, capsys):
    """A failed rollout loses its step, a failed publish or evaluation of step 2 only the evaluation in its row."""
    rows = RowList()

    def act(*place):
        if place == where:
            raise error

    with pytest.raises(type(error)) as raised:
        go(engine=Hooked(act), rows=rows)
    assert raised.value is error
    lacks = ", its row without the evaluation that was due" if saved == 2 else ""
    assert capsys.readouterr().err.endswith(f"\nstep {saved} is saved{lacks}; the same command goes on from there\n")
    assert len(rows) == saved
    if saved == 2:
        first, second, *rest = whole.rows
        whole = whole._replace(rows=[first, *without_evaluation([second]), *rest])
    assert resumed(go, rows, whole).engine.published == list(range(saved, 5))


def test_a_dump_that_fails_loses_no_row(go, whole, tmp_path):
    rows = RowList()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rollouts").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="rollouts"):
        go(rows=rows, rollout={"dump_every": 3})
    assert resumed(go, rows, whole).engine.published == [3, 4]


@pytest.mark.parametrize("failures", [2, pytest.param(1, marks=pytest.mark.harness)])
def test_a_row_that_fails_is_tried_again(go, whole, capsys, failures):
    """The end of the run records and saves row 2, or else the last checkpoint stays."""
    rows, errors = RowList(), [OSError(28, "No space left on device")] * failures

    def write(row, histograms):
        if row["step"] == 2 and errors:
            raise errors.pop()
        rows.append(row)

    rows.write = write
    with pytest.raises(OSError, match="No space left"):
        go(rows=rows, checkpoint={"every": 1})
    said = "step 2 could not be saved: [Errno 28] No space left on device; what remains is the checkpoint of step 1"
    assert capsys.readouterr().err.endswith(f"\n{said}\n") == (failures == 2)
    resumed(go, rows, whole)


def test_an_update_that_fails_says_what_remains(go, whole, monkeypatch, capsys):
    """The compiled step has already taken its state when its numbers are fetched."""
    rows, calls, real = RowList(), itertools.count(1), rljax.trainer.update.fetch_metrics

    def fetch(metrics, *, noise):
        if next(calls) == 3:
            raise RuntimeError("the device is lost")
        return real(metrics, noise=noise)

    monkeypatch.setattr(rljax.trainer.update, "fetch_metrics", fetch)
    with pytest.raises(RuntimeError, match="the device is lost"):
        go(rows=rows, checkpoint={"every": 1})
    monkeypatch.undo()
    said = "the update that failed had already taken the state of step 2; what remains is the checkpoint of step 2"
    assert capsys.readouterr().err.endswith(f"\n{said}\n")
    resumed(go, rows, whole)


def test_rows_are_synced_before_each_save(update, tmp_path):
    """At each save the rows on the disk reach up to its step."""
    rows, synced = RowList(), []
    rows.sync = lambda: synced.append(len(rows))

    class Watched(Checkpointer):
        def save(self, step, state, host):
            assert synced[-1] == step
            super().save(step, state, host)

    parts_of = functools.partial(opened_parts, update=update, checkpointer=Watched)
    with parts_of(settings(tmp_path / "run"), ScriptedEngine(TOKENIZER, half_right)) as (parts, _):
        trained(parts, rows)
    assert synced == [3, 4]


def test_the_reference_is_fingerprinted_by_its_weights(tmp_path):
    """The KL penalty's reference has another fingerprint if one weight changes. Older checkpoints have none."""
    found = []
    for change in (0.0, 0.0, 1e-3):
        path = shutil.copytree(TOY_BASE, tmp_path / f"base{len(found)}")
        params = load_params(path, POLICY)
        params["embed"] = params["embed"].at[3, 5].add(change)
        save_params(path, params, POLICY)
        config = settings(tmp_path / "run", model={"path": str(path)}, loss={"kl": "k3", "kl_coefficient": 0.1})
        with opened_parts(config, ScriptedEngine(TOKENIZER, half_right)) as (parts, _):
            found.append(parts.fingerprints)
    assert found[0] == found[1]
    assert found[0]["problems"] == found[2]["problems"]
    for before in ({}, {"problems": found[0]["problems"]}):
        check_fingerprints(before, found[2], {})
    with pytest.raises(ValueError, match=r"^m: the reference policy .* as model.path, or give another run.dir$"):
        check_fingerprints(found[0], found[2], {"reference": "m"})


def without_versions(row):
    of_versions = ("rollout/policy_version", "rollout/staleness", "mismatch_staleness/", "mismatch/jump")
    (row,) = without_clock([row])
    return {name: value for name, value in row.items() if not name.startswith(of_versions)}


@pytest.mark.parametrize("k", [1, pytest.param(9, marks=pytest.mark.harness)])
def test_rollouts_sampled_ahead_are_those_of_the_same_prompts(go, whole, k):
    ahead = go("ahead", rollout={"max_staleness": k})
    for row, other in zip(ahead.rows, whole.rows, strict=True):
        step = row["step"]
        # The first batch is sampled with the policy that it is trained from. With k = 1 the others are one version old.
        oldest = min(step - 1, k)
        assert row["rollout/staleness"] == (oldest if k == 1 else pytest.approx(row["rollout/staleness"]))
        assert 0 <= row["rollout/staleness"] <= oldest
        assert row["rollout/policy_version"] == step - 1 - row["rollout/staleness"]
        assert row["rollout/requests"] == 4
        # The script does not depend on the policy. So all numbers but times and versions are the same.
        assert without_versions(row) == without_versions(other)
    assert trained_prompts(ahead.engine) == trained_prompts(whole.engine)
    assert ahead.engine.published == [0, 1, 2, 3, 4]
    assert {"time/ahead_s", "time/wait_s", "time/drain_s", "time/rollout_s"} <= ahead.rows[0].keys()
    assert not {"time/wait_s", "time/drain_s"} & whole.rows[0].keys()


def test_an_engine_that_breaks_ahead_ends_its_own_step(go):
    def breaks_at_the_third(prompt, sample, seed):
        return half_right(prompt, sample, seed) if seed != step_seed(0, 3) else 1 / 0

    rows = RowList()
    with pytest.raises(ZeroDivisionError):
        go(rows=rows, engine=ScriptedEngine(TOKENIZER, breaks_at_the_third), rollout={"max_staleness": 2})
    assert [row["step"] for row in rows] == [1, 2]


def test_a_run_ahead_ends_at_its_own_step_and_loses_no_prompt(go, whole):
    """The batches that were sampled for later steps are asked for again when the run goes on."""
    ahead = {"max_staleness": 1}
    first = go(rollout=ahead, guard={"stop": ("rollout/policy_version > 0",)})
    assert (len(first.rows), len(first.progress.stopped_by), first.saved[-1]) == (3, 1, 3)
    second = go(last_row=first.rows[-1], rollout=ahead)
    assert second.engine.published == [3, 4]
    assert [row["rollout/staleness"] for row in first.rows + second.rows] == [0, 1, 1, 0]
    asked = trained_prompts(first.engine)[:3] + trained_prompts(second.engine)
    assert asked == trained_prompts(whole.engine)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["keep", pytest.param("wait", marks=pytest.mark.harness)])
def test_an_evaluation_ahead_is_of_its_own_version(go, how):
    """The policy is right from version 2 on. No batch is sampled beside an evaluation."""

    def script(prompt, sample, seed):
        return f"{sum_of(prompt) if engine.published[-1] > 1 else 7}$"

    engine = Hooked(lambda *place: time.sleep(0.002), script)
    run = go(engine=engine, rollout={"max_staleness": 2, "update": how}, eval={"every": 1})
    assert [row["eval/toy/accuracy"] for row in run.rows] == [0.0, 1.0, 1.0, 1.0]
    assert engine.most == 1


@pytest.mark.parametrize(("how", "where"), [("wait", "prepare"), ("keep", "publish")])
def test_a_publish_that_fails_ahead_leaves_its_step_saved(go, how, where):
    """The third batch is being sampled when version 2 cannot be brought to the servers."""
    changes = {"rollout": {"max_staleness": 1, "update": how}, "eval": {"every": 0}}
    whole, rows, has_failed = go("whole", **changes), RowList(), threading.Event()

    def act(*place):
        if place[0] == "respond" and place[1][0] == 3:
            has_failed.wait(30)
        if place == (where, 2):
            until(lambda: broken.users == 1, 30, every_s=0.001)
            has_failed.set()
            raise RuntimeError("planted")

    broken = Hooked(act)
    with pytest.raises(RuntimeError, match="planted"):
        go(rows=rows, engine=broken, **changes)
    assert [row["step"] for row in rows] == [1, 2]
    assert broken.published == [0, 1]
    second = go(last_row=rows[-1], **changes)
    assert second.engine.published == [2, 3, 4]
    assert [row["step"] for row in second.rows] == [3, 4]
    assert trained_prompts(broken)[:2] + trained_prompts(second.engine) == trained_prompts(whole.engine)
