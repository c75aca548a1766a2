"""Two processes of one program that train together."""

import json
import subprocess
import sys

from waiting import free_port

# torch may abort a process that ends with a thread of its process group still running.
END = "\nsys.stdout.flush()\nimport os\nos._exit(0)\n"


def outputs_of_two_ranks(program, *words, timeout):
    """Runs the program's text in two processes; returns the JSON of the last line of each.

    The arguments are RANK PORT and ``words``. The program must import ``sys``.
    """
    port, pipe = str(free_port()), subprocess.PIPE
    commands = [[sys.executable, "-c", program + END, str(rank), port, *words] for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for command in commands]
    try:
        outputs = [process.communicate(timeout=timeout) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]
