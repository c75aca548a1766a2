"""vLLM as a kind of server whose requests are repeated at once."""

from rljax.rollout.servers.vllm.client import VllmBackend


def quick(attempts: int = VllmBackend.attempts, wait_s: float = 0.01) -> VllmBackend:
    """Returns a kind of server with these attempts at a request, the first waits of which take ``wait_s``."""
    backend = VllmBackend()
    backend.attempts, backend.first_wait_s, backend.longest_wait_s = attempts, wait_s, 2 * wait_s
    return backend
