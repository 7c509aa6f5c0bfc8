"""Verify each folder named on standard input, in a child process with limited memory and time.

Imports only NumPy and the verifier, so that JAX's memory is not counted. Prints a line of JSON for
each folder: exit status (negative for a signal), CPU seconds and MiB of the child process.
"""

import json
import os
import resource
import signal
import sys
import traceback

from manifoldmuon_verify.__main__ import main

MEMORY, CPU_SECONDS, WALL_SECONDS = 2**30, 60, 300


def limited(folder: str) -> tuple[int, float, float]:
    """Verify a folder; write its output next to it."""
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            signal.alarm(WALL_SECONDS)
            for number, end in ((1, "out"), (2, "err")):
                to = os.open(f"{folder}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(to, number)
            status = main([folder])
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            status = 70
        sys.stderr.flush()
        os._exit(status)
    _, status, used = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(limited(line.rstrip("\n"))), flush=True)
