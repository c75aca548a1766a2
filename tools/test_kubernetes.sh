#!/usr/bin/env bash
# Checks the manifests of launch/kubernetes, and JAX's detection of a cluster in them (marker launch_files).
#
#   bash tools/test_kubernetes.sh [pytest options, such as -k cluster]
#
# Needs kubectl or kustomize on the PATH, openssl, and (as root or not) Linux namespaces; no cluster. The environment is made once, in $RLJAX_KUBERNETES_VENV (default
# .venv-kubernetes). RLJAX_PYTHON: the interpreter to make it with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

if ! command -v kubectl >/dev/null 2>&1 && ! command -v kustomize >/dev/null 2>&1; then
  echo "test_kubernetes: neither kubectl nor kustomize is on the PATH; one of them renders the manifests" >&2
  exit 2
fi
venv="${RLJAX_KUBERNETES_VENV:-.venv-kubernetes}"
own_environment "$venv" 'kubernetes-validate>=1.37,<2' 'jsonschema>=4.20,<5' -e '.[train]' 'jax[k8s]' \
  'pytest>=8.4,<9' 'pytest-timeout>=2.3,<3'
PYTHONPATH=. exec "$venv/bin/python" -m pytest -p no:cacheprovider -m launch_files --durations=5 \
  tests/launch/test_kubernetes.py tests/launch/test_kubernetes_detection.py "$@"
