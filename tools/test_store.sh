#!/usr/bin/env bash
# Whole runs whose checkpoints, and versions of weights that, are kept in a real S3 server on this machine (marker
# store), by one process and by several. About eight minutes.
#
#   bash tools/test_store.sh [pytest arguments]
#
# The server is moto's. The environment, with the extra store, is made once, in $RLJAX_STORE_VENV (default .venv-store);
# where `aws` is not on the PATH, another one beside it holds it.
# RLJAX_PYTHON: the interpreter to make it with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

venv="${RLJAX_STORE_VENV:-.venv-store}"
own_environment "$venv" -e '.[train]' 'pytest>=8.4,<9' 'pytest-timeout>=2.3,<3' \
  'fsspec>=2025.3' 's3fs>=2025.3' 'moto[s3]>=5.1,<6' 'flask>=3,<4' 'flask-cors>=5,<7'
if ! command -v aws >/dev/null; then
  own_environment "$venv-aws" 'awscli>=1.40,<2'
  PATH="$PATH:$(cd "$venv-aws/bin" && pwd)"
fi
PYTHONPATH=. exec "$venv/bin/python" -m pytest -p no:cacheprovider -m store --durations=5 \
  tests/run/test_after_save_s3.py tests/weights/test_weights_s3.py tests/processes/test_store_parts.py "$@"
