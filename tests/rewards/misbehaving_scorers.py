"""Scorers that misbehave, importable by worker processes."""

import os
import re
import time

from adrl_jax.types import Score


def obeys(prompt, response, truncated):
    """Does what the response says."""
    if response == "hang":
        time.sleep(3600)
    if response == "hang in C":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if response == "raise":
        raise KeyError("no such answer")
    if response == "raise odd":
        raise Odd(1, 2)
    if response == "die":
        os._exit(7)
    if response == "number":
        return 1.0
    if response == "where":
        return Score(1.0, str(os.getpid()), "match")
    return Score(1.0, response, "match")


class Odd(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
