#!/usr/bin/env bash
# Trains on TPU slices of any number of hosts and serves on TPUs, by the same commands on each host through gcloud, or
# through XPK on GKE.
#
#   bash launch/tpu.sh install trainer|server --tpu NAME --zone ZONE [--nfs HOST:/SHARE] [--api-key-file FILE]
#   bash launch/tpu.sh train CONFIG --tpu NAME --zone ZONE [-- options of rljax.train]
#   bash launch/tpu.sh serve MODEL  --tpu NAME --zone ZONE [-- options of rljax serve vllm]
#   bash launch/tpu.sh logs|stop    --tpu NAME --zone ZONE
#   bash launch/tpu.sh xpk CONFIG      --cluster NAME --tpu-type TYPE --image IMAGE [-- options of rljax.train]
#   bash launch/tpu.sh xpk-serve MODEL --cluster NAME --tpu-type TYPE --image IMAGE [-- options of rljax serve vllm]
#
#   --project NAME     gcloud's project, where it is not the default one
#   --nfs HOST:/SHARE  what all hosts mount at /shared: run directory and weights
#   --api-key-file F   the key that the servers ask for (docs/vllm.md), copied to each host for its owner alone
#   --dry-run          prints each command and runs none
#
# On each host the program is a systemd unit, rljax-train or rljax-server: it goes on after the connection is closed and
# after a reboot, is started again unless the exit status says that it would be of no use (2: configuration, 3: a guard's
# rule), and is sent SIGTERM when the host goes down, for maintenance or because a Spot VM is taken, upon which the run
# saves. `stop` asks the same. JAX finds the slice's hosts by itself.
#
# A server is vllm-tpu on a TPU VM of one host (vllm-project/tpu-inference#3573), in an environment with Python 3.12. The
# trainer's has Python 3.11. `install` takes the last commit of this checkout. docs/tpu.md says what was tried.
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() {
  echo "tpu: $*" >&2
  exit 2
}

action="" what="" tpu="" zone="" project="" nfs="" key="" cluster="" tpu_type="" image="" dry_run=false
while (($#)); do
  case "$1" in
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --dry-run) dry_run=true ;;
    --)
      shift
      break
      ;;
    --tpu | --zone | --project | --nfs | --api-key-file | --cluster | --tpu-type | --image)
      (($# > 1)) || die "$1: expected a value"
      case "$1" in
        --tpu) tpu="$2" ;;
        --zone) zone="$2" ;;
        --project) project="$2" ;;
        --nfs) nfs="$2" ;;
        --api-key-file) key="$2" ;;
        --cluster) cluster="$2" ;;
        --tpu-type) tpu_type="$2" ;;
        --image) image="$2" ;;
      esac
      shift
      ;;
    -*) die "unknown option $1 (see --help)" ;;
    *)
      if [[ -z "$action" ]]; then
        action="$1"
      elif [[ -z "$what" ]]; then
        what="$1"
      else
        die "unexpected argument $1"
      fi
      ;;
  esac
  shift
done
# These words pass through two shells and a unit file.
for word in "$what" "$nfs" "$@"; do
  [[ "$word" =~ ^[]A-Za-z0-9_./:=,@+[-]*$ ]] || die "'$word': write what is not plain into the configuration"
done

case "$action" in
  install) [[ "$what" == trainer || "$what" == server ]] || die "install: expected trainer or server, got '$what'" ;;
  train | xpk) [[ -n "$what" ]] || die "$action: name a configuration" ;;
  serve | xpk-serve) [[ -n "$what" ]] || die "$action: name a model" ;;
  logs | stop) [[ -z "$what" ]] || die "unexpected argument $what" ;;
  *) die "expected install, train, serve, logs, stop, xpk or xpk-serve, got '$action' (see --help)" ;;
esac
if [[ "$action" == xpk* ]]; then
  [[ -n "$cluster" && -n "$tpu_type" && -n "$image" ]] || die "$action: give --cluster, --tpu-type and --image"
else
  [[ -n "$tpu" && -n "$zone" ]] || die "$action: give --tpu and --zone"
fi

# run WORDS...: does it, or with --dry-run shows it
run() {
  if $dry_run; then
    echo "${*@Q}"
  else
    "$@"
  fi
}

place=(--zone="$zone")
[[ -z "$project" ]] || place+=(--project="$project")

# everywhere COMMAND: on each host of the slice, at once; its $HOME and $USER are the host's
everywhere() { run gcloud compute tpus tpu-vm ssh "$tpu" "${place[@]}" --worker=all --command="$1"; }
copied() { run gcloud compute tpus tpu-vm scp "$1" "$tpu:$2" "${place[@]}" --worker=all; }

# unit NAME COMMAND: a systemd unit on each host, started now and at each boot
unit() {
  local text="[Unit]\nDescription=$1\nAfter=network-online.target remote-fs.target\nWants=network-online.target"
  text+="\nStartLimitIntervalSec=1d\nStartLimitBurst=20\n"
  text+="\n[Service]\nUser=\$USER\nWorkingDirectory=\$HOME/rljax\nExecStart=\$HOME/rljax/$2"
  text+="\nEnvironment=PYTHONUNBUFFERED=1 JAX_COMPILATION_CACHE_DIR=\$HOME/rljax/.cache/jax \$(test ! -e \$HOME/.rljax.key || echo RLJAX_API_KEY_FILE=\$HOME/.rljax.key)"
  # The others of a run end within 30 s; none is back before they have.
  text+="\nRestart=on-failure\nRestartSec=60\nRestartPreventExitStatus=2 3\nKillMode=mixed\nTimeoutStopSec=120\n"
  text+="\n[Install]\nWantedBy=multi-user.target\n"
  everywhere "printf \"$text\" | sudo tee /etc/systemd/system/$1.service && sudo systemctl daemon-reload && sudo systemctl enable $1 && sudo systemctl restart $1"
}

install_here() {
  local archive
  if $dry_run; then archive=rljax.tar.gz; else archive="$(mktemp --suffix=.tar.gz)"; fi
  run git -C "$repo" archive --format=tar.gz --output="$archive" HEAD
  copied "$archive" rljax.tar.gz
  $dry_run || rm -f "$archive"
  everywhere "mkdir -p rljax && tar -xzf rljax.tar.gz -C rljax"
  everywhere "sudo apt-get update -q && sudo apt-get install -qy python3-venv python3.11-venv nfs-common"
  if [[ "$what" == server ]]; then
    everywhere "cd rljax && bash launch/install_vllm.sh --tpu"
  else
    everywhere "cd rljax && python3.11 -m venv .venv && .venv/bin/pip install -q -e '.[train]' 'jax[tpu]>=0.10,<0.13'"
  fi
  if [[ -n "$nfs" ]]; then
    everywhere "sudo mkdir -p /shared && (grep -q ' /shared ' /etc/fstab || echo $nfs /shared nfs defaults,_netdev 0 0 | sudo tee -a /etc/fstab) && sudo mount -a"
  fi
  if [[ -n "$key" ]]; then
    everywhere "install -m 600 /dev/null .rljax.key"
    copied "$key" .rljax.key
  fi
}

serving=".venv-vllm/bin/python -m rljax.cli serve vllm $what --port=8000 --timeout=3600"

# workload NAME COMMAND: a JobSet of XPK
workload() {
  run xpk workload create --workload="$1" --cluster="$cluster" "${place[@]}" --tpu-type="$tpu_type" --docker-image="$image" \
    --max-restarts=20 --restart-on-exit-codes=1,75 --termination-grace-period-seconds=120 --command="$2"
}

case "$action" in
  install) install_here ;;
  train) unit rljax-train ".venv/bin/python -m rljax.train $what $*" ;;
  serve)
    if ! $dry_run; then
      hosts="$(gcloud compute tpus tpu-vm describe "$tpu" "${place[@]}" --format='value(networkEndpoints.len())')"
      [[ "$hosts" == 1 ]] || die "$tpu has $hosts hosts; a server has one, see vllm-project/tpu-inference#3573"
    fi
    unit rljax-server "$serving --host=\$(hostname -I | cut -d' ' -f1) $*"
    ;;
  logs) everywhere "journalctl --no-pager --lines=50 --unit=rljax-train --unit=rljax-server" ;;
  # Disabled, or it would start again with the host; no unit of one of the names is no mistake.
  stop) everywhere "for unit in rljax-train rljax-server; do sudo systemctl disable --now \$unit 2>/dev/null || true; done" ;;
  xpk) workload rljax "python3 -m rljax.train $what${*:+ $*}" ;;
  xpk-serve) workload rljax-server "$serving --host=\$(hostname -i) $*" ;;
esac
