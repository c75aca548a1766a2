"""Checks each object against its schema, and the values that Kubernetes' published schemas do not restrict."""

import functools
import json
import re

import jsonschema
import kubernetes_validate
from kubernetes_manifests import ROOT, job_templates, name_of, pods

VERSIONS = ("1.31", "1.37")  # the oldest with a stable podFailurePolicy, and the newest known here
API_VERSIONS = {
    **dict.fromkeys(("ServiceAccount", "ConfigMap", "Service", "PersistentVolumeClaim"), "v1"),
    **dict.fromkeys(("Role", "RoleBinding"), "rbac.authorization.k8s.io/v1"),
    "NetworkPolicy": "networking.k8s.io/v1",
    "Deployment": "apps/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
}
CUSTOM = {"JobSet": "jobset", "LeaderWorkerSet": "leaderworkerset"}
# The values that the API server accepts, by the end of a path without the indices of lists.
ENUMS = {
    "podFailurePolicy.rules.action": "Ignore FailJob Count FailIndex",
    "onExitCodes.operator": "In NotIn",
    "onPodConditions.type": "DisruptionTarget PodReadyToStartContainers Ready ContainersReady",
    "onPodConditions.status": "True False Unknown",
    "onJobFailureReasons": "BackoffLimitExceeded DeadlineExceeded FailedIndexes MaxFailedIndexesExceeded "
    "PodFailurePolicy",
    "completionMode": "NonIndexed Indexed",
    "tolerations.operator": "Exists Equal",
    "tolerations.effect": "NoSchedule PreferNoSchedule NoExecute",
    "strategy.type": "Recreate RollingUpdate",
    "emptyDir.medium": "Memory HugePages",
    "imagePullPolicy": "Always IfNotPresent Never",
    "fsGroupChangePolicy": "OnRootMismatch Always",
    "protocol": "TCP UDP SCTP",
    "accessModes": "ReadWriteOnce ReadOnlyMany ReadWriteMany ReadWriteOncePod",
    "policyTypes": "Ingress Egress",
    "roleRef.kind": "Role ClusterRole",
    "subjects.kind": "User Group ServiceAccount",
    "verbs": "get list watch create update patch delete deletecollection",
    "fieldRef.fieldPath": "metadata.name metadata.namespace status.podIP status.hostIP spec.nodeName",
    "capabilities.drop": "ALL",
}
POD_RESTARTS = {"Deployment": {"Always"}, "LeaderWorkerSet": {"Always"}, "JobSet": {"Never", "OnFailure"}}
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[KMGTP]i?)?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def schema_problems(objects):
    """Returns a line for each thing that the API server would refuse."""
    found = []
    for one in objects:
        where = name_of(one)
        if API_VERSIONS.get(one["kind"]) != one["apiVersion"]:
            found.append(f"{where}: {one['apiVersion']} is not what serves this kind")
        if not NAME.fullmatch(one["metadata"]["name"]):
            found.append(f"{where}: not a name")
        found += _custom(one) if one["kind"] in CUSTOM else _published(where, one)
        found += [f"{where}: {line}" for line in _open_values(one)]
    for jobset, replicated in job_templates(objects):
        where = f"{name_of(jobset)}/{replicated['name']}"
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
        found += _published(where, job)
        found += [f"{where}: {line}" for line in _pod_failure_policy(job["spec"])]
    for pod in pods(objects):
        found += _published(pod.where, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod.spec})
        restart = pod.spec.get("restartPolicy", "Always")
        if restart not in POD_RESTARTS[pod.owner["kind"]]:
            found.append(f"{pod.where}: restartPolicy is {restart}")
    return found


def _published(where, one):
    lines = ((version, _refusal(json.dumps(one), version)) for version in VERSIONS)
    return [f"{where}: {version}: {line}" for version, line in lines if line]


@functools.cache
def _refusal(text, version):
    """Returns the error of ``kubernetes-validate --strict`` for a JSON object, or None. It can take half a second."""
    try:
        kubernetes_validate.validate(json.loads(text), version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return str(error.message)
    return None


def _custom(one):
    schema = json.loads((ROOT / f"tests/launch/schemas/{CUSTOM[one['kind']]}.json").read_text(encoding="utf-8"))
    errors = jsonschema.Draft202012Validator(schema).iter_errors(one)
    return [f"{name_of(one)}: {error.json_path}: {error.message}" for error in errors]


def _leaves(value, path=()):
    for key, below in value.items() if isinstance(value, dict) else ((None, one) for one in value):
        at = path if key is None else (*path, key)
        if isinstance(below, dict | list):
            yield from _leaves(below, at)
        else:
            yield at, below


def _open_values(one):
    for path, value in _leaves(one):
        where = ".".join(path)
        for end, accepted in ENUMS.items():
            if f".{where}".endswith(f".{end}") and value not in accepted.split():
                yield f"{where}: {value!r} is none of {accepted}"
        is_quantity = path[-2:-1] in {("requests",), ("limits",)} or path[-1] == "sizeLimit"
        if is_quantity and not QUANTITY.fullmatch(str(value)):
            yield f"{where}: {value!r} is no quantity"


def _pod_failure_policy(job):
    """Yields the errors in ``podFailurePolicy`` that the API server finds beyond its schema."""
    pod = job["template"]["spec"]
    rules = job.get("podFailurePolicy", {}).get("rules", [])
    if rules and pod.get("restartPolicy") != "Never":
        yield "podFailurePolicy wants restartPolicy: Never"
    for rule in rules:
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield f"a rule has one of onExitCodes and onPodConditions: {rule}"
        codes = rule.get("onExitCodes", {})
        values = codes.get("values", [1])
        if values != sorted(set(values)) or 0 in values:
            yield f"exit codes are ordered, each once, and never 0: {values}"
        if codes and codes.get("containerName") not in {None, *(one["name"] for one in pod["containers"])}:
            yield f"no container {codes['containerName']}"
