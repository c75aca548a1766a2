"""Runs the processes of an Indexed Job as its pods would; JAX finds the cluster by asking an API server.

Tests call ``in_pods``. It starts this file as a program, which plays the node inside its own namespaces (network,
mounts).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_api_server import FakeApiServer

TOKEN = "the-service-accounts-token"
# The script mounts a tmpfs on /var/run, where JAX and the kubernetes package look for the service account. It also
# mounts /etc/hosts with the names that the cluster's DNS would know.
IN_NAMESPACES = """set -e
ip link set lo up
mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs none /var/run
mkdir -p /var/run/secrets/kubernetes.io
cp -r "$1/serviceaccount" /var/run/secrets/kubernetes.io/
exec "$2" "$3" "$1"
"""


def in_pods(work: Path, words: list[str], job: Any, jobset: str, namespace: str, allowed: list[list[str]]) -> Any:
    """Runs a JobSet's only Job with the pods that the controllers would create, and returns what happened.

    Args:
      work: An empty directory, in which the processes start.
      words: The arguments with which each process starts this interpreter.
      job: The specification of the Job.
      jobset: The name of the JobSet. The Job is called JOBSET-trainers-0.
      namespace: The namespace of all objects.
      allowed: The list of [API group, resource, verb] that the pods' service account permits.

    Returns:
      A dictionary. ``asked`` has [API group, resource, verb] of each request. ``processes`` has [exit status, output,
      errors] of each process.
    """
    name = f"{jobset}-trainers-0"
    hosts = [f"{name}-{index}" for index in range(job["parallelism"])]
    names = [f"127.0.0.{index + 1} {host}.{jobset} {host}" for index, host in enumerate(hosts)]
    (work / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    account = work / "serviceaccount"
    account.mkdir()
    certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=api"]
    certificate += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(work / "key.pem")]
    subprocess.run([*certificate, "-out", str(account / "ca.crt")], check=True, capture_output=True, timeout=60)
    (work / "server.pem").write_text((work / "key.pem").read_text() + (account / "ca.crt").read_text())
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text(namespace)
    made = {
        "words": words,
        "name": name,
        "hosts": hosts,
        "job": job,
        "jobset": jobset,
        "namespace": namespace,
        "allowed": allowed,
    }
    (work / "made.json").write_text(json.dumps(made))
    unshare = ["unshare", "--mount", "--net", *([] if os.getuid() == 0 else ["--map-root-user"])]
    done = subprocess.run(
        [*unshare, "bash", "-c", IN_NAMESPACES, "node", str(work), sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _objects(made: Any) -> dict[tuple[str, str], list[Any]]:
    """Returns what the controllers of JobSet and Kubernetes would create: the Job, its pods, the headless Service."""
    labels = {"jobset.sigs.k8s.io/jobset-name": made["jobset"]}
    job = {"metadata": {"name": made["name"], "namespace": made["namespace"], "labels": labels}, "spec": made["job"]}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": made["name"], "uid": "1", "controller": True}
    pods = [
        {
            "metadata": {
                "name": f"{host}-abcde",
                "namespace": made["namespace"],
                "labels": {"job-name": made["name"], "batch.kubernetes.io/job-name": made["name"], **labels},
                "ownerReferences": [owner],
            },
            "spec": {**made["job"]["template"]["spec"], "hostname": host, "subdomain": made["jobset"]},
            "status": {"podIP": f"127.0.0.{index + 1}"},
        }
        for index, host in enumerate(made["hosts"])
    ]
    service = {"metadata": {"name": made["jobset"]}, "spec": {"clusterIP": "None", "selector": labels}}
    return {("batch", "jobs"): [job], ("", "pods"): pods, ("", "services"): [service]}


def _node(work: Path) -> Any:
    made = json.loads((work / "made.json").read_text())
    server = FakeApiServer(_objects(made), made["allowed"], TOKEN, work / "server.pem")
    processes = []
    for index, host in enumerate(made["hosts"]):
        env = {
            key: value for key, value in os.environ.items() if key.startswith(("JAX_", "XLA_", "PYTHONPATH", "PATH"))
        }
        env |= {"HOME": str(work), "HOSTNAME": host}
        env |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        if made["job"].get("completionMode") == "Indexed":
            env["JOB_COMPLETION_INDEX"] = str(index)
        named = 'hostname "$HOSTNAME" && exec "$0" "$@"'
        command = ["unshare", "--uts", "sh", "-c", named, sys.executable, *made["words"]]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, cwd=work))
    try:
        ended = [(*one.communicate(timeout=400), one.returncode) for one in processes]
    finally:
        for one in processes:
            one.kill()
    server.stop()
    return {"asked": sorted(server.asked), "processes": [[status, out, err] for out, err, status in ended]}


if __name__ == "__main__":
    print(json.dumps(_node(Path(sys.argv[1]))))
