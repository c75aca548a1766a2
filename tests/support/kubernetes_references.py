"""Checks that the objects agree with each other and with the run's configuration."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from kubernetes_manifests import ROOT, Object, Pod, name_of, of_kind, pods, run_config

RUN_SH = ROOT / "launch/kubernetes/run.sh"
SERVER_STOP_S = 45  # the longest time that rljax.rollout.servers.process takes to end vLLM (seconds)
BY_LEADERWORKERSET = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}


def reference_problems(objects: list[Object]) -> list[str]:
    """Returns a line for each reference to something that does not exist, and for each disagreement of two places."""
    found = [f"{name_of(one)}: not in the namespace rljax" for one in objects if _namespace(one) != "rljax"]
    for pod in pods(objects):
        found += [
            f"{pod.where}: {line}" for line in [*_volumes(pod, objects), *_environment(pod, objects), *_ports(pod)]
        ]
    found += _access(objects)
    found += _selectors(objects)
    found += _jobset(objects)
    found += _servers(objects)
    found += _directories(objects)
    return found


def _namespace(one: Object) -> str | None:
    return one["metadata"].get("namespace")


def _names(objects: list[Object], kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in of_kind(objects, kind)}


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a selector matches these labels: a label selector with ``matchLabels`` alone, or a Service's selector."""
    assert "matchExpressions" not in selector
    wanted = selector.get("matchLabels", selector)
    return bool(wanted) and all(labels.get(key) == value for key, value in wanted.items())


def secret_of_run_sh() -> tuple[str, str]:
    """Returns the name and the key of the Secret that launch/kubernetes/run.sh creates."""
    text = RUN_SH.read_text(encoding="utf-8")
    (name,), (key,) = set(re.findall(r"\bsecret=(\S+)", text)), set(re.findall(r"--from-file=(\w+)=", text))
    return name, key


def _volumes(pod: Pod, objects: list[Object]) -> Iterator[str]:
    secret, key = secret_of_run_sh()
    named = {"configMap": ("ConfigMap", "name"), "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName")}
    named["secret"] = ("Secret", "secretName")
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    for volume in volumes.values():
        for source, (kind, key_of_name) in named.items():
            name = volume.get(source, {}).get(key_of_name)
            if name and name not in ({secret} if kind == "Secret" else _names(objects, kind)):
                yield f"no {kind} {name}"
    mounted = set()
    for container in pod.containers:
        mounts = container.get("volumeMounts", [])
        mounted |= {mount["name"] for mount in mounts}
        if len({mount["mountPath"] for mount in mounts}) != len(mounts):
            yield f"{container['name']}: two volumes at one path"
        if container["name"] == "key" and container["command"][-2:] != [f"/run/secret/{key}", "/run/rljax/key"]:
            yield "the key is not where run.sh and RLJAX_API_KEY_FILE have it"
    if mounted != set(volumes):
        yield f"volumes {sorted(volumes)}, mounted {sorted(mounted)}"


def _environment(pod: Pod, objects: list[Object]) -> Iterator[str]:
    data = {one["metadata"]["name"]: one["data"] for one in of_kind(objects, "ConfigMap")}
    for container in pod.containers:
        known = {one["name"] for one in container.get("env", [])}
        known |= BY_LEADERWORKERSET if pod.owner["kind"] == "LeaderWorkerSet" else set()
        for source in container.get("envFrom", []):
            name = source["configMapRef"]["name"]
            if name not in data:
                yield f"no ConfigMap {name}"
            known |= set(data.get(name, {}))
        used = set(re.findall(r"\$\((\w+)\)", " ".join([*container.get("command", []), *container.get("args", [])])))
        if used - known:
            yield f"{container['name']}: not set: {sorted(used - known)}"
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        key_file = next((one["value"] for one in container.get("env", []) if one["name"] == "RLJAX_API_KEY_FILE"), None)
        if key_file is not None and (key_file != "/run/rljax/key" or "/run/rljax" not in paths):
            yield f"{container['name']}: no key at {key_file}"


def _ports(pod: Pod) -> Iterator[str]:
    for container in pod.containers:
        named = {port.get("name") for port in container.get("ports", [])}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            if isinstance(port, str) and port not in named:
                yield f"{probe}: no port {port}"
        serves = is_served(container)
        numbers = [str(port["containerPort"]) for port in container.get("ports", [])]
        if serves and [f"--port={number}" for number in numbers] != [
            w for w in container["args"] if w.startswith("--port=")
        ]:
            yield f"the server's port is not among {numbers}"


def allowed(objects: list[Object], account: str) -> set[tuple[str, str, str]]:
    """Returns (API group, resource, verb) of everything that the Roles of a ServiceAccount allow."""
    roles = {one["metadata"]["name"]: one["rules"] for one in of_kind(objects, "Role")}
    bound = [
        one["roleRef"]["name"]
        for one in of_kind(objects, "RoleBinding")
        if any(who["kind"] == "ServiceAccount" and who["name"] == account for who in one["subjects"])
    ]
    return {
        (group, resource, verb)
        for name in bound
        for rule in roles.get(name, [])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def _access(objects: list[Object]) -> Iterator[str]:
    there = {kind: _names(objects, kind) for kind in ("Role", "ServiceAccount")}
    for one in of_kind(objects, "RoleBinding"):
        if one["roleRef"]["name"] not in there["Role"]:
            yield f"{name_of(one)}: no Role {one['roleRef']['name']}"
        for who in one["subjects"]:
            if who["name"] not in there["ServiceAccount"] or who.get("namespace") != _namespace(one):
                yield f"{name_of(one)}: no ServiceAccount {who['name']} in {who.get('namespace')}"
    for pod in pods(objects):
        account = pod.spec.get("serviceAccountName")
        if account is not None and account not in there["ServiceAccount"]:
            yield f"{pod.where}: no ServiceAccount {account}"


def _selectors(objects: list[Object]) -> Iterator[str]:
    templates = list(pods(objects))
    for one in of_kind(objects, "Deployment"):
        taken = [pod.where for pod in templates if matches(one["spec"]["selector"], pod.labels)]
        if taken != [name_of(one)]:
            yield f"{name_of(one)}: its selector takes the pods of {taken}"
    for one in of_kind(objects, "Service"):
        chosen = [pod for pod in templates if matches(one["spec"]["selector"], pod.labels)]
        if [pod.where for pod in chosen] != [pod.where for pod in templates if _answers(pod)]:
            yield f"{name_of(one)}: its selector takes the pods of {[pod.where for pod in chosen]}"
        if one["spec"].get("clusterIP") != "None":
            yield f"{name_of(one)}: not headless"
        ports = [port for pod in chosen for each in pod.containers for port in each.get("ports", [])]
        if one["spec"].get("publishNotReadyAddresses"):
            yield f"{name_of(one)}: has servers that are not ready"
        if one["metadata"]["name"] in _names(objects, "LeaderWorkerSet"):
            yield f"{name_of(one)}: a LeaderWorkerSet makes a Service of this name itself"
        for port in one["spec"]["ports"]:  # a headless Service does not translate ports
            if {"name": port["targetPort"], "containerPort": port["port"]} not in ports:
                yield f"{name_of(one)}: no port {port['targetPort']} of the number {port['port']}"
    for one in of_kind(objects, "NetworkPolicy"):
        sources = [peer["podSelector"] for rule in one["spec"]["ingress"] for peer in rule["from"]]
        for selector in [one["spec"]["podSelector"], *sources]:
            if not any(matches(selector, pod.labels) for pod in templates):
                yield f"{name_of(one)}: {selector} takes no pod"


def _jobset(objects: list[Object]) -> Iterator[str]:
    """Yields a line for each thing that would break JAX's detection, and for each exit with the wrong action."""
    for jobset in of_kind(objects, "JobSet"):
        network = jobset["spec"].get("network", {})
        if network.get("subdomain", jobset["metadata"]["name"]) != jobset["metadata"]["name"]:
            yield "JAX takes the JobSet's name for the subdomain"
        if not network.get("enableDNSHostnames", True):
            yield "without names the coordinator is not found"
        (replicated,) = jobset["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        if (
            replicated["replicas"] != 1
            or job["completionMode"] != "Indexed"
            or job["completions"] != job["parallelism"]
        ):
            yield "one Indexed Job, with as many completions as pods at a time"
        wanted = (
            {"done": None} | dict.fromkeys((2, 3), "FailJobSet") | dict.fromkeys((1, 75, 134, 137), "RestartJobSet")
        )
        wanted |= dict.fromkeys((143, "DisruptionTarget"), "RestartJobSetAndIgnoreMaxRestarts")
        for end, action in wanted.items():
            if (got := action_after(jobset, end)) != action:
                yield f"after {end} comes {got}, not {action}"
        if jobset["spec"]["failurePolicy"]["maxRestarts"] <= 0:
            yield "a run that fails is never started again"


def action_after(jobset: Object, end: int | str) -> str | None:
    """Returns the action of JobSet after a pod ended, or None if the pod succeeded.

    Kubernetes' Job controller looks at its own rules first, and uses ``backoffLimit`` if none matches. The text of its
    message is the one in pkg/controller/job/pod_failure_policy.go. JobSet uses its first rule that matches the reason
    and the message.

    Args:
      jobset: The JobSet.
      end: The exit status of the pod, the name of a condition, or "done" for status 0.
    """
    if end == "done":
        return None
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = "rljax/rljax-trainers-0-1-abcde"
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        if end in rule.get("onExitCodes", {}).get("values", []):
            what = f"Container trainer for pod {pod} failed with exit code {end}"
        elif end in [condition["type"] for condition in rule.get("onPodConditions", [])]:
            what = f"Pod {pod} has condition {end}"
        else:
            continue
        assert rule["action"] == "FailJob", "what becomes of a pod that is replaced alone is not known here"
        reason, message = "PodFailurePolicy", f"{what} matching FailJob rule at index {index}"
        break
    else:
        assert job["backoffLimit"] == 0, "a pod that is replaced alone joins processes that are ending"
    policy = jobset["spec"]["failurePolicy"]
    for rule in policy["rules"]:
        reasons, patterns = rule.get("onJobFailureReasons", []), rule.get("onJobFailureMessagePatterns", [])
        if (not reasons or reason in reasons) and (not patterns or any(re.search(p, message) for p in patterns)):
            return str(rule["action"])
    return "RestartJobSet"


def is_served(container: Object) -> bool:
    """Whether a container runs ``rljax serve``."""
    return container.get("command", [])[1:4] == ["-m", "rljax.cli", "serve"]


def _answers(pod: Pod) -> bool:
    """Whether a pod is a server that answers requests; the further hosts of a server do not."""
    return any(is_served(container) for container in pod.containers)


def server_names(objects: list[Object]) -> set[str]:
    """Returns the names under which the servers are found, in the form of ``rollout.discovery``."""
    ports = {
        port["containerPort"]
        for pod in pods(objects)
        if _answers(pod)
        for container in pod.containers
        for port in container.get("ports", [])
    }
    services = [one["metadata"]["name"] for one in of_kind(objects, "Service")]
    return {f"dns://{name}:{port}" for name in services for port in ports}


def _servers(objects: list[Object]) -> Iterator[str]:
    config = run_config(objects)
    discovery = config["rollout"]["discovery"]
    if server_names(objects) != {discovery}:
        yield f"rollout.discovery is {discovery}, the servers' names are {sorted(server_names(objects))}"
    (settings,) = (one["data"] for one in of_kind(objects, "ConfigMap") if "TENSOR_PARALLEL" in one["data"])
    for pod in pods(objects):
        if pod.owner["kind"] == "JobSet":
            if pod.spec["terminationGracePeriodSeconds"] <= config["run"]["grace_s"]:
                yield f"{pod.where}: the grace is not longer than run.grace_s"
            continue
        if pod.spec["terminationGracePeriodSeconds"] <= SERVER_STOP_S:
            yield f"{pod.where}: killed before vLLM is ended"
        group = pod.owner["spec"].get("leaderWorkerTemplate", {"size": 1})["size"]
        (container,) = pod.spec["containers"]
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * group
        needed = group > 1 or not pod.where.endswith("/worker")  # a group of one has no workers
        if needed and gpus != int(settings["TENSOR_PARALLEL"]):
            yield f"{pod.where}: {gpus} GPUs a server, TENSOR_PARALLEL is {settings['TENSOR_PARALLEL']}"


def _directories(objects: list[Object]) -> Iterator[str]:
    """Yields a line for each path that is not on the shared volume although it outlasts a pod or two pods use it."""
    config = run_config(objects)
    (settings,) = (one["data"] for one in of_kind(objects, "ConfigMap") if "MODEL" in one["data"])
    if settings["MODEL"] != config["model"]["path"]:
        yield f"servers serve {settings['MODEL']}, model.path is {config['model']['path']}"
    named = [config["run"]["dir"], config["model"]["path"], config["data"]["path"], config["rollout"]["transfer_dir"]]
    named += config["eval"]["datasets"]
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    if claim["spec"]["accessModes"] != ["ReadWriteMany"]:
        yield "the volume of all pods is ReadWriteMany"
    for pod in pods(objects):
        (volume,) = (one["name"] for one in pod.spec["volumes"] if "persistentVolumeClaim" in one)
        mounts = [one["mountPath"] for one in pod.spec["containers"][0]["volumeMounts"] if one["name"] == volume]
        needed = (
            named if pod.owner["kind"] == "JobSet" else [config["model"]["path"], config["rollout"]["transfer_dir"]]
        )
        for path in needed:
            if not any(PurePosixPath(path).is_relative_to(mount) for mount in mounts):
                yield f"{pod.where}: {path} is not on the shared volume"
