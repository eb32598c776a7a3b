"""The command line of every experiment: `--config=FILE --workdir=DIR --config.group.field=value …`, nothing else.

Parsing is `ml_collections.config_flags`; what it would let pass (left-over arguments, types that changed) or report as a
traceback ends here as one `ConfigError`.
"""

import dataclasses
import importlib.util
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

from experiments.schema import ConfigError, Option, build, editable, listing, options, unknown_field

_OVERRIDE = re.compile(r"^--?(?:no)?config\.([^=]+)(?:=(.*))?$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag beside `--config`.

    Attributes:
        meaning: one sentence for `--help`.
        default: text; None means that it must be given.
    """

    meaning: str
    default: str | None = None


WORKDIR = {"workdir": Flag("folder of this run: config.json, metrics.jsonl, samples.jsonl, checkpoints/, report.html")}


def parse(argv: Sequence[str], cls: type, extra: Mapping[str, Flag] = WORKDIR) -> tuple[Any, dict[str, str]]:
    """Reads a command line into a checked, frozen config and the values of the other flags.

    Args:
        argv: as `sys.argv`, program name first.
        cls: the config's class.
        extra: the other flags by name.

    Raises:
        ConfigError: anything unknown, left over, missing, ill-typed or out of bounds.
    """
    known = options(cls)
    path, argv = _take_config(list(argv))
    loaded = load_file(path, cls)
    for arg in argv[1:]:
        match = _OVERRIDE.match(arg)
        if match and match.group(1) not in known:
            raise unknown_field(match.group(1), known)
    values = flags.FlagValues()
    # The file is loaded above, once, by us: ml_collections' own loader uses an interface that Python is about to drop.
    config_flags.DEFINE_config_dict("config", loaded, flag_values=values, sys_argv=argv)
    for name, flag in extra.items():
        flags.DEFINE_string(name, flag.default, flag.meaning, flag_values=values)
    try:
        left = values(argv)[1:]
    except (flags.Error, AttributeError, TypeError, ValueError) as error:
        raise _readable(error, known, extra) from None
    if left:
        hint = f"; did you mean --{left[0]}?" if left[0].startswith("config.") else "; values are written --config.field=value"
        raise ConfigError(f"left-over argument {left[0]!r}{hint}")
    for name in extra:
        if not values[name].value and extra[name].default is None:
            raise ConfigError(f"--{name} is missing: {extra[name].meaning}")
    return build(cls, values["config"].value), {name: values[name].value for name in extra}


def load_file(path: str, cls: type) -> config_dict.ConfigDict:
    """What `get_config()` of a config file returns, checked, with the fields it lacks at their defaults; `file.py:argument`
    hands it one argument.

    Raises:
        ConfigError: no such file, no `get_config`, or a value that the field refuses (names file, line and field).
    """
    file, *argument = path.split(":", 1)
    if not Path(file).is_file():
        raise ConfigError(f"--config={file!r}: no such file; the experiments stand in experiments/configs/")
    spec = importlib.util.spec_from_file_location("experiment_config", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={file!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(*argument)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise _in_file(error, file, options(cls)) from None
    if not isinstance(config, (config_dict.ConfigDict, Mapping)):
        raise ConfigError(f"{file}: get_config() must return a ConfigDict, got {type(config).__name__}")
    return editable(build(cls, config))


def usage(program: str, cls: type, extra: Mapping[str, Flag] = WORKDIR) -> str:
    """What `--help` prints: the command and all fields with type, range, default and meaning."""
    given = " ".join(f"--{name}=…" for name, flag in extra.items() if flag.default is None)
    lines = [f"usage: python -m {program} --config=FILE {given} [--config.group.field=value …]", ""]
    lines += ["  --config=FILE", "      Python file with get_config(); see experiments/configs/."]
    for name, flag in extra.items():
        lines += [f"  --{name}=" + ("…" if flag.default is None else flag.default), f"      {flag.meaning}"]
    return "\n".join(
        [*lines, "", "Fields (the values shown are the defaults; a config file may set others):", "", listing(cls)]
    )


def wants_help(argv: Sequence[str]) -> bool:
    return any(arg in ("-h", "--h", "-help", "--help", "--helpfull") for arg in argv[1:])


def fail(error: Exception) -> int:
    """Prints an error that is the user's to mend, without a traceback; returns the exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 2


def _take_config(argv: list[str]) -> tuple[str, list[str]]:
    """The value of `--config` and the command line without it."""
    for i, arg in enumerate(argv[1:], 1):
        if arg in ("--config", "-config") and i + 1 < len(argv):
            return argv[i + 1], argv[:i] + argv[i + 2 :]
        if arg.startswith(("--config=", "-config=")):
            return arg.split("=", 1)[1], argv[:i] + argv[i + 1 :]
    raise ConfigError("--config=FILE is missing; for example --config=experiments/configs/quickstart.py")


def _readable(error: Exception, known: Mapping[str, Option], extra: Mapping[str, Flag]) -> ConfigError:
    text = str(error)
    match = re.match(r"flag --config\.([\w.]+)=(.*?): ", text, re.DOTALL)
    if match and match.group(1) in known:
        opt = known[match.group(1)]
        return ConfigError(f"{opt.path}={match.group(2)!r} is not legal: must be {opt.type_name}, {opt.legal}")
    if isinstance(error, flags.UnrecognizedFlagError):
        names = ", ".join(f"--{name}" for name in ("config", *extra))
        return ConfigError(f"unknown flag --{error.flagname}; choose one of {names}, or --config.group.field=value")
    return ConfigError(text)


def _in_file(error: Exception, file: str, known: Mapping[str, Option]) -> ConfigError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == Path(file).resolve()]
    where = f"{file}:{frames[-1].lineno}: {frames[-1].line}" if frames else file
    name = re.search(r"field '(\w+)'|Key \"(\w+)\"", str(error))
    if name is None:
        return ConfigError(f"{where}\n  {type(error).__name__}: {error}")
    if name.group(2):
        return ConfigError(f"{where}\n  {unknown_field(_dotted(frames, name.group(2)), known)}")
    fields = [o for o in known.values() if o.path.rsplit(".", 1)[-1] == name.group(1)]
    line = frames[-1].line if frames else ""
    fields = [o for o in fields if o.path in (line or "")] or fields
    rules = "; ".join(f"{o.path} must be {o.type_name}, {o.legal}" for o in fields)
    return ConfigError(f"{where}\n  {rules or error}")


def _dotted(frames: Sequence[Any], last: str) -> str:
    """`learner.lr` out of the line `config.learner.lr = 3`, else the last name alone."""
    match = re.search(r"\w+\.((?:\w+\.)*" + last + r")\b", frames[-1].line or "") if frames else None
    return match.group(1) if match else last
