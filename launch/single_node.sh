#!/usr/bin/env bash
# One machine: starts servers, waits for their health, trains with rollouts from them, and ends every process it started.
#
#   bash launch/single_node.sh CONFIG.yaml [options] [-- options of rljax.train]
#   bash launch/single_node.sh configs/paper/qwen3_4b_length_triggered.yaml --trainer-gpus 0-3 --server-gpus 4-7
#   bash launch/single_node.sh configs/quickstart.yaml -- --run.dir runs/on-cpu --run.steps 3
#
# Options:
#   --trainer-gpus LIST           GPUs that train, as 0-3 or 0,1,2 (default: all that are visible)
#   --server-gpus LIST            GPUs that serve; one server per GPU, or per --tensor-parallel GPUs
#   --tensor-parallel N           GPUs of one server (default 1)
#   --gpu-memory-utilization F    share of each serving GPU's memory that vLLM takes. Give it when trainer and server
#                                 share GPUs, as in --trainer-gpus 0 --server-gpus 0 --gpu-memory-utilization 0.4
#   --max-model-len N             longest prompt plus response (default: what the configuration asks for, at least
#                                 512: the verification's probes want a few hundred tokens)
#   --server-wait S               longest time until all servers answer, in seconds (default 1800)
#   --engine vllm|sglang          kind of the servers (default vllm; sglang: on a CPU, or one GPU a server)
#   --dry-run                     print what would be started, and what the run would take
#   --help                        this text
#
# Without GPU options one server starts where vLLM puts it: on a machine without GPUs, on the CPU. The model, the dtypes
# and the lengths are those of the configuration. So is the key that the servers ask for (rollout.api_key_file, or
# RLJAX_API_KEY_FILE); where none is named it is RUN-servers/api_key, made once. The same command goes on with a run that
# was stopped (run.resume auto).
# Ctrl-C or SIGTERM lets the trainer finish its step, or give it up where run.grace_s is too short, and save; a second
# one ends it at once. When the last server has
# ended, the trainer saves its last finished step and this script ends with status 1. Servers write their logs beside the
# run, in RUN-servers. The trainer's environment is made on the first start, with CUDA where nvidia-smi finds a GPU
# (.venv-gpu, else .venv); the servers' comes from launch/install_vllm.sh. RLJAX_VENV and RLJAX_VLLM_VENV name others,
# which are used as they are.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() {
  echo "single_node: $*" >&2
  exit 2
}

# expand 0-3,6: the same as 0,1,2,3,6
expand() {
  local part out=() parts
  IFS=, read -ra parts <<<"$1"
  for part in "${parts[@]}"; do
    if [[ "$part" =~ ^([0-9]+)-([0-9]+)$ ]] && ((BASH_REMATCH[1] <= BASH_REMATCH[2])); then
      mapfile -t -O "${#out[@]}" out < <(seq "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}")
    elif [[ "$part" =~ ^[0-9]+$ ]]; then
      out+=("$part")
    else
      die "$2: expected GPUs such as 0-3 or 0,1,2, got '$1'"
    fi
  done
  ((${#out[@]})) || die "$2: expected GPUs such as 0-3 or 0,1,2, got nothing"
  (
    IFS=,
    echo "${out[*]}"
  )
}

engine=vllm config="" trainer_gpus="" server_gpus="" tensor_parallel=1 memory="" max_len="" server_wait=1800 dry_run=false
while (($#)); do
  case "$1" in
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --dry-run)
      dry_run=true
      shift
      ;;
    --)
      shift
      break
      ;;
    --trainer-gpus | --server-gpus | --tensor-parallel | --gpu-memory-utilization | --max-model-len | --server-wait | --engine)
      (($# > 1)) || die "$1: expected a value"
      case "$1" in
        --trainer-gpus) trainer_gpus="$(expand "$2" "$1")" ;;
        --server-gpus) server_gpus="$(expand "$2" "$1")" ;;
        --tensor-parallel) tensor_parallel="$2" ;;
        --gpu-memory-utilization) memory="$2" ;;
        --max-model-len) max_len="$2" ;;
        --server-wait) server_wait="$2" ;;
        --engine) engine="$2" ;;
      esac
      shift 2
      ;;
    -*) die "unknown option $1 (see --help; options of rljax.train come after --)" ;;
    *)
      [[ -z "$config" ]] || die "unexpected argument $1 after the configuration $config"
      config="$1"
      shift
      ;;
  esac
done
[[ -n "$config" ]] || die "name a configuration (see --help)"
[[ "$engine" == vllm || "$engine" == sglang ]] || die "--engine: expected vllm or sglang, got '$engine'"
[[ "$tensor_parallel" =~ ^[1-9][0-9]*$ ]] || die "--tensor-parallel: expected a number of GPUs, got '$tensor_parallel'"
[[ "$server_wait" =~ ^[1-9][0-9]*$ ]] || die "--server-wait: expected seconds, got '$server_wait'"
[[ -z "$memory" || "$memory" =~ ^0?\.[0-9]+$ ]] || die "--gpu-memory-utilization: expected a share such as 0.4, got '$memory'"

# A server for each group of GPUs: groups=(0,1 2,3).
groups=("")
if [[ -n "$server_gpus" ]]; then
  IFS=, read -ra gpus <<<"$server_gpus"
  ((${#gpus[@]} % tensor_parallel == 0)) ||
    die "--server-gpus: ${#gpus[@]} GPUs do not divide into servers of --tensor-parallel $tensor_parallel"
  groups=()
  for ((i = 0; i < ${#gpus[@]}; i += tensor_parallel)); do
    groups+=("$(IFS=, && echo "${gpus[*]:i:tensor_parallel}")")
  done
fi
if [[ -n "$server_gpus" && -z "$memory" ]]; then
  trains="$trainer_gpus"
  if [[ -z "$trains" && "${JAX_PLATFORMS:-}" != cpu* ]]; then
    trains="${CUDA_VISIBLE_DEVICES-all}"
    [[ "$trains" != all ]] || die "--server-gpus: give --trainer-gpus, too, or the trainer takes these GPUs as well"
  fi
  for gpu in "${gpus[@]}"; do
    [[ ",$trains," != *",$gpu,"* ]] || die "GPU $gpu is to train and to serve: give other --trainer-gpus, or --gpu-memory-utilization"
  done
fi

source "$here/launch/environment.sh"
source "$here/launch/served.sh"
[[ "$engine" != vllm ]] || check_driver "$($dry_run && echo warning)" || exit 2
prepare_trainer_environment
python="$RLJAX_BIN/python"
# One process trains here, also in a step of Slurm or of Open MPI, of which JAX would take one GPU.
given=("$config" --run.processes 1 "$@" --rollout.engine "$engine")
pending=("${given[@]}" --rollout.urls http://127.0.0.1:0) # the servers are not known yet, and their engine wants a URL
keys=model.path,rollout.dtype,run.dir,max_engine_tokens,rollout.api_key_file,rollout.colocated,$served_keys
settings="$("$python" -m rljax.cli config --show "$keys" "${pending[@]}")" || exit 2
{
  read -r model && read -r dtype && read -r run_dir && read -r longest && read -r key_file && read -r colocated &&
    read_served
} <<<"$settings"
((longest >= 512)) || longest=512
logs="${run_dir%/}-servers"
own_key_file="$logs/api_key"
[[ "$key_file" != None ]] || key_file="${RLJAX_API_KEY_FILE:-$own_key_file}"

server_command=(bash "$here/launch/${engine}_server.sh" "$model" --dtype "$dtype" --max-model-len "${max_len:-$longest}" --timeout "$server_wait" --follow-parent "${server_options[@]}")
server_command+=(--api-key-file "$key_file")
memory_option=--gpu-memory-utilization
[[ "$engine" == vllm ]] || memory_option=--mem-fraction-static
[[ -z "$memory" ]] || server_args+=("$memory_option" "$memory")
# vLLM for a CPU refuses the option; there a server sleeps without giving memory back.
[[ "$colocated" != True || -z "$server_gpus" ]] || server_args+=(--enable-sleep-mode)
trainer_env=()
[[ -z "$trainer_gpus" ]] || trainer_env+=("CUDA_VISIBLE_DEVICES=$trainer_gpus")
# Beside a server that has its share, JAX must not take three quarters of the GPU at once, and where they take turns it
# must give back what it does not use.
[[ -z "$memory" ]] || trainer_env+=("XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false}")
# GPUs that only train give JAX more than its usual three quarters.
[[ -n "$memory" || -z "$trainer_gpus" || -n "${XLA_PYTHON_CLIENT_MEM_FRACTION:-}" ]] ||
  trainer_env+=("XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.92}")
[[ "$colocated" != True ]] || trainer_env+=("XLA_PYTHON_CLIENT_ALLOCATOR=${XLA_PYTHON_CLIENT_ALLOCATOR:-platform}")
trainer_env+=("RLJAX_API_KEY_FILE=$key_file")

# server_environment GPUS: sets server_env, what `env` is given before a server's command.
server_environment() {
  server_env=()
  [[ -z "$1" ]] || server_env+=("CUDA_VISIBLE_DEVICES=$1")
}

# shown WORDS...: as one could type them
shown() {
  local text
  printf -v text '%q ' "$@"
  echo "${text//\\,/,}"
}

if $dry_run; then
  urls=()
  for i in "${!groups[@]}"; do
    server_environment "${groups[i]}"
    echo "server $i: $(shown "${server_env[@]}" "${server_command[@]}" --log "$logs/$i.log" ${server_args[@]+-- "${server_args[@]}"})"
    urls+=("<server $i>")
  done
  echo "trainer:  $(shown "${trainer_env[@]}" "$python" -m rljax.train "${given[@]}")--rollout.urls ${urls[*]}"
  echo
  exec "$python" -m rljax.train "${pending[@]}" --dry-run
fi

# --- processes --------------------------------------------------------------------------------------------------------

work="$(mktemp -d)"
servers=() trainer="" asked=false
SECONDS=0
# Should this script be killed outright, the kernel ends the trainer; the servers notice by themselves.
tied=()
if setpriv --pdeathsig KILL true 2>/dev/null; then tied=(setpriv --pdeathsig KILL); fi

running() { kill -0 "$1" 2>/dev/null; }

# Each server's guard ends the whole of its process group, so it is enough to end what was started here, and wait.
# shellcheck disable=SC2329 # the trap calls it
cleanup() {
  local pid
  trap '' INT TERM HUP
  if [[ -n "$trainer" ]] && running "$trainer"; then kill -KILL "$trainer" 2>/dev/null || true; fi
  for pid in $(jobs -p); do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in $(jobs -p); do wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap cleanup EXIT

# The trainer has a process group of its own, so that a Ctrl-C of the terminal reaches it once, through here.
# shellcheck disable=SC2329 # the traps call it
forward() {
  if [[ -z "$trainer" ]]; then
    echo "single_node: interrupted" >&2
    exit $((128 + $1))
  fi
  asked=true
  kill -"$1" "$trainer" 2>/dev/null || true
}
trap 'forward 2' INT
trap 'forward 15' TERM HUP

[[ -z "${RLJAX_RUN_COPY:-}" ]] || bash "$here/launch/copy_run.sh" load "$RLJAX_RUN_COPY" "$run_dir" || exit 2
# Servers take minutes to load, so the settings and the room for weights are checked before.
check_run "${pending[@]}" || exit 2

mkdir -p "$logs"
[[ "$key_file" != "$own_key_file" ]] || make_key "$key_file" || die "$key_file cannot be written"
for i in "${!groups[@]}"; do
  server_environment "${groups[i]}"
  rm -f "$logs/$i.log" # of an earlier start
  env "${server_env[@]}" "${server_command[@]}" --log "$logs/$i.log" --url-file "$work/$i.url" \
    ${server_args[@]+-- "${server_args[@]}"} >/dev/null &
  servers+=($!)
done
# last_line FILE: its last line that says something, shortened
last_line() { tail -n 50 "$1" 2>/dev/null | tr '\r' '\n' | grep -v '^[[:space:]]*$' | tail -n 1 | cut -c 1-160 || true; }

echo "== waiting for ${#servers[@]} $engine server(s) in $dtype, at most $server_wait s, logs in $logs"
urls=() next=15
for i in "${!servers[@]}"; do
  while [[ ! -s "$work/$i.url" ]]; do
    if ! running "${servers[i]}"; then
      [[ -s "$logs/$i.log" ]] || die "server $i did not start; its reason is above"
      said="$(last_line "$logs/$i.log")"
      die "server $i did not start${said:+: $said}; see $logs/$i.log"
    fi
    if ((SECONDS >= next)); then
      echo "  $SECONDS s, server $i: $(last_line "$logs/$i.log")"
      next=$((SECONDS + 15))
    fi
    sleep 0.5
  done
  urls+=("$(<"$work/$i.url")")
done

echo "== training with rollouts from ${urls[*]}"
set -m
env "${trainer_env[@]}" "${tied[@]}" "$python" -m rljax.train "${given[@]}" --rollout.urls "${urls[@]}" &
trainer=$!
set +m
# The run goes on while one server is left. Without any, the trainer is asked to save and stop, once.
left=("${servers[@]}")
while running "$trainer" && ((${#left[@]})); do
  wait -n "$trainer" "${left[@]}" || true # a signal that is forwarded ends it, too
  for i in "${!left[@]}"; do
    if running "$trainer" && ! running "${left[i]}"; then
      unset "left[i]"
      echo "single_node: server $i ended, ${#left[@]} of ${#servers[@]} left; the whole log is $logs/$i.log" >&2
    fi
  done
done
lost=false
if running "$trainer" && ! $asked; then
  lost=true
  echo "single_node: no server is left; stopping the training" >&2
  kill -TERM "$trainer" 2>/dev/null || true
fi
while
  status=0
  wait "$trainer" || status=$?
  running "$trainer"
do :; done
if $lost && ((status)); then status=1; fi
trainer=""
exit "$status"
