"""The manifests of launch/kubernetes are checked against the schemas of their APIs and against each other."""

import copy

import pytest

pytest.importorskip("kubernetes_validate", reason="bash tools/test_kubernetes.sh makes its environment")

from kubernetes_manifests import OVERLAYS, of_kind, rendered, trainer
from kubernetes_references import reference_problems
from kubernetes_schemas import schema_problems

pytestmark = pytest.mark.launch_files
BY_NAME = {overlay.name: overlay for overlay in OVERLAYS}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_an_overlay_is_valid_and_what_it_refers_to_is_there(overlay):
    objects = rendered(overlay)
    assert len(objects) >= 8
    assert schema_problems(objects) == []
    assert reference_problems(objects) == []


def at(value, path):
    """Returns the container of the last key and this key; a number is an index of a list."""
    *above, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in above:
        value = value[key]
    return value, last


POD = "spec.replicatedJobs.0.template.spec.template.spec"
JOB = "spec.replicatedJobs.0.template.spec"
DEPLOYED = "spec.template.spec"

# Faults as (overlay, kind, path, value), one or two for each check. The value is put into the first object of the kind,
# and must be found.
SCHEMA_FAULTS = [
    ("qwen3-8b", "JobSet", f"{POD}.restartPolicy", "never"),
    ("qwen3-8b", "JobSet", f"{POD}.terminationGracePeriodSecond", 60),
    ("qwen3-8b", "JobSet", f"{POD}.containers.0.resources.limits.memory", "512Gb"),
    ("qwen3-8b", "JobSet", f"{JOB}.completionMode", "indexed"),
    ("qwen3-8b", "JobSet", f"{JOB}.parallelism", "2"),
    ("qwen3-8b", "JobSet", f"{JOB}.podFailurePolicy.rules.0.onExitCodes.containerName", "main"),
    ("qwen3-8b", "JobSet", f"{JOB}.podFailurePolicy.rules.0.onExitCodes.values", [3, 2]),
    ("qwen3-8b", "JobSet", "spec.failurePolicy.rules.0.onJobFailureReasons", ["PodFailure"]),
    ("qwen3-8b", "JobSet", "spec.failurePolicy.maxRestart", 3),
    ("qwen3-8b", "JobSet", "apiVersion", "jobset.x-k8s.io/v1"),
    ("qwen3-8b", "Deployment", f"{DEPLOYED}.restartPolicy", "Never"),
    ("qwen3-32b", "LeaderWorkerSet", "spec.leaderWorkerTemplate.sizes", 2),
    ("qwen3-32b", "LeaderWorkerSet", "spec.startupPolicy", "LeaderFirst"),
]
REFERENCE_FAULTS = [
    ("qwen3-8b", "JobSet", f"{POD}.serviceAccountName", "rljax"),
    ("qwen3-8b", "JobSet", f"{POD}.volumes.0.configMap.name", "rljax-runs"),
    ("qwen3-8b", "JobSet", f"{POD}.volumes.1.secret.secretName", "rljax-key"),
    ("qwen3-8b", "JobSet", f"{POD}.volumes.3.persistentVolumeClaim.claimName", "shared"),
    ("qwen3-8b", "JobSet", f"{POD}.containers.0.volumeMounts.1.name", "keys"),
    ("qwen3-8b", "JobSet", f"{POD}.containers.0.volumeMounts.2.mountPath", "/mnt"),
    ("qwen3-8b", "JobSet", f"{POD}.terminationGracePeriodSeconds", 60),
    ("qwen3-8b", "JobSet", f"{JOB}.completions", 4),
    ("qwen3-8b", "JobSet", f"{JOB}.podFailurePolicy.rules.0.onExitCodes.values", [2]),
    ("qwen3-8b", "JobSet", "spec.failurePolicy.rules.0.onJobFailureMessagePatterns", ["exit code (2|3)$"]),
    ("qwen3-8b", "JobSet", "spec.network.subdomain", "trainers"),
    ("qwen3-8b", "Deployment", "spec.selector.matchLabels", {"app.kubernetes.io/component": "servers"}),
    ("qwen3-8b", "Deployment", f"{DEPLOYED}.containers.0.readinessProbe.httpGet.port", "web"),
    ("qwen3-8b", "Deployment", f"{DEPLOYED}.containers.0.ports.0.containerPort", 8080),
    ("qwen3-8b", "Deployment", f"{DEPLOYED}.containers.0.envFrom.0.configMapRef.name", "rljax-servers"),
    ("qwen3-8b", "Deployment", f"{DEPLOYED}.containers.0.args.0", "$(MODEL_PATH)"),
    ("qwen3-8b", "Deployment", f"{DEPLOYED}.terminationGracePeriodSeconds", 30),
    ("qwen3-8b", "Deployment", f"{DEPLOYED}.containers.0.resources.limits", {"nvidia.com/gpu": "4"}),
    ("qwen3-32b", "Service", "spec.selector", {"app.kubernetes.io/component": "server"}),
    ("qwen3-8b", "Service", "spec.publishNotReadyAddresses", True),
    ("qwen3-8b", "Service", "spec.clusterIP", "10.0.0.1"),
    ("qwen3-8b", "Service", "spec.ports.0.port", 80),
    ("qwen3-8b", "Service", "metadata.name", "server"),
    ("qwen3-8b", "RoleBinding", "roleRef.name", "trainer"),
    ("qwen3-8b", "NetworkPolicy", "spec.podSelector.matchLabels", {"app.kubernetes.io/component": "vllm"}),
    ("qwen3-8b", "PersistentVolumeClaim", "spec.accessModes", ["ReadWriteOnce"]),
    ("qwen3-8b", "PersistentVolumeClaim", "metadata.namespace", "default"),
    ("paper-4b", "LeaderWorkerSet", "metadata.name", "servers"),
    ("qwen3-32b", "LeaderWorkerSet", "spec.leaderWorkerTemplate.size", 4),
]


def planted(overlay, kind, path, value):
    objects = rendered(BY_NAME[overlay])
    holder, key = at(of_kind(objects, kind)[0], path)
    before = copy.deepcopy(holder)
    holder[key] = value
    assert holder != before
    return objects


@pytest.mark.parametrize("fault", SCHEMA_FAULTS, ids=lambda fault: f"{fault[2]}={fault[3]}")
def test_a_planted_fault_is_no_valid_object(fault):
    assert schema_problems(planted(*fault))


@pytest.mark.parametrize("fault", REFERENCE_FAULTS, ids=lambda fault: f"{fault[2]}={fault[3]}")
def test_a_planted_fault_leads_nowhere(fault):
    objects = planted(*fault)
    assert schema_problems(objects) == []  # otherwise the fault belongs to the list above
    assert reference_problems(objects)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
@pytest.mark.parametrize("where", ["dns://server:8000", "dns://servers:80", "dns://servers.default:8000"])
def test_a_name_that_is_not_the_servers_is_found(overlay, where):
    objects = rendered(overlay)
    (run,) = (one for one in of_kind(objects, "ConfigMap") if "config.yaml" in one["data"])
    text = run["data"]["config.yaml"]
    run["data"]["config.yaml"] = text.replace("dns://servers:8000", where)
    assert run["data"]["config.yaml"] != text
    assert len(reference_problems(objects)) == 1


def test_the_key_is_its_readers_alone():
    """The pods must pass the check of rljax.weights.access."""
    for overlay in OVERLAYS:
        spec = trainer(rendered(overlay)).spec
        (container,) = (one for one in spec["initContainers"] if one["name"] == "key")
        assert container["command"][:3] == ["install", "-m", "0400"]
        assert spec["securityContext"]["runAsUser"] == 1000
