#!/usr/bin/env bash
# Tests launch/slurm.sbatch on a real Slurm of three nodes on this machine (marker slurm). About half an hour.
#
#   bash tools/test_slurm.sh [pytest arguments]
#
# Installs Debian's packages slurm-wlm and munge where they are not there yet (as root, or with sudo). The tests start
# Slurm and end it: no process and no service stays.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

if ! (PATH="$PATH:/usr/sbin" && command -v slurmctld && command -v slurmd && command -v munged) >/dev/null; then
  root=()
  [[ "$(id -u)" == 0 ]] || root=(sudo)
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet slurm-wlm munge
fi
prepare_environment test
bash launch/install_vllm.sh
exec "$RLJAX_BIN/python" -m pytest --verbose -p no:xdist -rP --durations=20 -m slurm tests/launch/test_slurm.py "$@"
