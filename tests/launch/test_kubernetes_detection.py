"""JAX finds its processes by what the manifests create: the Job, its pods, and the rights of their account."""

import json

import pytest

pytest.importorskip("kubernetes", reason="bash tools/test_kubernetes.sh makes its environment")

from kubernetes_manifests import ROOT, job_templates, rendered, trainer
from kubernetes_pods import in_pods
from kubernetes_references import allowed

pytestmark = pytest.mark.launch_files
FORMED = "import jax; jax.distributed.initialize()"
OVERLAY = ROOT / "launch/kubernetes/overlays/qwen3-8b"
NEEDED = {("", "pods", "list"), ("batch", "jobs", "get")}


@pytest.fixture(scope="module")
def manifests():
    """Returns (Job, JobSet's name, namespace, what the trainers' account may do) of two trainer hosts."""
    objects = rendered(OVERLAY)
    ((jobset, replicated),) = job_templates(objects)
    job, metadata = replicated["template"]["spec"], jobset["metadata"]
    assert (job["parallelism"], replicated["name"]) == (2, "trainers")
    may = allowed(objects, trainer(objects).spec["serviceAccountName"])
    return job, metadata["name"], metadata["namespace"], sorted(map(list, may))


def test_a_run_trains_in_two_pods(manifests, tmp_path):
    """The trainers' own command runs; nothing under ``run`` says how many processes there are."""
    words = [str(ROOT / "configs/quickstart.yaml"), "--run.dir", "run", "--run.steps", "2", "--eval.every", "0"]
    words += ["--model.path", str(ROOT / "configs/toy-base"), "--data.batch-size", "4"]
    words += ["--rollout.max-response-tokens", "8"]
    command = trainer(rendered(OVERLAY)).spec["containers"][0]["command"]
    assert command == ["python3", "-m", "rljax.train", "/etc/rljax/config.yaml"]
    found = in_pods(tmp_path, [*command[1:3], *words], *manifests)
    assert [status for status, _, _ in found["processes"]] == [0, 0], found["processes"]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert [path.name for path in (tmp_path / "run/logs").iterdir()] == ["process_1.log"]
    assert {tuple(one) for one in found["asked"]} == {tuple(one) for one in manifests[3]} == NEEDED


@pytest.mark.parametrize("missing", [*sorted(NEEDED), "index"], ids=str)
def test_without_a_permission_or_an_index_there_is_no_cluster(manifests, tmp_path, missing):
    job, jobset, namespace, may = manifests
    said = "Kubernetes API Error: 403"
    if missing == "index":
        job, said = {**job, "completionMode": "NonIndexed"}, "jobs must be indexed"
    may = [one for one in may if tuple(one) != missing]
    found = in_pods(tmp_path, ["-c", FORMED], job, jobset, namespace, may)["processes"]
    assert [(status > 0, said in errors) for status, _, errors in found] == [(True, True)] * 2, found
