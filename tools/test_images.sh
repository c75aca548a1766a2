#!/usr/bin/env bash
# Does what the Dockerfiles of launch/kubernetes do, without a container daemon: runs each RUN in a new environment, then
# the imports and the commands of the pods. Some minutes and 1.5 GB, which are freed at the end.
#
#   bash tools/test_images.sh [trainer] [server] [--resolve] [--gpu]
#
#   --resolve   asks pip which packages the builds for GPUs take (trainer's CUDA, vLLM's), and downloads no package
#   --gpu       installs the trainer's CUDA packages (3 GB to download, 8 GB of disk), and loads their libraries
#
# Nothing runs on a GPU. vLLM's build for GPUs is resolved, and not installed.
# vllm/vllm-openai is the CPU build of launch/install_vllm.sh (.venv-vllm or $RLJAX_VLLM_VENV), which stays as it is. Its
# Python is another than that of the image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/python.sh

python="$(find_python 11)"
exec "$python" tools/check_images.py "$@"
