"""A process that compares expressions, run as a script: a JSON line [response, label, seconds] in,
a JSON line of 0 or 1 out.

Started by `math.py`, which ends it; imports nothing of this package, so that it starts in half a
second.
"""

import json
import logging
import os
import resource
import signal
import sys

from math_verify import parse, verify

MEMORY = 4 << 30  # bytes of address space


def equal(response: str, label: str) -> bool:
    """Returns whether the response's last expression equals the label's. math-verify's time-outs
    are off: the alarm ends this process.
    """
    # else the whole label is the expression
    marked = any(sign in label for sign in ("$", "\\boxed", "\\(", "\\["))
    gold = parse(label if marked else f"\\boxed{{{label}}}", parsing_timeout=None)
    return bool(gold) and verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)


def main() -> None:
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library's prints are no answers
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard)
    )
    # Ctrl-C is the trainer's; this process ends with its input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel's own action: it ends the process inside one long multiplication, too, and with
    # nobody watching.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        response, label, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            score = int(equal(response, label))
        # whatever a parser of free text finds to raise, MemoryError and RecursionError among it
        except Exception:
            score = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(f"{score}\n")
        answers.flush()


if __name__ == "__main__":
    main()
