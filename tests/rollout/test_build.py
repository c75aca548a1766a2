"""Tests of the one place that makes engines: wrong settings are refused, and each setting reaches its engine."""

import dataclasses
from contextlib import closing

import jax
import numpy as np
import pytest
from small_disk import small_disk

from rljax.errors import ConfigError, run_cli
from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.rollout.build import check_engine, make_engine, policy_functions, version_bytes
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.injected import InjectedEngine
from rljax.rollout.types import ClientLimits, InjectConfig, RolloutConfig, SamplingParams, ServerForm, VerifyConfig
from rljax.run.config import Config
from rljax.run.config_file import load_config
from rljax.sharding import MeshConfig, make_mesh
from rljax.train import main
from rljax.weights.publish_config import PublishConfig

CONFIG = PolicyConfig(64, 8, 8, 1, 1, 1, 8, tie_word_embeddings=True)
MESH = make_mesh(MeshConfig(), jax.devices()[:1])
VLLM = {"engine": "vllm", "urls": ("http://127.0.0.1:1",)}
SGLANG = VLLM | {"engine": "sglang"}


def make(config, **options):
    return make_engine(config, CONFIG, MESH, max_prompt_tokens=6, max_tokens=20, **options)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "vllm"}, "rollout.engine = vllm needs at least one URL in rollout.urls"),
        (VLLM | {"inject": InjectConfig(staleness=1)}, "rollout.inject works with rollout.engine = exact or jax"),
        (VLLM | {"inject": InjectConfig(logit_noise=0.1)}, "rollout.inject works with rollout.engine = exact or jax"),
        ({"server_form": ServerForm(kv_cache="fp8_e5m2")}, "rollout.engine = vllm or sglang, not with jax"),
        ({"engine": "exact", "batch_invariant": True}, "rollout.batch_invariant works .* not with exact"),
        (SGLANG | {"server_form": ServerForm(weights="fp8")}, "rollout.server_form.weights works .* not with sglang"),
        # SGLang reports log-probabilities of the distribution before the cut.
        (SGLANG | {"top_k": 5}, r"top_k works with rollout\.engine = exact, jax or vllm, not with sglang"),
        (VLLM | {"temperature": 0.005}, "rollout.temperature below 0.01 works .* not with vllm"),
        ({"update": "keep", "max_staleness": 1}, "works with rollout.engine = vllm or sglang, not with jax"),
        (VLLM | {"update": "keep"}, "give rollout.max_staleness above 0"),
        (VLLM | {"update": "keep", "max_staleness": 1, "router_replay": "r3"}, "experts of tokens before new weights"),
    ],
)
def test_settings_that_an_engine_cannot_work_with_are_refused(settings, said):
    for check in (check_engine, make):
        with pytest.raises(ValueError, match=said):
            check(RolloutConfig(**settings))


def test_settings_that_make_no_sense_are_refused():
    """A silent server is left before the run ends."""
    wrong = {
        RolloutConfig: [("temperature", 0.0), ("temperature", np.inf), ("group_size", 1), ("server_wait_s", np.nan)],
        ClientLimits: [("max_outstanding", 0), ("request_timeout_s", 0.0)],
        InjectConfig: [("weight_noise", -0.1), ("staleness", -1)],
        VerifyConfig: [("prompts", 0), ("factor", np.inf)],
    }
    for config, cases in wrong.items():
        for name, value in cases:
            with pytest.raises(ValueError, match=f"{name} .*{value}"):
                config(**{name: value})
    assert RolloutConfig(server_wait_s=np.inf, limits=ClientLimits(request_timeout_s=np.inf))
    assert ClientLimits().request_timeout_s + 600 <= Config().run.stuck_s


def test_a_run_says_so_in_one_line_before_it_opens_anything(tmp_path, capsys):
    words = ["quickstart", "--run.dir", str(tmp_path / "run"), "--model.path", "nowhere", "--rollout.engine", "vllm"]
    assert run_cli(main, words) == 2
    said, *more = capsys.readouterr().err.splitlines()
    assert said.startswith("error: rollout.engine = vllm needs at least one URL in rollout.urls")
    assert (more, (tmp_path / "run").exists()) == ([], False)


@pytest.mark.parametrize(("store", "takes"), [("shared", 4), ("directory", 6), ("http", 3)])
def test_weights_without_room_are_refused_before_any_server(tmp_path, store, takes, monkeypatch):
    """Two of four processes are on this machine. Over HTTP each of them has its own parts alone."""
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    config = RolloutConfig(**VLLM, dtype="float32", transfer_dir=str(tmp_path))
    wide = dataclasses.replace(CONFIG, vocab_size=65_536)  # its embeddings take 2 MiB
    assert 2**21 < version_bytes(wide, "float32") == 2 * version_bytes(wide, "bfloat16") < 2**21 + 4096
    said = rf"^.*3\.0 MiB free, .* take {takes}\.0 MiB: .*--ipc.*$"
    with small_disk(tmp_path, 3), pytest.raises(ConfigError, match=said):
        make_engine(config, wide, MESH, max_prompt_tokens=6, max_tokens=20, publish=PublishConfig(store))


def test_every_setting_of_the_served_engine_reaches_it(fake, tmp_path):
    """Settings come from a file and the command line. Fields that neither of them names keep their defaults."""
    (tmp_path / "run.yaml").write_text("rollout: {verify: {factor: 5}}\n")
    options = ["--rollout.engine", "vllm", "--rollout.urls", fake.url, "--rollout.dtype", "float32"]
    options += ["--rollout.limits.max-outstanding", "3", "--rollout.transfer-dir", str(tmp_path / "w")]
    rollout = load_config(Config, [str(tmp_path / "run.yaml"), *options], prog="", description="").rollout
    assert rollout.verify == VerifyConfig(prompts=4, tokens=12, factor=5.0)
    assert rollout.limits == ClientLimits(max_outstanding=3)

    def score(params, sequences):  # the stand-in always gives -1, which is not a policy's log-probability
        return [np.full(len(ids), -1.00001, np.float32) for ids in sequences]

    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1"):  # there is no server
        make(dataclasses.replace(rollout, urls=VLLM["urls"], server_wait_s=0.5))
    functions = dataclasses.replace(policy_functions(CONFIG, "float32"), score=score)
    with closing(make(rollout, functions=functions)) as engine:
        metrics = engine.publish(init_params(CONFIG, 0), 0)
        assert (tmp_path / "w") in engine.files.root.parents
        assert metrics["publish/verify_band"] == pytest.approx(5e-5, rel=0.02)
        assert engine.fleet.limits == rollout.limits


def test_settings_of_numerics_reach_the_embedded_engine():
    """test_inject.py has weights of eight bits."""
    params, found = init_params(CONFIG, 0), []
    changed = {"weight_noise": 0.1}, {"dtype": "float16"}, {"quantize": "fp8"}
    for settings in ({"kv_cache_dtype": "fp8_e4m3"}, {}, *({"inject": InjectConfig(**each)} for each in changed)):
        engine = make(RolloutConfig(dtype="float32", **settings))
        assert isinstance(engine, InjectedEngine if "inject" in settings else JaxEngine)
        engine.publish(params, 0)
        (response,) = engine.generate([np.array([3, 5], np.int32)], 1, SamplingParams(2), seed=0)
        found.append(response["rollout_logprobs"])
    assert np.abs(found[0] - found[1]).max() > 0
    assert all(np.abs(each - found[1]).max() > 0 for each in found[2:])
