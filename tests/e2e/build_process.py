"""A server that forks one child for each `pack` command: imports are paid once, and a child may be killed at will.

Reads jobs as JSON lines (arguments, log, and limit_bytes for the size of a file); answers with the child's process id,
and with its exit code once it has ended.
"""

import json
import os
import resource
import sys

import pipeline.builder
from pipeline.cli import main

assert pipeline.builder  # imported for its own imports


def run(job: dict) -> int:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
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
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
