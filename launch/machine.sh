# Sourced by the launch scripts: what this machine has. Each check says in one line what is missing and what to do.

# has_gpu: whether nvidia-smi finds an NVIDIA GPU here.
has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

# The torch of vLLM 0.32 is built with CUDA 13, which needs this NVIDIA driver or a newer one.
vllm_driver=580

# check_driver [warning]: whether the NVIDIA driver is new enough for vLLM, or the user has another build of vLLM or
# CUDA's compatibility libraries; true where nvidia-smi cannot tell. With the word warning an old driver is only told.
check_driver() {
  local found
  found="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)"
  [[ "$found" =~ ^([0-9]+)\. ]] || return 0
  ((BASH_REMATCH[1] >= vllm_driver)) && return
  [[ "${VLLM_ENABLE_CUDA_COMPATIBILITY:-0}" == 0 && -z "${RLJAX_VLLM_SPEC:-}${RLJAX_VLLM_VENV:-}" ]] || return 0
  echo "${1:-error}: the NVIDIA driver is $found, but vLLM (CUDA 13) needs $vllm_driver or newer. Update the driver. Where you cannot: on data-centre GPUs install cuda-compat-13-0 and set VLLM_ENABLE_CUDA_COMPATIBILITY=1; or name a vLLM for CUDA 12 in RLJAX_VLLM_SPEC, or its environment in RLJAX_VLLM_VENV; or train with --rollout.engine jax, which needs no vLLM" >&2
  [[ "${1:-}" == warning ]]
}

# check_compiler PYTHON: whether Triton can compile inside vLLM's workers, with a C compiler and PYTHON's Python.h.
check_compiler() {
  local header missing="" version
  version="$("$1" -c 'import sysconfig; print(sysconfig.get_python_version())')"
  header="$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
  if [[ -n "${CC:-}" ]]; then
    command -v "$CC" >/dev/null 2>&1 || missing="the C compiler of CC=$CC"
  elif ! command -v gcc >/dev/null 2>&1 && ! command -v clang >/dev/null 2>&1; then
    missing="a C compiler"
  fi
  [[ -e "$header" ]] || missing="${missing:+$missing and }$header"
  [[ -n "$missing" ]] || return 0
  echo "error: $missing is not here, but Triton needs it in vLLM's workers: install gcc and python$version-dev (Debian, Ubuntu) or gcc and python$version-devel (Red Hat)" >&2
  return 1
}
