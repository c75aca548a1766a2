"""The files of launch/kubernetes must parse, run dry and agree with rljax's own code.

These tests need no further packages.
"""

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


@pytest.mark.parametrize("script", ["launch/kubernetes/run.sh", "launch/tpu.sh", "tools/test_kubernetes.sh"])
def test_a_script_is_bash(script):
    assert bash("-n", ROOT / script) == (0, "", "")


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.yaml")), ids=lambda file: str(file.relative_to(FOLDER)))
def test_a_file_is_yaml(file):
    documents = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    assert documents
    assert all(isinstance(document, dict) for document in documents)


@pytest.mark.skipif(renderer() is None, reason="neither kubectl nor kustomize is here")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_a_dry_run_prints_commands_and_manifests(overlay):
    status, out, err = bash(RUN, overlay, "--dry-run")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["kubectl", "openssl", "kubectl"]
    kinds = [one["kind"] for one in yaml.safe_load_all(out)]
    assert {"JobSet", "PersistentVolumeClaim", "Role"} < set(kinds)
    assert "Secret" not in kinds  # it is made once, and is in no file


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name an overlay"),
        ([FOLDER / "nowhere"], "holds no kustomization.yaml"),
        ([OVERLAYS[0], "--dry"], "unknown option --dry"),
        ([OVERLAYS[0], OVERLAYS[0]], "unexpected argument"),
    ],
)
def test_what_is_wrong_is_said(words, says):
    status, _, said = bash(RUN, *words)
    assert status == 2
    assert says in said


def test_nothing_is_done_without_kubectl(tmp_path):
    said = "run: neither kubectl nor kustomize is on the PATH\n"
    assert bash(RUN, OVERLAYS[0], PATH=str(tmp_path)) == (2, "", said)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_the_servers_are_started_as_the_configuration_says(overlay, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text((overlay / "config.yaml").read_text(encoding="utf-8").replace(IN_IMAGE, str(ROOT)))
    config = load_config(Config, [str(file)], prog="test", description="")
    generators = yaml.safe_load((overlay / "kustomization.yaml").read_text(encoding="utf-8"))["configMapGenerator"]
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


@pytest.mark.parametrize("image", ["trainer", "server"])
def test_an_image_holds_the_checkout_where_the_pods_look_for_it(image):
    lines = (FOLDER / f"{image}.Dockerfile").read_text(encoding="utf-8").splitlines()
    assert f"WORKDIR {IN_IMAGE}" in lines
    assert "COPY . ." in lines


def filled(words, **values):
    """Returns the words with a value in place of each $(NAME)."""
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def test_a_server_is_started_with_options_that_there_are():
    deployment = yaml.safe_load((FOLDER / "server/deployment.yaml").read_text(encoding="utf-8"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python3", "-m", "rljax.cli", "serve", "vllm"]
    words = filled(container["args"], DTYPE="bfloat16", MAX_MODEL_LEN="9216", MAX_LOGPROBS="21")
    options = parse("vLLM", words)
    assert (options["model"], options["port"], options["host"]) == ("$(MODEL)", 8000, "$(POD_IP)")
    assert options["extra_args"] == (
        *(
            "--tensor-parallel-size=$(TENSOR_PARALLEL)",
            "--kv-cache-dtype=$(KV_CACHE)",
            "--quantization=$(QUANTIZATION)",
        ),
    )


@pytest.mark.parametrize("file", ["server/deployment.yaml", "leaderworkerset/leaderworkerset.yaml"])
def test_each_pod_of_a_server_gets_its_settings_as_variables(file):
    """This matters because vLLM itself reads VLLM_BATCH_INVARIANT."""
    document = yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))["spec"]
    templates = document.get("leaderWorkerTemplate", {"template": document.get("template")})
    specs = [each["spec"] for name, each in templates.items() if name.lower().endswith("template")]
    assert len(specs) == (2 if "leaderWorkerTemplate" in document else 1)
    for spec in specs:
        (container,) = spec["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "rljax-server"}}]


def pairs(words):
    """Returns the options of a command line, with their values if any; ``--a b`` and ``--a=b`` are equal."""
    found: list[str] = []
    for word in words:
        if word.startswith("--"):
            found.append(word)
        else:
            found[-1] += f"={word}"
    return set(found)


def test_every_host_of_a_server_has_the_same_arguments():
    lws = yaml.safe_load((FOLDER / "leaderworkerset/leaderworkerset.yaml").read_text(encoding="utf-8"))
    templates = lws["spec"]["leaderWorkerTemplate"]
    (leader,) = templates["leaderTemplate"]["spec"]["containers"]
    (worker,) = templates["workerTemplate"]["spec"]["containers"]
    words = filled(leader["args"], DTYPE="float16", MAX_MODEL_LEN="77", MAX_LOGPROBS="21")
    options = {
        key: value
        for key, value in parse("vLLM", words).items()
        if key in ("model", "dtype", "max_model_len", "max_logprobs", "extra_args")
    }
    command = VllmConfig(python=sys.executable, **options).command(8000, gpu=True)
    assert command[1:3] == ["serve", "$(MODEL)"]
    assert (worker["command"], worker["args"][0]) == (["vllm", "serve"], "$(MODEL)")
    started = pairs(command[3:])
    for name, value in (("DTYPE", "float16"), ("MAX_MODEL_LEN", "77"), ("MAX_LOGPROBS", "21")):
        started = {word.replace(f"={value}", f"=$({name})") for word in started}
    of_http = {"--port=8000", "--host=127.0.0.1", "--disable-uvicorn-access-log"}
    assert of_http < started
    expected = started - of_http - {"--node-rank=0"} | {"--node-rank=$(LWS_WORKER_INDEX)", "--headless"}
    assert pairs(worker["args"][1:]) == expected
