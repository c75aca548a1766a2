#!/usr/bin/env bash
# Serves MODEL with SGLang on loopback and a free port, waits for its health and prints the URL; Ctrl-C stops it. Another
# address than loopback's must be a private one, and needs the file of a key (openssl rand -hex 32), which the trainer
# finds by rollout.api_key_file. On loopback the key is by default the user's own, ~/.rljax.key, which is made once and
# which the trainer finds by itself. A server that another user starts than the one who trains needs
# publish.readable_by in the run, and a key file of each.
#
#   bash launch/sglang_server.sh MODEL [--dtype bfloat16|float16|float32] [--head-dtype model|float32] [--port P]
#                                      [--max-model-len N] [--log FILE] [--url-file FILE] [--follow-parent]
#                                      [--host ADDRESS] [--api-key-file FILE] [--batch-invariant]
#                                      [-- further SGLang arguments]
#
# The environment comes from RLJAX_SGLANG_VENV, by default .venv-sglang in this checkout (launch/install_sglang.sh).
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${RLJAX_SGLANG_VENV:-$repo/.venv-sglang}"
if [[ ! -x "$venv/bin/python" ]]; then
  echo "sglang_server: no SGLang environment at $venv; run: bash launch/install_sglang.sh" >&2
  exit 2
fi
exec "$venv/bin/python" -m rljax.cli serve sglang "$@"
