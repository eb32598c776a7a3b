"""Trains: `python -m experiments.train --config=experiments/configs/quickstart.py --workdir=runs/quickstart`.

`--help` lists every field. The same command again goes on from the last checkpoint, and says so when the run is finished.
Exit codes: 0 done, stopped on request with the state saved, or already done; 1 the run failed; 2 a setting is wrong.
"""

import contextlib
import fcntl
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from adrl_jax import report
from adrl_jax.checkpoint import CheckpointMismatch
from adrl_jax.runtime import loop
from adrl_jax.runtime.collect import RewardError
from adrl_jax.runtime.health import UpdateError
from adrl_jax.runtime.refill import RefillError
from experiments import build, config, flags, resolve, schema
from experiments.config import Config
from experiments.schema import ConfigError

log = logging.getLogger("adrl_jax")


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` (program name first); returns the exit code."""
    if flags.wants_help(argv):
        print(flags.usage("experiments.train", Config))
        return 0
    _log_to_stderr()
    try:
        settings, other = flags.parse(argv, Config)
        settings = config.freeze(settings)
        workdir = Path(other["workdir"])
        _prepare(workdir)
    except (ConfigError, OSError) as error:
        return flags.fail(error)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive(workdir))
            _note_changes(settings, workdir / "config.json")
            use_compilation_cache(settings.runtime.compilation_cache, workdir)
            parts = stack.enter_context(build.opened(settings))
            config.save(settings, workdir / "config.json")
        except (ValueError, OSError) as error:
            return flags.fail(error)
        log.info("%s on %d %s device(s); settings in %s", parts.describe(), jax.device_count(), jax.default_backend(), workdir)
        try:
            outcome = loop.run(parts, resolve.loop_config(settings), workdir)
        except CheckpointMismatch as error:
            return flags.fail(error)
        except (RewardError, RefillError, UpdateError) as error:
            log.error("the run ended: %s", error)
            return 1
    if outcome.summary is not None:
        print(report.closing_text(outcome.summary), flush=True)
        if settings.log.report:
            print(f"report: {workdir / 'report.html'}", flush=True)
    return 0


def _prepare(workdir: Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir={str(workdir)!r} cannot be made: {error.strerror}") from None
    if not os.access(workdir, os.W_OK | os.X_OK):
        raise ConfigError(f"--workdir={str(workdir)!r} is not writable")


@contextlib.contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
    """Holds the folder for this process; the lock goes with the process, however it ends.

    Raises:
        ConfigError: another process holds it.
    """
    with (workdir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--workdir={str(workdir)!r} is in use by another run") from None
        yield


def use_compilation_cache(where: str, workdir: Path) -> None:
    """Sets JAX's persistent compilation cache; `default` leaves JAX_COMPILATION_CACHE_DIR in force where it is set."""
    if where == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if where == "default":
        if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            return
        where = os.path.expanduser("~/.cache/adrl_jax/xla")
    elif where == "workdir":
        where = str(workdir.absolute() / "xla_cache")
    jax.config.update("jax_compilation_cache_dir", where)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _note_changes(settings: Config, saved: Path) -> None:
    """Says in which fields a run that goes on differs from how it began."""
    if not saved.exists():
        return
    try:
        before = config.load(saved)
    except ConfigError as error:
        log.warning("%s was written by another version: %s", saved, error)
        return
    for path, old, new in schema.differences(before, settings):
        log.info("%s: was %r, is %r from here on", path, old, new)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


if __name__ == "__main__":
    sys.exit(main(sys.argv))
