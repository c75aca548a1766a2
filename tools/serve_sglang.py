"""Serves MODEL with SGLang for rljax: waits for its health, prints the URL, and ends it with this program.

bash launch/sglang_server.sh MODEL --dtype float16 --port 8000 -- --mem-fraction-static 0.8

launch/sglang_server.sh runs it in SGLang's environment, so it needs no more than the standard library and rljax itself.
"""

from __future__ import annotations

import sys

from rljax.rollout.servers.foreground import serve
from rljax.rollout.servers.sglang.server import ServerConfig, start

if __name__ == "__main__":
    sys.exit(serve(ServerConfig, start, ServerConfig.kind, sys.argv[1:]))
