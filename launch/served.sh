# Sourced by the scripts that start a run's servers: the checks before them, the key that servers ask for, and the
# options that the configuration asks of each of them.

# make_key FILE: writes a random key into FILE, for its owner alone, unless it is there.
make_key() {
  [[ ! -e "$1" ]] || return 0
  (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$1.$$" && mv -n "$1.$$" "$1") 2>/dev/null || true
  rm -f "$1.$$"
  [[ -s "$1" ]]
}

# The keys whose values read_served reads, one a line, from `rljax config --show`.
served_keys=precision.lm_head_dtype,rollout.reported,rollout.server_form.weights,rollout.server_form.kv_cache,rollout.batch_invariant

# read_served: sets server_options, for launch/ENGINE_server.sh, and server_args, for the engine itself. It needs
# tensor_parallel.
read_served() {
  local head reported weights cache batch_invariant
  read -r head && read -r reported && read -r weights && read -r cache && read -r batch_invariant || return
  server_options=()
  [[ "$head" != float32 ]] || server_options+=(--head-dtype float32)
  # The sampled token comes with the likeliest ones.
  ((reported < 20)) || server_options+=(--max-logprobs "$((reported + 1))")
  [[ "$batch_invariant" != True ]] || server_options+=(--batch-invariant)
  server_args=()
  [[ "$weights" == none ]] || server_args+=(--quantization "$weights")
  [[ "$cache" == auto ]] || server_args+=(--kv-cache-dtype "$cache")
  ((tensor_parallel == 1)) || server_args+=(--tensor-parallel-size "$tensor_parallel")
}

# check_run WORDS...: whether a run that these words of rljax.train configure may start, and there is room for the
# versions of its weights. It needs RLJAX_BIN.
check_run() {
  JAX_PLATFORMS=cpu "$RLJAX_BIN/python" - "$@" <<'PYTHON'
import sys

from rljax.errors import caller_errors, run_cli
from rljax.policy.hub import policy_shape
from rljax.rollout.build import check_engine, version_bytes
from rljax.run.config import Config
from rljax.run.config_file import load_config
from rljax.run.directory import check_new
from rljax.weights.store import check_weight_room


def main(words):
    config = load_config(Config, words, prog="single_node", description="")
    with caller_errors(RuntimeError):
        check_engine(config.rollout)
        check_new(config)
        size = version_bytes(policy_shape(config.model.path), config.rollout.dtype)
        check_weight_room(config.rollout.transfer_dir, config.publish.versions * size)
    return 0


sys.exit(run_cli(main))
PYTHON
}
