#!/usr/bin/env bash
# Installs the compilers of `python -m rljax.train CONFIG --dry-run --compile MACHINE` for CUDA and for TPU, with rljax
# beside them, into a virtual environment of its own. No GPU or TPU is needed, nor any of NVIDIA's libraries but cuDNN.
#
#   bash launch/install_compilers.sh [VENV_DIR]     default: $RLJAX_COMPILE_VENV, else .venv-compile in this checkout
#
# About 3.5 GB and two minutes. A finished environment is used again as it is. Environment variables:
#   PYTHON            interpreter to build from (default: the first Python 3.12 or 3.13 that launch/python.sh finds)
#   RLJAX_SKIP_CUDNN  1 leaves out cuDNN (1.1 GB), which attention through it needs to be compiled
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$repo/launch/python.sh"
venv="${1:-${RLJAX_COMPILE_VENV:-$repo/.venv-compile}}"
wanted="jax[tpu]>=0.12,<0.13"
cudnn="nvidia-cudnn-cu12>=9.8,<10"
[[ "${RLJAX_SKIP_CUDNN:-0}" != 1 ]] || cudnn=""
mkdir -p "$venv"
venv="$(cd "$venv" && pwd)"
log="$venv/install.log"
marker="$venv/.rljax-compilers"
stamp="$wanted $cudnn $(cksum < "$repo/pyproject.toml" | cut -d ' ' -f 1)"

say() { echo "install_compilers: $*" >&2; }
die() { say "$*"; exit 1; }

install() {
  say "installing $*"
  "$venv/bin/python" -m pip install --progress-bar off "$@" >>"$log" 2>&1 || {
    tail -n 15 "$log" >&2
    die "pip failed; the whole log is $log"
  }
}

if [[ "$(cat "$marker" 2>/dev/null || true)" == "$stamp" ]]; then
  say "ready: $venv"
  exit
fi
if [[ ! -x "$venv/bin/python" ]]; then
  python="$(find_python 12 "${PYTHON:-}")" || die "no Python 3.12 or 3.13 found: $python_remedy, and name it with PYTHON=/path/to/python"
  say "new environment $venv ($("$python" --version 2>&1))"
  make_environment "$python" "$venv" || exit 1
fi
rm -f "$marker"
: >"$log"
install --upgrade pip
install "$wanted" -e "$repo[train]"
# The plug-in is of jaxlib's version. What it depends on runs programs; compiling takes none of it.
version="$("$venv/bin/python" -c 'import jaxlib; print(jaxlib.__version__)')"
install --no-deps "jax-cuda12-plugin==$version" "jax-cuda12-pjrt==$version" ${cudnn:+"$cudnn"}
echo "$stamp" >"$marker"
say "ready: $venv"
