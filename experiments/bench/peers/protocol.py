"""The peer's end of the line: runs under the peer's own python, needs the standard library only.

A peer script is started as `python hf_generate.py CONFIG.json`. It loads once and writes one line of JSON, {"ready": facts}.
Then every line of JSON on standard input asks for one timed repeat and is answered by one line, {"result": record}, until
standard input closes. So repeats of the peer alternate with ours while both stay loaded. An exception ends the script after
a line {"error": text}. Whatever libraries print goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


class Channel:
    """Lines of JSON in both directions."""

    def __init__(self):
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print; the answers keep the real standard output for themselves
        sys.stdout = sys.stderr

    def ready(self, facts: Mapping[str, Any]) -> None:
        """Loading is done; `facts` (versions, threads) go into the benchmark's JSON."""
        self._write({"ready": dict(facts)})

    def receive(self) -> dict[str, Any] | None:
        """The next request; None when the benchmark is done."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def answer(self, record: Mapping[str, Any]) -> None:
        """The result of one repeat."""
        self._write({"result": dict(record)})

    def fail(self, error: BaseException) -> None:
        """The last line of a script that cannot go on."""
        self._write({"error": f"{type(error).__name__}: {error}"})

    def _write(self, record: dict[str, Any]) -> None:
        self._answers.write(json.dumps(record) + "\n")
        self._answers.flush()


def main(script: Callable[[Channel, dict[str, Any]], None]) -> None:
    """Runs `script(channel, config)` with the config file named on the command line."""
    channel = Channel()
    try:
        with open(sys.argv[1]) as file:
            config = json.load(file)
        script(channel, config)
    except Exception as error:
        channel.fail(error)
        raise


def serve(channel: Channel, facts: Mapping[str, Any], run: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answers requests with `run(request)` plus its wall time in seconds, until there are no more."""
    channel.ready(facts)
    while (request := channel.receive()) is not None:
        start = time.perf_counter()
        record = run(request)
        channel.answer({"seconds": time.perf_counter() - start, **record})
