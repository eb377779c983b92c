"""A server that forks one child for each `pack` command: imports are paid once, and a child may be killed at will.

Reads jobs as JSON lines: arguments, log, and perhaps limit_bytes of a file and start_method of workers. Answers with
the child's process id, and once it has ended with its exit code and its peak memory in bytes.
"""

import json
import multiprocessing
import os
import resource
import sys

import pipeline.building.driver
from pipeline.cli import main
from pipeline.packing.kernels import always_compile

assert pipeline.building.driver  # imported for its own imports
always_compile()  # small builds then take the memory and the way of large ones


def run(job: dict) -> int:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job.get("start_method"):
        multiprocessing.set_start_method(job["start_method"])
    if job.get("limit_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit_bytes"], job["limit_bytes"]))
    try:
        main(job["arguments"])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setsid()
            os._exit(run(json.loads(line)))
        print(child, flush=True)
        _, status, usage = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, flush=True)
