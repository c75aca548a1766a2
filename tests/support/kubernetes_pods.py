"""Runs the processes of an Indexed Job as its pods would: JAX finds its cluster by asking an API server.

``in_pods`` is for tests. Run as a program, inside namespaces of its own (network, mounts), this file is the node.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_api_server import FakeApiServer

TOKEN = "the-service-accounts-token"
# A tmpfs on /var/run, where JAX and the kubernetes package look for the service account; names as the cluster's DNS.
IN_NAMESPACES = """set -e
ip link set lo up
mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs none /var/run
mkdir -p /var/run/secrets/kubernetes.io
cp -r "$1/serviceaccount" /var/run/secrets/kubernetes.io/
exec "$2" "$3" "$1"
"""


def in_pods(work: Path, words: list[str], job: Any, jobset: str, namespace: str, allowed: list[list[str]]) -> Any:
    """What became of a JobSet's only Job, with the pods that the controllers make of it.

    Args:
      work: an empty directory, and that which the processes start in.
      words: what each process runs with this interpreter.
      job: specification of the Job.
      jobset: name of the JobSet; the Job is called JOBSET-trainers-0.
      namespace: of all objects.
      allowed: [API group, resource, verb] of all that the pods' service account may do.

    Returns:
      ``asked``: [API group, resource, verb] of each request. ``processes``: [exit status, what it printed, its errors]
      of each process.
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
    """What JobSet's and Kubernetes' controllers make: the Job, its pods, the headless Service."""
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
