"""Sends requests of new callers with session limits and a budget, and prints the growth in MB.

`.venv/bin/python -m tests.support.soak 24000` prints eight lines, one for each eighth of the
callers.
"""

import gc
import sys

from extproc.ext_proc.stream import Stream
from tests.bench import samples
from tests.bench.timing import resident_mb

_LINES = 8


def main(callers: int) -> None:
    policy = samples.budget(similarity="turns", action="steer", threshold_identical_requests=3)
    policy["spec"] |= {"session": {"idle_seconds": 3_600}, "rules": samples.rule()["spec"]["rules"]}
    serving = samples.service(samples.engine([policy]))
    gc.collect()
    before = resident_mb()
    for number in range(1, callers + 1):
        for calls in (1, 2):
            content = samples.agent_body(number, calls)
            stream = Stream(serving)
            stream.receive(samples.headers_message(user=f"user-{number}", length=len(content)))
            stream.receive(samples.body_message(content))
            stream.close()
        if number % (callers // _LINES) == 0:
            gc.collect()
            print(f"{resident_mb() - before:.1f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
