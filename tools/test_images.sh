#!/usr/bin/env bash
# Does what the Dockerfiles of launch/kubernetes do, without a container daemon: runs each RUN in a new environment, then
# the imports and the commands of the pods. Some minutes and 1.5 GB, which are freed at the end.
#
#   bash tools/test_images.sh [trainer] [server] [--gpu]     --gpu: CUDA's wheels too, which are larger
#
# vllm/vllm-openai is the CPU build of launch/install_vllm.sh (.venv-vllm or $RLJAX_VLLM_VENV), which stays as it is. Its
# Python is another than that of the image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/python.sh

python="$(find_python 11)"
exec "$python" tools/check_images.py "$@"
