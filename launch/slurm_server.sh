#!/usr/bin/env bash
# A task of the servers' step of launch/slurm.sbatch: one vLLM server on its share of the node's GPUs.
#
#   bash launch/slurm_server.sh DIR GPUS ADDRESSES MODEL [options of launch/vllm_server.sh]
#
# DIR receives TASK.log and, once the server answers, TASK.url. ADDRESSES: of the step's nodes, with commas between them.
set -euo pipefail

dir="$1" gpus="$2"
IFS=, read -ra addresses <<<"$3"
shift 3
if [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
  CUDA_VISIBLE_DEVICES="$(IFS=, && echo "${visible[*]:SLURM_LOCALID*gpus:gpus}")"
  export CUDA_VISIBLE_DEVICES
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/vllm_server.sh" --host "${addresses[SLURM_NODEID]}" \
  --log "$dir/$SLURM_PROCID.log" --url-file "$dir/$SLURM_PROCID.url" "$@" >/dev/null
