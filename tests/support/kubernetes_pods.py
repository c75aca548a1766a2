"""Runs the processes of an Indexed Job as its pods would; JAX finds the cluster by asking an API server.

Tests call ``in_pods``. It starts this file as a program, which plays the node inside its own namespaces (network,
mounts). The API server knows a few objects and allows what a Role's rules allow.
"""

import json
import os
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

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


def in_pods(work, words, job, jobset, namespace, allowed):
    """Runs a JobSet's only Job in the directory ``work`` with the pods that the controllers would create.

    Each process starts this interpreter with ``words``. Their account permits ``allowed``, [API group, resource, verb].
    Returns what was ``asked``, in the same form, and [exit status, output, errors] of the ``processes``.
    """
    name = f"{jobset}-trainers-0"
    hosts = [f"{name}-{index}" for index in range(job["parallelism"])]
    names = [f"127.0.0.{index + 1} {host}.{jobset} {host}" for index, host in enumerate(hosts)]
    (work / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    account = work / "serviceaccount"
    account.mkdir()
    certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=api"]
    certificate += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", work / "key.pem", "-out", account / "ca.crt"]
    subprocess.run(certificate, check=True, capture_output=True, timeout=60)
    (work / "server.pem").write_text((work / "key.pem").read_text() + (account / "ca.crt").read_text())
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text(namespace)
    made = {"words": words, "name": name, "hosts": hosts, "job": job, "jobset": jobset, "allowed": allowed}
    (work / "made.json").write_text(json.dumps(made | {"namespace": namespace}))
    unshare = ["unshare", "--mount", "--net", *([] if os.getuid() == 0 else ["--map-root-user"])]
    command = [*unshare, "bash", "-c", IN_NAMESPACES, "node", work, sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def created(made):
    """Returns what the controllers of JobSet and Kubernetes would create: the Job, its pods, the headless Service."""
    labels, name, namespace = {"jobset.sigs.k8s.io/jobset-name": made["jobset"]}, made["name"], made["namespace"]
    job = {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "spec": made["job"]}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": "1", "controller": True}
    facts = {"namespace": namespace, "ownerReferences": [owner]}
    facts["labels"] = {"job-name": name, "batch.kubernetes.io/job-name": name, **labels}
    pods = [
        {
            "metadata": {"name": f"{host}-abcde", **facts},
            "spec": {**made["job"]["template"]["spec"], "hostname": host, "subdomain": made["jobset"]},
            "status": {"podIP": f"127.0.0.{index + 1}"},
        }
        for index, host in enumerate(made["hosts"])
    ]
    service = {"metadata": {"name": made["jobset"]}, "spec": {"clusterIP": "None", "selector": labels}}
    return {("batch", "jobs"): [job], ("", "pods"): pods, ("", "services"): [service]}


def answer(target, authorization, objects, allowed, asked):
    """Returns (status, body) for a path with its query, such as /apis/batch/v1/namespaces/NAMESPACE/jobs/NAME."""
    if (authorization or "").lower() != f"bearer {TOKEN}":
        return 401, {"reason": "Unauthorized"}
    words = urlsplit(target).path.strip("/").split("/")
    group, (resource, *name) = ("", words[4:]) if words[0] == "api" else (words[1], words[5:])
    asked.add(access := (group, resource, "get" if name else "list"))
    if [*access] not in allowed:
        return 403, {"reason": "Forbidden"}
    found = objects.get((group, resource), [])
    for selector in parse_qs(urlsplit(target).query).get("fieldSelector", []):
        path, _, wanted = selector.partition("=")
        section, key = path.split(".")
        found = [one for one in found if one[section][key] == wanted]
    if not name:
        return 200, {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": found}
    named = [one for one in found if one["metadata"]["name"] == name[0]]
    return (200, named[0]) if named else (404, {"reason": "NotFound"})


def api_server(certificate, *rules):
    """Returns an HTTPS server on a free port; ``rules`` are the further arguments of ``answer``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answer(self.path, self.headers["Authorization"], *rules)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    http.socket = context.wrap_socket(http.socket, server_side=True)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    return http


def main(work):
    made, asked, processes = json.loads((work / "made.json").read_text()), set(), []
    port = api_server(work / "server.pem", created(made), made["allowed"], asked).server_address[1]
    kept = {key: value for key, value in os.environ.items() if key.startswith(("JAX_", "XLA_", "PYTHONPATH", "PATH"))}
    kept |= {"HOME": str(work), "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    for index, host in enumerate(made["hosts"]):
        env = kept | {"HOSTNAME": host}
        if made["job"].get("completionMode") == "Indexed":
            env["JOB_COMPLETION_INDEX"] = str(index)
        named = 'hostname "$HOSTNAME" && exec "$0" "$@"'
        command, pipe = ["unshare", "--uts", "sh", "-c", named, sys.executable, *made["words"]], subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, cwd=work))
    try:
        ended = [(*one.communicate(timeout=400), one.returncode) for one in processes]
    finally:
        for one in processes:
            one.kill()
    print(json.dumps({"asked": sorted(asked), "processes": [[status, out, err] for out, err, status in ended]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
