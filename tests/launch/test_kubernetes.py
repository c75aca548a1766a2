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
    # The key is its readers' alone: the pods must pass the check of rljax.weights.access.
    spec = trainer(objects).spec
    (container,) = (one for one in spec["initContainers"] if one["name"] == "key")
    assert container["command"][:3] == ["install", "-m", "0400"]
    assert spec["securityContext"]["runAsUser"] == 1000


POD = "JobSet spec.replicatedJobs.0.template.spec.template.spec."
JOB = "JobSet spec.replicatedJobs.0.template.spec."
FAILURES = "JobSet spec.failurePolicy."
SERVER = "Deployment spec.template.spec."
ROLE = "app.kubernetes.io/component"

# Faults, one or two for each check. The value is put into the first object of the kind, and must be found.
SCHEMA_FAULTS = [
    (POD + "restartPolicy", "never"),
    (POD + "terminationGracePeriodSecond", 60),
    (POD + "containers.0.resources.limits.memory", "512Gb"),
    (JOB + "completionMode", "indexed"),
    (JOB + "parallelism", "2"),
    (JOB + "podFailurePolicy.rules.0.onExitCodes.containerName", "main"),
    (JOB + "podFailurePolicy.rules.0.onExitCodes.values", [3, 2]),
    (FAILURES + "rules.0.onJobFailureReasons", ["PodFailure"]),
    (FAILURES + "maxRestart", 3),
    ("JobSet apiVersion", "jobset.x-k8s.io/v1"),
    (SERVER + "restartPolicy", "Never"),
    ("LeaderWorkerSet spec.leaderWorkerTemplate.sizes", 2),
    ("LeaderWorkerSet spec.startupPolicy", "LeaderFirst"),
]
REFERENCE_FAULTS = [
    (POD + "serviceAccountName", "rljax"),
    (POD + "volumes.0.configMap.name", "rljax-runs"),
    (POD + "volumes.1.secret.secretName", "rljax-key"),
    (POD + "volumes.3.persistentVolumeClaim.claimName", "shared"),
    (POD + "containers.0.volumeMounts.1.name", "keys"),
    (POD + "containers.0.volumeMounts.2.mountPath", "/mnt"),
    (POD + "terminationGracePeriodSeconds", 60),
    (JOB + "completions", 2),
    (JOB + "podFailurePolicy.rules.0.onExitCodes.values", [2]),
    (FAILURES + "rules.0.onJobFailureMessagePatterns", ["exit code (2|3)$"]),
    ("JobSet spec.network.subdomain", "trainers"),
    ("Deployment spec.selector.matchLabels", {ROLE: "servers"}),
    (SERVER + "containers.0.readinessProbe.httpGet.port", "web"),
    (SERVER + "containers.0.ports.0.containerPort", 8080),
    (SERVER + "containers.0.envFrom.0.configMapRef.name", "rljax-servers"),
    (SERVER + "containers.0.args.0", "$(MODEL_PATH)"),
    (SERVER + "terminationGracePeriodSeconds", 30),
    (SERVER + "containers.0.resources.limits", {"nvidia.com/gpu": "4"}),
    ("Service spec.selector", {ROLE: "server"}),
    ("Service spec.publishNotReadyAddresses", True),
    ("Service spec.clusterIP", "10.0.0.1"),
    ("Service spec.ports.0.port", 80),
    ("Service metadata.name", "server"),
    ("RoleBinding roleRef.name", "trainer"),
    ("NetworkPolicy spec.podSelector.matchLabels", {ROLE: "vllm"}),
    ("PersistentVolumeClaim spec.accessModes", ["ReadWriteOnce"]),
    ("PersistentVolumeClaim metadata.namespace", "default"),
    ("LeaderWorkerSet metadata.name", "servers"),
    ("LeaderWorkerSet spec.leaderWorkerTemplate.size", 4),
]


def planted(place, value):
    kind, path = place.split(" ")
    objects = rendered(BY_NAME["qwen3-8b" if kind == "Deployment" else "qwen3-32b"])
    holder = of_kind(objects, kind)[0]
    *above, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in above:
        holder = holder[key]
    before = copy.deepcopy(holder)
    holder[last] = value
    assert holder != before
    return objects


def test_a_planted_fault_is_no_valid_object():
    assert [fault for fault in SCHEMA_FAULTS if not schema_problems(planted(*fault))] == []


def test_a_planted_fault_leads_nowhere():
    for fault in REFERENCE_FAULTS:
        objects = planted(*fault)
        assert schema_problems(objects) == [], fault  # otherwise the fault belongs to the list above
        assert reference_problems(objects), fault


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_a_name_that_is_not_the_servers_is_found(overlay):
    for where in ("dns://server:8000", "dns://servers:80", "dns://servers.default:8000"):
        objects = rendered(overlay)
        (run,) = (one for one in of_kind(objects, "ConfigMap") if "config.yaml" in one["data"])
        text = run["data"]["config.yaml"]
        run["data"]["config.yaml"] = text.replace("dns://servers:8000", where)
        assert run["data"]["config.yaml"] != text
        assert len(reference_problems(objects)) == 1, where
