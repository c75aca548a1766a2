#!/usr/bin/env bash
# A task of the servers' step of launch/slurm.sbatch: one server on its share of the node's GPUs.
#
#   bash launch/slurm_server.sh ENGINE DIR GPUS ADDRESSES MODEL [options of launch/ENGINE_server.sh]
#
# ENGINE is vllm or sglang, or image-vllm inside a container that has the engine and rljax. DIR receives TASK.log and,
# once the server answers, TASK.url. ADDRESSES: of the step's nodes, with commas between them.
set -euo pipefail

engine="$1" dir="$2" gpus="$3"
IFS=, read -ra addresses <<<"$4"
shift 4
if [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
  CUDA_VISIBLE_DEVICES="$(IFS=, && echo "${visible[*]:SLURM_LOCALID*gpus:gpus}")"
  export CUDA_VISIBLE_DEVICES
fi
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/machine.sh"
serve=(bash "$here/${engine}_server.sh") python="${RLJAX_VLLM_VENV:-$here/../.venv-vllm}/bin/python"
[[ "$engine" != image-* ]] || serve=(python3 -m rljax.cli serve "${engine#image-}") python=python3
# The installation ran on a login node, so this node's driver and compiler are looked at here.
if [[ "$engine" == *vllm ]] && has_gpu; then
  check_driver && check_compiler "$python" || exit 2
fi
# Servers that compile into one home on NFS at the same time meet locks and stale files, so each has a place of its own.
caches="${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/rljax-$SLURM_JOB_ID-$SLURM_PROCID"
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$caches/vllm}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$caches/triton}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$caches/inductor}"
export FLASHINFER_WORKSPACE_BASE="${FLASHINFER_WORKSPACE_BASE:-$caches}"
exec "${serve[@]}" --host "${addresses[SLURM_NODEID]}" \
  --log "$dir/$SLURM_PROCID.log" --url-file "$dir/$SLURM_PROCID.url" "$@" >/dev/null
