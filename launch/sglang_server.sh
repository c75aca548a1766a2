#!/usr/bin/env bash
# Serves MODEL with SGLang on loopback and a free port, waits for its health and prints the URL; Ctrl-C stops it. Another
# address than loopback's must be a private one. The server asks for the key in --api-key-file or RLJAX_API_KEY_FILE, or
# else for the user's own in ~/.rljax.key, which is made once and which the trainer finds by itself. A server that
# another user starts than the one who trains needs a run with publish.readable_by, and a key file of each.
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
source "$repo/launch/served.sh"
own_key "$@"
exec "$venv/bin/python" -m rljax.cli serve sglang "$@"
