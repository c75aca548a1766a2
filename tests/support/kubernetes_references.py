"""Checks that the objects agree with each other and with the run's configuration."""

import re
from pathlib import PurePosixPath

import yaml
from kubernetes_manifests import ROOT, name_of, of_kind, pods

SERVER_STOP_S = 45  # the longest time that rljax.rollout.servers.process takes to end vLLM (seconds)
BY_LEADERWORKERSET = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}
# What JobSet must do after a pod ended with a status, or with a condition.
ACTIONS = {
    **dict.fromkeys((2, 3), "FailJobSet"),
    **dict.fromkeys((1, 75, 134, 137), "RestartJobSet"),
    **dict.fromkeys((143, "DisruptionTarget"), "RestartJobSetAndIgnoreMaxRestarts"),
}


def reference_problems(objects):
    """Returns a line for each reference to something that does not exist, and for each disagreement of two places."""
    elsewhere = [one for one in objects if one["metadata"].get("namespace") != "rljax"]
    found = [f"{name_of(one)}: not in the namespace rljax" for one in elsewhere]
    found += [f"{pod.where}: {line}" for pod in pods(objects) for line in _pod(pod, objects)]
    for check in (_access, _selectors, _jobset, _run):
        found += check(objects)
    return found


def _names(objects, kind):
    return {one["metadata"]["name"] for one in of_kind(objects, kind)}


def matches(selector, labels):
    """Whether a selector matches these labels: a label selector with ``matchLabels`` alone, or a Service's selector."""
    assert "matchExpressions" not in selector
    wanted = selector.get("matchLabels", selector)
    return bool(wanted) and all(labels.get(key) == value for key, value in wanted.items())


def _pod(pod, objects):
    """Yields what is wrong with a pod's volumes, and with its containers' mounts, variables and ports."""
    run_sh = (ROOT / "launch/kubernetes/run.sh").read_text(encoding="utf-8")
    (secret,), (key,) = set(re.findall(r"\bsecret=(\S+)", run_sh)), set(re.findall(r"--from-file=(\w+)=", run_sh))
    data = {one["metadata"]["name"]: one["data"] for one in of_kind(objects, "ConfigMap")}
    there = {("configMap", "name"): {*data}, ("secret", "secretName"): {secret}}
    there["persistentVolumeClaim", "claimName"] = _names(objects, "PersistentVolumeClaim")
    volumes, mounted = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}, set()
    for volume in volumes.values():
        for (source, key_of_name), names in there.items():
            if volume.get(source, {}).get(key_of_name, "") not in {"", *names}:
                yield f"no {source} {volume[source][key_of_name]}"
    for container in pod.containers:
        name, mounts, ports = container["name"], container.get("volumeMounts", []), container.get("ports", [])
        mounted |= {mount["name"] for mount in mounts}
        paths = {mount["mountPath"] for mount in mounts}
        if len(paths) != len(mounts):
            yield f"{name}: two volumes at one path"
        if name == "key" and container["command"][-2:] != [f"/run/secret/{key}", "/run/rljax/key"]:
            yield "the key is not where run.sh and RLJAX_API_KEY_FILE have it"
        own = {one["name"]: one.get("value") for one in container.get("env", [])}
        if own.get("RLJAX_API_KEY_FILE", "/run/rljax/key") != "/run/rljax/key":
            yield f"{name}: no key at {own['RLJAX_API_KEY_FILE']}"
        if "RLJAX_API_KEY_FILE" in own and "/run/rljax" not in paths:
            yield f"{name}: no key in the container"
        sources = [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
        yield from (f"no ConfigMap {source}" for source in sources if source not in data)
        known = {*own}.union(*(data.get(source, {}) for source in sources))
        known |= BY_LEADERWORKERSET if pod.owner["kind"] == "LeaderWorkerSet" else set()
        args = container.get("args", [])
        used = set(re.findall(r"\$\((\w+)\)", " ".join([*container.get("command", []), *args])))
        if used - known:
            yield f"{name}: not set: {sorted(used - known)}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            if isinstance(port, str) and port not in {one.get("name") for one in ports}:
                yield f"{probe}: no port {port}"
        words = [f"--port={port['containerPort']}" for port in ports]
        if is_served(container) and words != [word for word in args if word.startswith("--port=")]:
            yield f"the server's port is not in {words}"
    if mounted != set(volumes):
        yield f"volumes {sorted(volumes)}, mounted {sorted(mounted)}"


def allowed(objects, account):
    """Returns (API group, resource, verb) of everything that the Roles of a ServiceAccount allow."""
    who = {"kind": "ServiceAccount", "name": account}
    bound = [one for one in of_kind(objects, "RoleBinding") if any(who.items() <= s.items() for s in one["subjects"])]
    names = {one["roleRef"]["name"] for one in bound}
    rules = [rule for one in of_kind(objects, "Role") if one["metadata"]["name"] in names for rule in one["rules"]]
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def _access(objects):
    roles, accounts = _names(objects, "Role"), _names(objects, "ServiceAccount")
    for one in of_kind(objects, "RoleBinding"):
        if one["roleRef"]["name"] not in roles:
            yield f"{name_of(one)}: no Role {one['roleRef']['name']}"
        for who in one["subjects"]:
            if who["name"] not in accounts or who.get("namespace") != one["metadata"]["namespace"]:
                yield f"{name_of(one)}: no ServiceAccount {who['name']} in {who.get('namespace')}"
    for pod in pods(objects):
        account = pod.spec.get("serviceAccountName")
        if account is not None and account not in accounts:
            yield f"{pod.where}: no ServiceAccount {account}"


def _selectors(objects):
    templates = list(pods(objects))
    for one in of_kind(objects, "Deployment"):
        taken = [pod.where for pod in templates if matches(one["spec"]["selector"], pod.labels)]
        if taken != [name_of(one)]:
            yield f"{name_of(one)}: its selector takes the pods of {taken}"
    for one in of_kind(objects, "Service"):
        where, spec = name_of(one), one["spec"]
        chosen = [pod for pod in templates if matches(spec["selector"], pod.labels)]
        if [pod.where for pod in chosen] != [pod.where for pod in templates if _answers(pod)]:
            yield f"{where}: its selector takes the pods of {[pod.where for pod in chosen]}"
        if spec.get("clusterIP") != "None":
            yield f"{where}: not headless"
        if spec.get("publishNotReadyAddresses"):
            yield f"{where}: has servers that are not ready"
        if one["metadata"]["name"] in _names(objects, "LeaderWorkerSet"):
            yield f"{where}: a LeaderWorkerSet makes a Service of this name itself"
        ports = [port for pod in chosen for each in pod.containers for port in each.get("ports", [])]
        for port in spec["ports"]:  # a headless Service does not translate ports
            if {"name": port["targetPort"], "containerPort": port["port"]} not in ports:
                yield f"{where}: no port {port['targetPort']} of the number {port['port']}"
    for one in of_kind(objects, "NetworkPolicy"):
        sources = [peer["podSelector"] for rule in one["spec"]["ingress"] for peer in rule["from"]]
        for selector in [one["spec"]["podSelector"], *sources]:
            if not any(matches(selector, pod.labels) for pod in templates):
                yield f"{name_of(one)}: {selector} takes no pod"


def _jobset(objects):
    """Yields a line for each thing that would break JAX's detection, and for each exit with the wrong action."""
    for jobset in of_kind(objects, "JobSet"):
        network, name = jobset["spec"].get("network", {}), jobset["metadata"]["name"]
        if network.get("subdomain", name) != name:
            yield "JAX takes the JobSet's name for the subdomain"
        if not network.get("enableDNSHostnames", True):
            yield "without names the coordinator is not found"
        (replicated,) = jobset["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        if (replicated["replicas"], job["completionMode"], job["completions"]) != (1, "Indexed", job["parallelism"]):
            yield "one Indexed Job, with as many completions as pods at a time"
        for end, action in ACTIONS.items():
            if (got := action_after(jobset, end)) != action:
                yield f"after {end} comes {got}, not {action}"
        if jobset["spec"]["failurePolicy"]["maxRestarts"] <= 0:
            yield "a run that fails is never started again"


def action_after(jobset, end):
    """Returns the action of JobSet after a pod ended with this exit status or condition.

    Kubernetes' Job controller looks at its own rules first, and uses ``backoffLimit`` if none matches. The text of its
    message is the one in pkg/controller/job/pod_failure_policy.go. JobSet uses its first rule that matches the reason
    and the message.
    """
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
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        reasons, patterns = rule.get("onJobFailureReasons", []), rule.get("onJobFailureMessagePatterns", [])
        if (not reasons or reason in reasons) and (not patterns or any(re.search(p, message) for p in patterns)):
            return str(rule["action"])
    return "RestartJobSet"


def is_served(container):
    return container.get("command", [])[1:4] == ["-m", "rljax.cli", "serve"]


def _answers(pod):
    """Whether a pod is a server that answers requests; the further hosts of a server do not."""
    return any(is_served(container) for container in pod.containers)


def _run(objects):
    """Yields where the pods and the run's configuration disagree: on servers, times, GPUs, and the shared volume.

    A path is on this volume if it outlasts a pod or two pods use it.
    """
    (settings,) = (one["data"] for one in of_kind(objects, "ConfigMap") if "TENSOR_PARALLEL" in one["data"])
    (text,) = (one["data"]["config.yaml"] for one in of_kind(objects, "ConfigMap") if "config.yaml" in one["data"])
    config, gpus_a_server = yaml.safe_load(text), int(settings["TENSOR_PARALLEL"])  # the base that it names is not read
    containers = [container for pod in pods(objects) if _answers(pod) for container in pod.containers]
    ports = {port["containerPort"] for container in containers for port in container.get("ports", [])}
    names = {f"dns://{name}:{port}" for name in _names(objects, "Service") for port in ports}
    if names != {config["rollout"]["discovery"]}:
        yield f"rollout.discovery is {config['rollout']['discovery']}, the servers' names are {sorted(names)}"
    both = [config["model"]["path"], config["rollout"]["transfer_dir"]]
    named = [config["run"]["dir"], *both, config["data"]["path"], *config["eval"]["datasets"]]
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    if claim["spec"]["accessModes"] != ["ReadWriteMany"]:
        yield "the volume of all pods is ReadWriteMany"
    for pod in pods(objects):
        trains, grace_s = pod.owner["kind"] == "JobSet", pod.spec["terminationGracePeriodSeconds"]
        if grace_s <= (config["run"]["grace_s"] if trains else SERVER_STOP_S):
            yield f"{pod.where}: killed before it has ended by itself"
        group = pod.owner["spec"].get("leaderWorkerTemplate", {"size": 1})["size"]
        (container,) = pod.spec["containers"]
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * group
        needed = not trains and (group > 1 or not pod.where.endswith("/worker"))  # a group of one has no workers
        if needed and gpus != gpus_a_server:
            yield f"{pod.where}: {gpus} GPUs a server, TENSOR_PARALLEL is {gpus_a_server}"
        (volume,) = (one["name"] for one in pod.spec["volumes"] if "persistentVolumeClaim" in one)
        mounts = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == volume]
        for path in named if trains else both:
            if not any(PurePosixPath(path).is_relative_to(mount) for mount in mounts):
                yield f"{pod.where}: {path} is not on the shared volume"
