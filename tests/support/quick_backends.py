"""vLLM as a kind of server whose requests are repeated at once."""

from rljax.rollout.servers.requests import Retries
from rljax.rollout.servers.vllm.client import VllmBackend


def quick(attempts: int = Retries().attempts, wait_s: float = 0.01) -> VllmBackend:
    """Returns a kind of server with these attempts at a request, the first waits of which take ``wait_s``."""
    backend = VllmBackend()
    backend.retries = Retries(attempts, wait_s, 2 * wait_s)
    return backend
