#!/usr/bin/env bash
# Installs vLLM into a virtual environment of its own, with rljax's plugin beside it.
#
#   bash launch/install_vllm.sh [--gpu | --cpu | --tpu] [VENV_DIR]
#
# VENV_DIR is by default $RLJAX_VLLM_VENV, else .venv-vllm in this checkout. --gpu installs the official build, which
# needs an NVIDIA driver R580 or newer, a C compiler and Python.h. --cpu installs the CPU build (about 2.5 GB and two
# minutes). --tpu installs vllm-tpu (up to 10 GB and five minutes), which has wheels for Python 3.12 alone: uv fetches
# one where the machine lacks it. Without any, nvidia-smi decides: give --gpu on a login node whose jobs run on GPUs. A
# finished environment is used again as it is. Environment variables:
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
    --gpu | --cpu | --tpu) kind="${1#--}" ;;
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

# python_312: prints an interpreter of Python 3.12. uv fetches one where none is, and pip fetches uv.
python_312() {
  local candidate candidates=("${PYTHON:-python3.12}")
  [[ -n "${PYTHON:-}" ]] || candidates+=("$(pyenv root 2>/dev/null || true)"/versions/3.12*/bin/python3.12)
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  [[ -z "${PYTHON:-}" ]] || die "vllm-tpu needs Python 3.12, and PYTHON=$PYTHON is not: leave it out, or name one"
  PATH="$PATH:$venv/uv/bin"
  command -v uv >/dev/null || { python3 -m venv "$venv/uv" && "$venv/uv/bin/pip" install uv; } >>"$log" 2>&1 || true
  { uv python install 3.12 >>"$log" 2>&1 && uv python find --managed-python 3.12; } 2>>"$log" ||
    die "vllm-tpu needs Python 3.12, and uv could not fetch it (see $log): install it, and name it with PYTHON"
}

case "$kind" in
  gpu) check_driver || exit 1; spec="vllm>=0.32,<0.33" ;;
  *) spec="vllm-$kind>=0.32,<0.33" ;;
esac
spec="${RLJAX_VLLM_SPEC:-$spec}"

# Two builds of vLLM have the same files.
held="$(cat "$marker" 2>/dev/null || true)"
if [[ "$held" == vllm* && "${held%%[^a-z-]*}" != "${spec%%[^a-z-]*}" && "$held $spec" == *vllm-* ]]; then
  die "$venv holds $held: remove it, or name another directory"
fi

if [[ ! -x "$venv/bin/python" ]]; then
  if [[ "$kind" == tpu ]]; then python="$(python_312)"; else python="$(server_python)"; fi
  say "new environment $venv ($("$python" --version 2>&1))"
  make_environment "$python" "$venv" || exit 1
fi

[[ "$kind" != gpu ]] || check_compiler "$venv/bin/python" || exit 1

if [[ "$held" == "$spec" ]]; then
  say "$spec is already in $venv"
else
  rm -f "$marker"
  : >"$log"
  waited "upgrading pip" "$venv/bin/python" -m pip install --upgrade pip || say "going on with the old pip"
  if [[ "$kind" == tpu ]]; then
    waited "installing torch for the CPU" "$venv/bin/python" -m pip install torchvision==0.25.0+cpu torch==2.10.0+cpu ||
      say "the index has no torch for the CPU: the build for GPUs comes, which takes 5 GB more"
  fi
  waited "installing $spec (one to five minutes)" "$venv/bin/python" -m pip install "$spec" || explain_and_die
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
