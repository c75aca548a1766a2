"""The files of launch/kubernetes must parse, run dry and agree with rljax's own code, without further packages."""

import sys

import pytest
import yaml
from kubernetes_manifests import OVERLAYS, ROOT, renderer
from programs import bash

from rljax.commands.serve import parse
from rljax.rollout.servers.discovery import make_lookup
from rljax.rollout.servers.vllm.server import VllmConfig
from rljax.run.config import Config
from rljax.run.config_file import load_config

FOLDER = ROOT / "launch/kubernetes"
RUN = FOLDER / "run.sh"
IN_IMAGE = "/opt/rljax"  # where the images have the checkout
VALUES = {"DTYPE": "float16", "MAX_MODEL_LEN": "77", "MAX_LOGPROBS": "21"}
FROM_SETTINGS = [{"configMapRef": {"name": "rljax-server"}}]


def read(file):
    return yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))


def test_scripts_are_bash_and_manifests_are_yaml():
    for script in ("launch/kubernetes/run.sh", "launch/tpu.sh", "tools/test_kubernetes.sh"):
        assert bash("-n", ROOT / script) == (0, "", "")
    for file in FOLDER.rglob("*.yaml"):
        documents = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
        assert documents, file
        assert all(isinstance(document, dict) for document in documents), file


@pytest.mark.skipif(renderer() is None, reason="neither kubectl nor kustomize is here")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_a_dry_run_prints_commands_and_manifests(overlay):
    status, out, err = bash(RUN, overlay, "--dry-run")
    assert (status, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines()[:3]] == ["kubectl", "openssl", "kubectl"]
    kinds = [one["kind"] for one in yaml.safe_load_all(out)]
    assert {"JobSet", "PersistentVolumeClaim", "Role"} < set(kinds)
    assert "Secret" not in kinds  # it is made once, and is in no file


def test_what_is_wrong_is_said_and_nothing_is_done(tmp_path):
    for words, says in [
        ([], "name an overlay"),
        ([FOLDER / "nowhere"], "holds no kustomization.yaml"),
        ([OVERLAYS[0], "--dry"], "unknown option --dry"),
        ([OVERLAYS[0], OVERLAYS[0]], "unexpected argument"),
    ]:
        status, _, said = bash(RUN, *words)
        assert status == 2
        assert says in said
    said = "run: neither kubectl nor kustomize is on the PATH\n"
    assert bash(RUN, OVERLAYS[0], PATH=str(tmp_path)) == (2, "", said)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_the_servers_are_started_as_the_configuration_says(overlay, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text((overlay / "config.yaml").read_text(encoding="utf-8").replace(IN_IMAGE, str(ROOT)))
    config = load_config(Config, [str(file)], prog="test", description="")
    generators = read(overlay / "kustomization.yaml")["configMapGenerator"]
    (literals,) = (one["literals"] for one in generators if one["name"] == "rljax-server")
    settings = dict(line.split("=", 1) for line in literals)
    assert config.rollout.engine == "vllm"
    make_lookup(config.rollout.discovery)
    assert settings["MODEL"] == config.model.path
    assert settings["DTYPE"] == config.rollout.dtype
    assert int(settings["MAX_MODEL_LEN"]) >= config.max_engine_tokens
    # vLLM returns the sampled token in addition to the likeliest ones.
    assert int(settings["MAX_LOGPROBS"]) > config.rollout.reported
    assert settings["KV_CACHE"] == config.rollout.server_form.kv_cache
    assert settings["QUANTIZATION"] == {"none": "None"}.get(*[config.rollout.server_form.weights] * 2)
    assert settings["VLLM_BATCH_INVARIANT"] == str(int(config.rollout.batch_invariant))
    assert config.precision.lm_head_dtype != "float32"  # it would need --head-dtype on the servers


def test_an_image_holds_the_checkout_where_the_pods_look_for_it():
    for image in ("trainer", "server"):
        lines = (FOLDER / f"{image}.Dockerfile").read_text(encoding="utf-8").splitlines()
        assert {f"WORKDIR {IN_IMAGE}", "COPY . ."} <= set(lines)


def started(args):
    """Returns the options of ``rljax serve`` for a container's arguments with values in place of some $(NAME)."""
    for name, value in VALUES.items():
        args = [word.replace(f"$({name})", value) for word in args]
    return parse("vLLM", args)


def pairs(words):
    """Returns the options of a command line, with their values if any; ``--a b`` and ``--a=b`` are equal."""
    found = []
    for word in words:
        if word.startswith("--"):
            found.append(word)
        else:
            found[-1] += f"={word}"
    return set(found)


def test_a_server_is_started_with_options_that_there_are():
    """Its settings are variables of each pod, too, because vLLM itself reads VLLM_BATCH_INVARIANT."""
    (container,) = read("server/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == FROM_SETTINGS
    assert container["command"] == ["python3", "-m", "rljax.cli", "serve", "vllm"]
    options = started(container["args"])
    assert (options["model"], options["port"], options["host"]) == ("$(MODEL)", 8000, "$(POD_IP)")
    form = ("--kv-cache-dtype=$(KV_CACHE)", "--quantization=$(QUANTIZATION)")
    assert options["extra_args"] == ("--tensor-parallel-size=$(TENSOR_PARALLEL)", *form)


def test_every_host_of_a_server_has_the_same_arguments():
    templates = read("leaderworkerset/leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]
    (leader,) = templates["leaderTemplate"]["spec"]["containers"]
    (worker,) = templates["workerTemplate"]["spec"]["containers"]
    assert leader["envFrom"] == worker["envFrom"] == FROM_SETTINGS
    kept = ("model", "dtype", "max_model_len", "max_logprobs", "extra_args")
    options = {key: value for key, value in started(leader["args"]).items() if key in kept}
    command = VllmConfig(python=sys.executable, **options).command(8000, gpu=True)
    assert command[1:3] == ["serve", "$(MODEL)"]
    assert (worker["command"], worker["args"][0]) == (["vllm", "serve"], "$(MODEL)")
    words = pairs(command[3:])
    for name, value in VALUES.items():
        words = {word.replace(f"={value}", f"=$({name})") for word in words}
    of_http = {"--port=8000", "--host=127.0.0.1", "--disable-uvicorn-access-log"}
    assert of_http < words
    expected = words - of_http - {"--node-rank=0"} | {"--node-rank=$(LWS_WORKER_INDEX)", "--headless"}
    assert pairs(worker["args"][1:]) == expected
