"""The objects of launch/kubernetes as ``kubectl apply`` receives them, and the pods that they describe."""

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.parent for path in (ROOT / "launch/kubernetes/overlays").glob("*/kustomization.yaml"))

Object = dict[str, Any]


class Pod(NamedTuple):
    """A pod template: its place, the object that creates it, its labels and its specification."""

    where: str
    owner: Object
    labels: dict[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def renderer() -> list[str] | None:
    """Returns the command that renders a kustomization, or None if neither program is installed."""
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


@functools.cache
def _text(overlay: Path) -> str:
    command = renderer()
    assert command is not None, "kubectl or kustomize must be on the PATH"
    done = subprocess.run([*command, str(overlay)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(overlay: Path) -> list[Object]:
    """Returns the objects of an overlay. Each call returns new ones, which a test may change."""
    return list(yaml.safe_load_all(_text(overlay)))


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def name_of(one: Object) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def job_templates(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Yields each JobSet with each of its ``replicatedJobs``."""
    for jobset in of_kind(objects, "JobSet"):
        for replicated in jobset["spec"]["replicatedJobs"]:
            yield jobset, replicated


def pods(objects: list[Object]) -> Iterator[Pod]:
    """Yields the pod templates of Deployments, JobSets and LeaderWorkerSets."""
    for one in of_kind(objects, "Deployment"):
        yield _pod(name_of(one), one, one["spec"]["template"])
    for jobset, replicated in job_templates(objects):
        template = replicated["template"]["spec"]["template"]
        yield _pod(f"{name_of(jobset)}/{replicated['name']}", jobset, template)
    for one in of_kind(objects, "LeaderWorkerSet"):
        both = one["spec"]["leaderWorkerTemplate"]
        yield _pod(f"{name_of(one)}/leader", one, both["leaderTemplate"])
        yield _pod(f"{name_of(one)}/worker", one, both["workerTemplate"])


def _pod(where: str, owner: Object, template: Object) -> Pod:
    return Pod(where, owner, template.get("metadata", {}).get("labels", {}), template["spec"])


def trainer(objects: list[Object]) -> Pod:
    (found,) = (pod for pod in pods(objects) if pod.owner["kind"] == "JobSet")
    return found


def run_config(objects: list[Object]) -> Object:
    """Returns the run's configuration in its ConfigMap, as it is written. The base that it names is not read."""
    (found,) = (one for one in of_kind(objects, "ConfigMap") if "config.yaml" in one["data"])
    return yaml.safe_load(found["data"]["config.yaml"])
