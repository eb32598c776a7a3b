"""The process behind one slot of a `ScorerPool`: reads calls from a socket, answers with scores, knows nothing else."""

import math
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection


def serve(connection: Connection) -> None:
    """Answers calls until the other end closes."""
    scorer, timeout_s = pickle.loads(connection.recv_bytes())
    connection.send(("ready", None))
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        # If the pool itself is gone nobody would kill a hanging scorer: the kernel does, whatever holds the interpreter.
        signal.alarm(math.ceil(timeout_s) + 10)
        try:
            answer = ("score", scorer(*arguments))
        except Exception as e:
            answer = ("error", portable(e))
        signal.alarm(0)
        connection.send(answer)


def portable(error: Exception) -> tuple[Exception, str]:
    """The error itself, or a RuntimeError that quotes it where it cannot travel, and its traceback."""
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    return (error if type(copy) is type(error) else RuntimeError(f"{type(error).__name__}: {error}")), text


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.set_inheritable(int(sys.argv[1]), False)
    serve(Connection(int(sys.argv[1])))
