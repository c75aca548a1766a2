"""A vllm-router in its own environment, which tools/test_router.sh makes and names in RLJAX_ROUTER."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

import httpx
from ports import free_port


@contextlib.contextmanager
def started_router(port: int = 0) -> Iterator[str]:
    """Starts a router without servers, yields its URL, and ends it by its id."""
    port = port or free_port()
    words = ["--port", str(port), "--prometheus-port", str(free_port()), "--policy", "round_robin"]
    words += ["--worker-startup-timeout-secs", "5", "--disable-retries"]
    process = subprocess.Popen(
        [os.environ["RLJAX_ROUTER"], *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait(30)
