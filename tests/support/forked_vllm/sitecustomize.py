"""Makes ``vllm serve`` fork its engine and worker, which then need not import again what the server has imported.

Python runs this module at its start where its directory is on PYTHONPATH. A start so takes 10 s of processor time
instead of 28. vLLM asks for "spawn" on a CPU.
"""

import sys

if sys.orig_argv[2:3] == ["serve"]:
    import multiprocessing

    _get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: _get_context("fork" if method == "spawn" else method)
