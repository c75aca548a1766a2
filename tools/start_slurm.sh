#!/usr/bin/env bash
# Starts a real Slurm of several virtual nodes on this machine, for tests of launch/slurm.sbatch.
#
#   bash tools/start_slurm.sh DIR [NODES]          two nodes unless told otherwise
#   SLURM_CONF=DIR/slurm.conf sinfo
#   bash tools/stop_slurm.sh DIR
#
# Needs Debian's packages slurm-wlm and munge (tools/test_slurm.sh installs them), no root, and ports from 17000 up
# (RLJAX_SLURM_PORT). The nodes are 127.0.0.1, 127.0.0.2 and so on, each with 16 CPUs and two GPUs that are no GPUs
# (/dev/null, /dev/zero): what Slurm does with GPUs is tried, not what GPUs do. Jobs of the partition urgent take
# the nodes of others, which have 30 s to end and are queued again. Returns when a step on all nodes has run.
set -euo pipefail

(($# == 1 || $# == 2)) || { echo "usage: bash tools/start_slurm.sh DIR [NODES]" >&2; exit 2; }
mkdir -p "$1"
dir="$(cd "$1" && pwd)"
nodes="${2:-2}"
port="${RLJAX_SLURM_PORT:-17000}"
host="$(hostname -s)"
user="$(id -un)"
export SLURM_CONF="$dir/slurm.conf"
PATH="$PATH:/usr/sbin" # where Debian puts the daemons

die() {
  echo "start_slurm: $*" >&2
  tail -n 5 "$dir"/log/*.log >&2 2>/dev/null || true
  bash "$(dirname "${BASH_SOURCE[0]}")/stop_slurm.sh" "$dir" || true
  exit 1
}

for program in munged slurmctld slurmd srun; do
  command -v "$program" >/dev/null || { echo "start_slurm: no $program: apt-get install slurm-wlm munge" >&2; exit 2; }
done
[[ ! -e "$dir/slurm.conf" ]] || { echo "start_slurm: $dir holds a Slurm already" >&2; exit 2; }

mkdir -p "$dir"/{log,run,state}
{
  cat <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued may start again once its credential has expired, after two minutes unless told otherwise.
AuthInfo=socket=$dir/run/munge.sock,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=30
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
CONF
  for ((i = 1; i <= nodes; i++)); do
    echo "NodeName=127.0.0.$i NodeHostname=$host NodeAddr=127.0.0.$i Port=$((port + i)) CPUs=16 RealMemory=8000 Gres=gpu:2"
  done
  echo "PartitionName=test Nodes=127.0.0.[1-$nodes] Default=YES MaxTime=20 PriorityTier=1 GraceTime=30"
  echo "PartitionName=urgent Nodes=127.0.0.[1-$nodes] MaxTime=20 PriorityTier=2"
} >"$dir/slurm.conf"
: >"$dir/cgroup.conf"
printf 'Name=gpu File=%s\n' /dev/null /dev/zero >"$dir/gres.conf"

(umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")
munged --force --key-file="$dir/munge.key" --socket="$dir/run/munge.sock" --pid-file="$dir/run/munged.pid" \
  --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed" || die "munged did not start"
slurmctld -c || die "slurmctld did not start"
for ((i = 1; i <= nodes; i++)); do
  slurmd -N "127.0.0.$i" || die "slurmd of node $i did not start"
done

for ((tries = 0; tries < 30; tries++)); do
  if timeout 10 srun --immediate=5 --nodes="$nodes" true 2>/dev/null; then
    echo "export SLURM_CONF=$SLURM_CONF"
    exit
  fi
  sleep 1
done
die "no step ran on $nodes nodes"
