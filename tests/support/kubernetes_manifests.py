"""The objects of launch/kubernetes as ``kubectl apply`` receives them, and the pods that they describe."""

import functools
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.parent for path in (ROOT / "launch/kubernetes/overlays").glob("*/kustomization.yaml"))


class Pod(NamedTuple):
    """A pod template: its place, the object that creates it, its labels and its specification."""

    where: str
    owner: dict
    labels: dict
    spec: dict

    @property
    def containers(self):
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def renderer():
    """Returns the command that renders a kustomization, or None if neither program is installed."""
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


@functools.cache
def _text(overlay):
    done = subprocess.run([*renderer(), str(overlay)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(overlay):
    """Returns the objects of an overlay. Each call returns new ones, which a test may change."""
    return list(yaml.safe_load_all(_text(overlay)))


def of_kind(objects, kind):
    return [one for one in objects if one["kind"] == kind]


def name_of(one):
    return f"{one['kind']}/{one['metadata']['name']}"


def job_templates(objects):
    for jobset in of_kind(objects, "JobSet"):
        for replicated in jobset["spec"]["replicatedJobs"]:
            yield jobset, replicated


def pods(objects):
    """Yields the pod templates of Deployments, JobSets and LeaderWorkerSets."""
    found = [(name_of(one), one, one["spec"]["template"]) for one in of_kind(objects, "Deployment")]
    for jobset, replicated in job_templates(objects):
        found.append((f"{name_of(jobset)}/{replicated['name']}", jobset, replicated["template"]["spec"]["template"]))
    for one in of_kind(objects, "LeaderWorkerSet"):
        both = one["spec"]["leaderWorkerTemplate"]
        found += [(f"{name_of(one)}/{role}", one, both[f"{role}Template"]) for role in ("leader", "worker")]
    for where, owner, template in found:
        yield Pod(where, owner, template.get("metadata", {}).get("labels", {}), template["spec"])


def trainer(objects):
    (found,) = (pod for pod in pods(objects) if pod.owner["kind"] == "JobSet")
    return found
