"""The command line of a stage before RL: settings checked, the folder made and held, the work done, one line at the end."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments import flags
from experiments.schema import ConfigError
from experiments.train import exclusive, use_compilation_cache


def main(
    argv: Sequence[str],
    name: str,
    settings: type,
    check: Callable[[Any], Any],
    run: Callable[[Any, Path], dict[str, Any]],
    told: Callable[[dict[str, Any], Path], str],
) -> int:
    """Runs the command line `argv` (program name first) of `python -m name`; returns the exit code, 0 or 2.

    Args:
        settings: the class of its settings.
        check: gives the settings to run with; raises ConfigError for a rule that does not hold.
        run: `(settings, workdir) -> record`.
        told: `(record, workdir)` as text for the terminal.
    """
    if flags.wants_help(argv):
        print(flags.usage(name, settings))
        return 0
    try:
        c, other = flags.parse(argv, settings)
        c = check(c)
        workdir = Path(other["workdir"])
        try:
            workdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--workdir={str(workdir)!r} cannot be made: {error.strerror}") from None
        with exclusive(workdir):
            use_compilation_cache(c.runtime.compilation_cache, workdir)
            record = run(c, workdir)
    except (ValueError, OSError) as error:
        return flags.fail(error)
    print(told(record, workdir))
    return 0
