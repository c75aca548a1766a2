#!/usr/bin/env bash
# A task of the servers' step of launch/slurm.sbatch: one server on its share of the node's GPUs.
#
#   bash launch/slurm_server.sh ENGINE DIR GPUS ADDRESSES MODEL [options of launch/ENGINE_server.sh]
#
# ENGINE is vllm or sglang. DIR receives TASK.log and, once the server answers, TASK.url. ADDRESSES: of the step's nodes,
# with commas between them.
set -euo pipefail

engine="$1" dir="$2" gpus="$3"
IFS=, read -ra addresses <<<"$4"
shift 4
if [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
  CUDA_VISIBLE_DEVICES="$(IFS=, && echo "${visible[*]:SLURM_LOCALID*gpus:gpus}")"
  export CUDA_VISIBLE_DEVICES
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/${engine}_server.sh" --host "${addresses[SLURM_NODEID]}" \
  --log "$dir/$SLURM_PROCID.log" --url-file "$dir/$SLURM_PROCID.url" "$@" >/dev/null
