"""Our end of the line: peers run as subprocesses in environments of their own and answer one timed repeat a request.

pythons = client.pythons(args.peer_python)
peer, reason = client.start("hf", "hf_generate.py", config, pythons)   # peer is None where it cannot run; reason says why
with peer:
    form.alternate({"ours": …, "hf": lambda: peer.run(prompts=ids, new_tokens=64)["seconds"]}, repeats)
"""

import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any

PEERS = ("hf", "llamacpp", "trl", "tunix")
FOLDER = pathlib.Path(__file__).parent
GENERATE = {"hf": "hf_generate.py", "llamacpp": "llamacpp_generate.py", "tunix": "tunix_generate.py"}
GRPO = {"trl": "trl_grpo.py", "tunix": "tunix_grpo.py"}
TRAIN = {"hf": "hf_train.py"}

# PyTorch returns large blocks to the system after every use and faults them in again; with these it keeps them, which makes
# TRL's step about a quarter faster. A peer is measured at its best.
TORCH_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
ENVIRONMENT = {"hf": TORCH_ALLOCATOR, "trl": TORCH_ALLOCATOR, "tunix": {"JAX_PLATFORMS": "cpu"}}


class PeerError(RuntimeError):
    """A peer did not start, failed, or did not answer in time."""


def names(flag: str, legal: Iterable[str]) -> list[str]:
    """Parses `--peer=hf,tunix`; a name that this benchmark has no script for is refused with those it has."""
    chosen = [name for name in flag.split(",") if name]
    for name in chosen:
        if name not in legal:
            raise ValueError(f"peer={name!r} has no part in this benchmark; choose of {', '.join(legal)}")
    return chosen


def pythons(flag: str) -> dict[str, str]:
    """Parses `--peer_python=hf=/path/python,tunix=/path/python`; peers not named run under this python."""
    found = dict.fromkeys(PEERS, sys.executable)
    for part in filter(None, flag.split(",")):
        name, equals, path = part.partition("=")
        names(name, PEERS)
        if not equals or not os.access(path, os.X_OK):
            raise ValueError(f"peer_python={part!r} must be NAME=PATH with PATH an executable python")
        found[name] = path
    return found


def start(name: str, script: str, config: Mapping[str, Any], python: Mapping[str, str], load_timeout: float = 300.0):
    """Starts a peer, or says why it cannot run.

    Returns:
        (peer, None), or (None, reason) where the environment has no such package.

    Raises:
        PeerError: it started and failed for another reason than a missing package.
    """
    try:
        return Peer(name, python[name], FOLDER / script, config, load_timeout), None
    except PeerError as error:
        if "ModuleNotFoundError" not in str(error):
            raise
        return None, f"{name} is not installed for {python[name]} ({error}); name its python with --peer_python={name}=PATH"


class Peer:
    """One running peer. `facts` are what it said when it was ready: versions, threads."""

    def __init__(self, name: str, python: str, script: os.PathLike, config: Mapping[str, Any], load_timeout: float = 300.0):
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix=f"adrl-peer-{name}-")
        folder = pathlib.Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps({**config, "scratch": str(folder)}))
        self._log = open(folder / "log.txt", "w+")
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
        # Our own interpreter's path and device flags would leak into the peer's.
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")}
        self._process = subprocess.Popen(
            [python, str(script), str(folder / "config.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**inherited, **offline, **ENVIRONMENT.get(name, {})},
            cwd=folder,
        )
        self._pending = b""
        try:
            self.facts: dict[str, Any] = self._read("ready", load_timeout)
        except BaseException:
            self.close()
            raise

    def run(self, timeout: float = 600.0, **request: Any) -> dict[str, Any]:
        """One timed repeat; the record holds at least `seconds`."""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; its last line or its log says why
        return self._read("result", timeout)

    def close(self) -> None:
        """Ends the subprocess and removes its scratch folder. May be called twice."""
        if self._process.poll() is None:
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _read(self, kind: str, timeout: float) -> dict[str, Any]:
        line = self._line(timeout)
        record = json.loads(line) if line else {"error": f"ended with exit code {self._process.wait()}"}
        if kind in record:
            return record[kind]
        if "error" not in record:
            raise PeerError(f"{self.name} answered {sorted(record)}, expected {kind!r}")
        raise PeerError(f"{self.name}: {record['error']}\n{self._last_log_lines()}".rstrip())

    def _line(self, timeout: float) -> bytes:
        """One line of its output, b"" at its end."""
        stream, deadline = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                self._process.kill()
                raise PeerError(f"{self.name} did not answer within {timeout:g} s\n{self._last_log_lines()}")
            block = os.read(stream, 1 << 16)
            if not block:
                return b""
            self._pending += block
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_log_lines(self, count: int = 5) -> str:
        self._log.flush()
        self._log.seek(0)
        return "\n".join(self._log.read().splitlines()[-count:])
