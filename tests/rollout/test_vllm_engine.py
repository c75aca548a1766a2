"""Tests of the order of the engine's actions, against stand-in servers whose log-probability is always -1."""

import asyncio
import itertools
import re
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from glossary import glossary
from served_engines import PARAMS, PROMPTS, make, published
from small_disk import fill, small_disk
from stopping import StopWhen
from vllm_fake import SHAPE
from waiting import until

from rljax.errors import HandshakeError, NotWrittenError, StoppedWaitingError, VerificationError
from rljax.policy.rotary import described_rope, read_rope
from rljax.rollout.servers.vllm.client import GENERATE
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import ClientLimits, SamplingParams, ServerForm
from rljax.weights.format import PROTOCOL

SERVED_METRICS = re.compile(r"publish/.*|rollout/(requests|retries|servers|server_losses|servers_brought_back)")
OF_A_PULL = {f"publish/{name}" for name in ("pull_s", "fetch_s", "check_s", "pulled_bytes", "mirrors_repaired")}
OF_ROUNDING = {"publish/verify_own_abs_diff_mean", "publish/verify_own_band"}  # test_vllm_forms.py has these
UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


def order_of(fake):
    """Returns the events of a server, with successive equal ones as one."""
    return [event for event, _ in itertools.groupby(fake.events)]


def test_publish_keeps_its_order(fake):
    """Probes are cached before the pause, and verified last. Seeds differ by place and repeat by call."""
    with closing(make(fake.url)) as engine:
        with pytest.raises(RuntimeError, match="publish first"):
            engine.generate(PROMPTS, 1, SamplingParams(1), seed=0)
        fake.events.clear()
        engine.publish(PARAMS, 4)
        assert order_of(fake) == ["sample", "/pause", *UPDATE, "/reset_prefix_cache", "/resume", "sample"]
        assert fake.version == engine.files.tag(4)
        fake.sampling.clear()
        for seed in (5, 5, 6):
            responses = list(engine.generate(PROMPTS, 3, SamplingParams(5), seed=seed))
            places = [(r.prompt_index, r.sample_index) for r in responses]
            assert sorted(places) == [*itertools.product(range(2), range(3))]
            assert all(r["version"].tolist() == [4] * 5 for r in responses)
        engine.close()  # it may be closed twice
    seeds = [sampling["seed"] for sampling in fake.sampling]
    assert sorted(seeds[:6]) == sorted(seeds[6:12])
    assert len(set(seeds)) == 12


@pytest.mark.slow
def test_a_server_that_is_gone_is_waited_for(fake, another, caplog):
    """One that stays away ends the run."""
    started = []
    with published(fake.url, server_wait_s=2.0) as engine:
        fake.stop()
        timer = threading.Timer(0.7, lambda: started.append(another(fake.port)))
        timer.start()
        engine.publish(PARAMS, 1)
        timer.join()
        assert started[0].version == engine.files.tag(1)
        assert "waiting for a vLLM server, 0 s of at most 2 s" in caplog.text
        started[0].stop()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="no vLLM server came back within 2 s"):
            list(engine.generate(PROMPTS, 1, SamplingParams(1), seed=0))
        assert time.monotonic() - began < 8


def roll_out(engine):
    list(engine.generate(PROMPTS, 2, SamplingParams(4), seed=0))


def publish_next(engine):
    engine.publish(PARAMS, 1)


@pytest.mark.parametrize("are_gone", [True, False])
@pytest.mark.parametrize(
    ("act", "meanwhile"), [(roll_out, "responses were sampled"), (publish_next, "servers were awaited")]
)
def test_a_request_to_stop_ends_a_wait(fake, act, meanwhile, are_gone):
    """The servers are gone, or they hang. Until the request the wait for servers counts as progress."""
    asked = threading.Event()
    stop = StopWhen(**{"is_requested" if are_gone else "gives_up": asked.is_set})
    said = "asked to stop, and no vLLM server answers" if are_gone else f"asked to stop while {meanwhile}"
    with published(fake.url, server_wait_s=60.0, stop=stop, limits=ClientLimits(max_outstanding=1)) as engine:
        probes = fake.seen.total()
        if are_gone:
            fake.stop()
        fake.delay_s = 20.0
        threading.Timer(0.7, asked.set).start()
        began = time.monotonic()
        with pytest.raises(StoppedWaitingError, match=said):
            act(engine)
        assert 0.6 < time.monotonic() - began < 8
        engine.close()  # the requests that waited for a place were also cancelled
        assert fake.seen[GENERATE] <= probes + 2
    assert stop.moves > 0 or not are_gone


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("the dtype is bfloat16, expected float32", {"dtype": "bfloat16"}),
        ("blocks of 16", {"described": {"block_size": 64}}),
    ],
)
def test_a_server_that_came_back_as_another_is_refused(fake, another, change, said):
    with published(fake.url, server_wait_s=3.0) as engine:
        fake.stop()
        vars(another(fake.port)).update(change)
        with pytest.raises(RuntimeError, match=f"does not fit any more: .* {said}"):
            list(engine.generate(PROMPTS, 1, SamplingParams(1), seed=0))


def test_probes_fill_the_largest_cache_blocks_of_all_servers(fake, another):
    other = another()
    other.described = {"block_size": 64}
    with published(fake.url, other.url):
        assert max(len(prompt) for prompt, _, _ in fake.asked) == 64 + 16
    other.described = {"block_size": 128, "max_model_len": 600}
    with pytest.raises(HandshakeError, match="128, and another server's cache blocks of 128 tokens need probes of 156"):
        make(fake.url, other.url)


def test_a_broken_connection_alone_needs_no_update(fake, elsewhere):
    """A server that kept its weights is verified and opened again, but not updated. Its other responses go on."""
    with published(fake.url) as engine:
        server, samples = engine.fleet.server(fake.url), engine.generate(PROMPTS, 1, SamplingParams(40), seed=0)
        fake.token_s = 0.05

        def break_two():
            until(lambda: fake.running == 2)
            engine.fleet.on_loop(server.close, "a reset connection")
            until(lambda: server.state == "proving")
            engine.fleet.on_loop(server.close, "another reset connection")

        breaking = elsewhere.submit(break_two)
        assert len(list(samples)) == 2
        breaking.result()
        assert (samples.metrics["rollout/retries"], fake.seen["/update_weights"]) == (0, 1)
        assert engine.fleet.report()["rollout/server_losses"] == 1


@pytest.mark.parametrize("path", ["/reset_prefix_cache", pytest.param("/resume", marks=pytest.mark.harness)])
def test_an_update_whose_connection_breaks_late_is_repeated(fake, path):
    """The server says the new version already, but is paused, and would answer no probe."""
    answer, lost = fake.answer, [path]

    def lose_one(method, where, body):
        if where in lost:
            lost.remove(where)
            raise ConnectionResetError
        return answer(method, where, body)

    with published(fake.url) as engine:
        fake.answer = lose_one
        engine.publish(PARAMS, 1)
        assert fake.seen["/update_weights"] == 3
        assert engine.fleet.opened() == [fake.url]


def test_a_server_restarted_between_two_publishes_is_updated(fake, another):
    """It knows nothing of the run's weight directory before its handshake."""
    with published(fake.url) as engine:
        fake.stop()
        again = another(fake.port)
        answer = again.answer

        def forgetful(method, path, body):
            if path == "/update_weights" and not again.seen["/init_weight_transfer_engine"]:
                return 500, {"error": {"message": "the path lies in no directory that a trainer has shown"}}
            return answer(method, path, body)

        again.answer = forgetful
        engine.publish(PARAMS, 1)
        assert engine.fleet.opened() == [again.url]


@pytest.mark.parametrize("colocated", [True, pytest.param(False, marks=pytest.mark.harness)])
def test_a_publish_goes_on_without_a_server_that_is_gone(fake, another, colocated):
    """It is recovered at the next one. A killed run may have left it asleep."""
    other = another()
    with published(fake.url, other.url, server_wait_s=60.0, colocated=colocated) as engine:
        list(engine.generate(PROMPTS, 2, SamplingParams(2), seed=0))
        assert fake.asleep == other.asleep == colocated
        other.stop()
        began = time.monotonic()
        lost = engine.publish(PARAMS, 1)["rollout/server_losses"]
        assert time.monotonic() - began < 30
        assert engine.fleet.opened() == [fake.url]
        again = another(other.port)
        again.asleep = again.paused = colocated
        metrics = engine.publish(PARAMS, 2)
        assert fake.version == again.version == engine.files.tag(2)
        assert sorted(engine.fleet.opened()) == sorted([fake.url, again.url])
        assert not again.asleep
    assert lost == metrics["rollout/servers_brought_back"] == 1


def test_replies_of_another_version_of_this_run_are_refused(fake):
    """Version 10 must not be taken for version 1 or version 11."""
    with closing(make(fake.url)) as engine:
        engine.publish(PARAMS, 10)
        answer, wrong = fake.answer, [engine.files.tag(1), engine.files.tag(11)]

        def stale(method, path, body):
            status, reply = answer(method, path, body)
            if path.endswith("/generate") and body["sampling_params"]["max_tokens"] == 5 and wrong:
                reply["choices"][0]["weight_versions"][0]["version"] = wrong.pop()
            return status, reply

        fake.answer = stale
        responses = list(engine.generate(PROMPTS, 3, SamplingParams(5), seed=0))
        assert len(responses) == 6
        assert not wrong
        assert all(r["version"].tolist() == [10] * 5 for r in responses)
        assert engine.fleet.report()["rollout/server_losses"] >= 1


@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_the_row_says_what_share_of_prompts_was_cached(another, route):
    """Each of two servers computes one prompt, and takes its four blocks from the cache for three more responses."""
    fakes, prompts = [another(), another()], [np.arange(first, first + 9, dtype=np.int32) for first in (1, 20)]
    with closing(make(*(fake.url for fake in fakes))) as engine:
        engine.publish(PARAMS, 0)
        silent = engine.generate(prompts, 4, SamplingParams(2), seed=0)
        assert len(list(silent)) == 8
        assert "rollout/cached_prompt_fraction" not in silent.metrics
        for fake in fakes:
            engine.fleet.server(fake.url).route = route
            fake.block = 2
        samples = engine.generate(prompts, 4, SamplingParams(2), seed=0)
        assert len(list(samples)) == 8
        assert samples.metrics["rollout/cached_prompt_fraction"] == 3 * 8 / (4 * 9)


def test_colocated_servers_sleep_and_are_proven_when_they_wake(fake):
    """It wakes before the weights come. After an evaluation the same version is loaded and proven again."""
    with published(fake.url, colocated=True) as engine:
        assert not fake.asleep
        for loaded in (1, 2, 3):
            fake.events.clear()
            responses = list(engine.generate(PROMPTS, 2, SamplingParams(2), seed=0))
            assert [r["version"].tolist() for r in responses] == [[0, 0]] * 4
            assert fake.seen["/update_weights"] == loaded
            assert fake.asleep
            assert fake.events[-5:] == ["sample"] * 4 + ["/sleep"]
        fake.events.clear()
        metrics = engine.publish(PARAMS, 1)
        assert order_of(fake) == ["/wake_up", "/pause", *UPDATE, "/reset_prefix_cache", "/resume", "sample"]
        assert {"time/sleep_s", "time/wake_s"} <= metrics.keys()
        assert (metrics["rollout/server_losses"], metrics["rollout/servers"]) == (0, 1)
        roll_out(engine)
        fake.not_loaded = {"b"}
        for act in (roll_out, publish_next):
            with pytest.raises(VerificationError, match=r"1 tensor differs: b \(not loaded"):
                act(engine)


def test_what_differs_stops_the_run_and_is_named(fake):
    """The bits are checked although every log-probability is right. Log-probabilities out of band stop it, too."""
    sent, shift = {}, [0.0]

    def tensors(params):
        return [(name, sent.get(name, array)) for name, array in params.items()]

    with closing(make(fake.url, tensors=tensors, score_shift=lambda: shift[0])) as engine:
        metrics = engine.publish(PARAMS, 0)
        assert (metrics["publish/verified_tensors"], metrics["time/server_checksums_s"]) == (2, 0.25)
        fake.not_loaded = {"b"}
        with pytest.raises(VerificationError, match=r"the trainer's weights: 1 tensor differs: b \(not loaded"):
            engine.publish(PARAMS, 1)
        with pytest.raises(RuntimeError, match="publish first"):
            engine.generate(PROMPTS, 1, SamplingParams(1), seed=0)
        assert engine.fleet.opened() == []
        fake.not_loaded = set()
        sent["a"] = np.nextafter(PARAMS["a"], np.float32(9))
        with pytest.raises(VerificationError, match=r"1 tensor differs: a \(other bits\)"):
            engine.publish(PARAMS, 2)
        sent.clear()
        engine.publish(PARAMS, 3)
        shift[0] = 0.01
        with pytest.raises(VerificationError, match=r"is 0\.01, then 0\.01 nats .* the band for float32 is 1e-05"):
            engine.publish(PARAMS, 4)
        with pytest.raises(RuntimeError, match="publish first"):
            engine.generate(PROMPTS, 1, SamplingParams(1), seed=0)


def test_an_unproven_server_is_left_out_until_the_next_version(fake, caplog, another):
    """It samples nothing before, as its cache may hold NaN. Late work that polls on would end the next one's pulls."""
    other, calls = another(), []

    async def poll(server):
        while server.url == other.url:
            calls.append(server.url)
            await asyncio.sleep(0.01)

    with published(fake.url, other.url) as engine:
        other.not_loaded = {"b"}
        metrics = engine.publish(PARAMS, 1)
        assert f"{other.url} does not hold the trainer's weights: 1 tensor differs: b (not loaded" in caplog.text
        asked = other.events.count("sample")
        assert len(list(engine.generate(PROMPTS, 4, SamplingParams(1), seed=0))) == 8
        assert other.events.count("sample") == asked
        assert metrics["rollout/servers_rejected"] == 1
        other.not_loaded = set()
        other.events.clear()
        engine.publish(PARAMS, 2)
        assert set(engine.fleet.opened()) == {fake.url, other.url}
        assert other.events.index("sample") > other.events.index("/finish_weight_update")
        engine.fleet.side_by_side(poll, engine.fleet.all_in("open"), 0.1)
        assert engine.fleet.opened() == [fake.url]
        time.sleep(0.05)
        count = len(calls)
        time.sleep(0.1)
        assert len(calls) == count > 0


def test_a_publish_that_cannot_be_proven_ends_the_run(fake):
    """The server refuses it, or has the checksums of another update, or gets tensors of another dtype."""
    sound = fake.checksums
    with closing(make(fake.url, server_wait_s=1.0)) as engine:
        fake.refuse = {"/update_weights": 500}
        with pytest.raises(RuntimeError, match="/update_weights answered 500: no such thing"):
            engine.publish(PARAMS, 0)
        assert (fake.paused, "/resume" in fake.events) == (True, False)
        fake.refuse, fake.checksums = {}, lambda: {**sound(), "tag": "older"}
        with pytest.raises(VerificationError, match=r"was last given the weights \['older'\], not '.*0'"):
            engine.publish(PARAMS, 0)
        fake.checksums = lambda: {"tag": fake.version}
        with pytest.raises(RuntimeError, match=r"no vLLM server came back within 1 s: .* required field `tensors`"):
            engine.publish(PARAMS, 0)
    halves = make(fake.url, tensors=lambda params: [(name, np.ones(2, np.float16)) for name in params])
    with closing(halves), pytest.raises(ValueError, match="tensors are float16, the rollout dtype is float32"):
        halves.publish(PARAMS, 0)


ROUNDED = {"kv_cache_dtype": "fp8", "quantization": "fp8_per_channel"}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
OLDER = {name: value for name, value in SHAPE.items() if name != "rope_parameters"}
# What the server describes, the settings of the run, and words of each line of the refusal, if it is refused.
DESCRIBED = [
    ({}, {"dtype": "float16"}, "the dtype is float32, expected float16 (rollout.dtype)"),
    ({}, {"head_dtype": "float32"}),  # a server that does not say has a head in its own dtype
    ({}, {"head_dtype": "bfloat16"}, "head computes in float32, expected bfloat16 (precision.lm_head_dtype)"),
    ({"head_dtype": "bfloat16"}, {}),  # None expects any head
    ({"shape": OLDER}, {}),  # an older plugin
    ({"shape": OLDER | {"rope_parameters": LINEAR}}, {}, f"rope_parameters is {LINEAR}, expected "),
    (ROUNDED, {}, "rollout.server_form.weights = fp8_per_channel", "rollout.server_form.kv_cache = fp8_e4m3"),
    (ROUNDED, {"server_form": ServerForm("fp8_per_channel", "fp8_e4m3")}),
    (ROUNDED, {"server_form": ServerForm("fp8_per_channel", "fp8_e5m2")}, "with --kv-cache-dtype fp8_e5m2"),
    ({"kv_cache_dtype": "float32"}, {}),  # the server names it, and it is the model's own dtype
    ({}, {"batch_invariant": True}, "its bits depend on the batch"),
    ({"batch_invariant": True}, {"batch_invariant": True}),
    ({"batch_invariant": True}, {}),
    ({}, {"top_logprobs": 20}, "max_logprobs is 20, expected at least 21"),
    ({"max_logprobs": 21}, {"top_logprobs": 20}),
    ({"max_logprobs": -1}, {"top_logprobs": 20}),
    ({"max_logprobs": 64}, {"top_logprobs": 64}),  # the whole vocabulary, which contains the sampled token
    ({"reads_images": True}, {}, "serve a save of its text"),
]
LACKING = [
    ({"refuse": {"/collective_rpc": 500}}, {}, "rljax's plugin is not in this server"),
    ({"refuse": {"/collective_rpc": 200}}, {}, "/collective_rpc answered without 'results'"),
    ({"refuse": {"/is_paused": 404}}, {}, "start the server with VLLM_SERVER_DEV_MODE=1"),
    ({"refuse": {"/init_weight_transfer_engine": 500}}, {}, "set transfer_dir to one that both see"),
    ({"routes": {"/weight_info"}}, {}, "has no /inference/v1/generate: rljax needs vLLM 0.32 or newer"),
    ({"engines": 2}, {}, "start a server for each of them, without --data-parallel-size"),
    ({"protocol": 3}, {}, f"the plugin speaks protocol 3, the trainer {PROTOCOL}: install "),
]


@pytest.mark.parametrize("case", [*(({"described": first}, *rest) for first, *rest in DESCRIBED), *LACKING])
def test_a_server_fits_or_is_refused_with_the_remedies(fake, tmp_path, case):
    change, settings, *said = case
    vars(fake).update(change)
    lines = []
    try:
        with closing(make(fake.url, tmp_path=tmp_path, **settings)) as engine:
            assert engine.fleet.answering()
    except HandshakeError as error:
        lines = str(error).splitlines()
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert line.startswith(fake.url)
        assert words in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [{}, {"partial_rotary_factor": 0.25}])
def test_rotary_settings_with_and_without_defaults_are_equal(fake, share):
    """A server describes what its file says. The trainer's side has the values that transformers gives to the rest."""
    theirs = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256} | share
    ours = described_rope(10_000.0, read_rope(theirs, 0)) | share
    fake.described = {"shape": SHAPE | {"rope_parameters": theirs}}
    make(fake.url, rope=ours).close()
    short = theirs | {"original_max_position_embeddings": 20}
    differs = r"rope_parameters is .*'factor': 4\.0.*, expected"
    reaches = "yarn reaches 80 tokens, where vLLM's table ends, expected at least 100"
    changed = [
        ({"beta_fast": 16.0}, ours, differs),
        ({"partial_rotary_factor": 0.5}, ours, differs),
        (short, short, reaches),
    ]
    for change, rope, said in changed:
        fake.described = {"shape": SHAPE | {"rope_parameters": theirs | change}}
        with pytest.raises(HandshakeError, match=said):
            make(fake.url, rope=rope)


def test_a_server_is_recovered_and_all_metrics_are_explained(fake, another, caplog):
    """A server is replaced after the second publish, so that every kind of figure of the glossary is reported."""
    with published(fake.url) as engine:
        metrics = engine.publish(PARAMS, 1)
        fake.stop()
        again = another(fake.port)
        samples = engine.generate(PROMPTS, 2, SamplingParams(3), seed=0)
        assert [response["version"].tolist() for response in samples] == [[1] * 3] * 4
        assert again.version == engine.files.tag(1)
        assert "is back with policy version 1, verified" in caplog.text
        assert not metrics.keys() & samples.metrics.keys()
        metrics |= samples.metrics | engine.fleet.report()
    assert metrics["rollout/servers_brought_back"] == 1
    explained = {key for key in glossary() if SERVED_METRICS.fullmatch(key)} - OF_A_PULL - OF_ROUNDING
    assert len(explained) == 17
    assert {key for key in metrics if not key.startswith("time/")} == explained


def test_weights_without_room_are_refused_before_any_server(fake, tmp_path):
    """The version before stays whole, on disk and in use. With room again the next publish succeeds."""
    params = {"a": np.linspace(0, 1, 500_000, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
    changed = {name: array + 1 for name, array in params.items()}
    with small_disk(tmp_path, 5), closing(make(fake.url, tmp_path=tmp_path)) as engine:

        def on_disk():
            return {path: path.read_bytes() for path in sorted(engine.files.root.rglob("*")) if path.is_file()}

        def sampled():
            responses = engine.generate(PROMPTS, 2, SamplingParams(5), seed=0)
            return {version for r in responses for version in r.versions.tolist()}

        engine.publish(params, 1)
        filler, before = fill(tmp_path), on_disk()
        fake.events.clear()
        with pytest.raises(NotWrittenError, match=r"^cannot write weights to .*No space left on device.*$"):
            engine.publish(changed, 2)
        assert fake.events == []
        assert on_disk() == before
        assert sampled() == {1}
        filler.unlink()
        engine.publish(changed, 2)
        assert sampled() == {2}
        assert [path.name for path in engine.files.root.glob("v*")] == [engine.version.path.name]
    assert not engine.files.root.exists()


@pytest.fixture
def tpu(fake):
    fake.described = {"platform": "tpu"}
    return fake


@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_no_seed_is_sent_and_one_likeliest_token_is_asked_for(tpu, another, route, tmp_path, caplog):
    """Both would end in an error there. A server on another platform in the same run gets its seeds."""
    other = another()
    tpu.routes = other.routes = {route, GENERATE, "/weight_info"}
    taken = {"max_staleness": 2, "top_k": 4, "top_p": 0.9}  # settings that a TPU can have
    with published(tpu.url, other.url, tmp_path=tmp_path, **taken) as engine:
        assert len(list(engine.generate(PROMPTS * 4, 2, SamplingParams(4), seed=3))) == 16
    assert {(each["seed"], each["logprobs"] > 0) for each in tpu.sampling} == {(None, True)}
    assert {each["seed"] is None for each in other.sampling if each["max_tokens"] == 4} == {False}
    assert {each["logprobs"] for each in other.sampling if each["max_tokens"] == 4} == {0}
    assert [f"{tpu.url} takes no seeds (TPU)" in each.message for each in caplog.records].count(True) == 1


TPU_LACKS = {
    "rollout.update does not work with vllm on a TPU: leave it out": {"update": "keep", "max_staleness": 1},
    "rollout.min_p does not work": {"top_k": 8, "min_p": 0.1},
    "rollout.colocated does not work": {"colocated": True},
    "rollout.batch_invariant does not work": {"batch_invariant": True},
    "rollout.router_replay = r3 does not work": {"router_replay": "r3"},
    "no other head; set precision.lm_head_dtype = compute": {"head_dtype": "float32", "dtype": "bfloat16"},
}


@pytest.mark.parametrize(("said", "settings"), TPU_LACKS.items())
def test_a_setting_that_a_tpu_cannot_have_ends_the_handshake(tpu, settings, said):
    tpu.dtype = settings.get("dtype", "float32")
    with pytest.raises(HandshakeError) as error:
        make(tpu.url, **settings)
    (line,) = (each for each in str(error.value).splitlines() if "TPU" in each)
    assert f"{tpu.url}: " in line
    assert said in line
    assert tpu.sampling == []


def test_the_trainer_whose_update_broke_off_publishes_again(tpu, another, tmp_path, caplog):
    """A refused update does not end the run. A new trainer does not resume a server with mixed weights."""
    sound = another()
    with published(tpu.url, sound.url, tmp_path=tmp_path) as engine:
        tpu.refuse["/update_weights"] = 500
        engine.publish(PARAMS, 1)
        assert engine.fleet.opened() == [sound.url]
        assert f"{tpu.url}/update_weights answered 500" in caplog.text
        tpu.refuse.clear()
        tpu.described |= {"is_broken": True}
        engine.publish(PARAMS, 2)
        assert sorted(engine.fleet.opened()) == sorted([tpu.url, sound.url])
    tpu.paused = True
    tpu.sampling.clear()
    with pytest.raises(HandshakeError, match="its last update broke off and left mixed weights; restart it"):
        make(tpu.url)
    assert (tpu.paused, tpu.sampling) == (True, [])
