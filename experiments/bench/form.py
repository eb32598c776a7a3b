"""The one form of every benchmark: what is measured, how it is timed, what the JSON looks like.

A benchmark `experiments/bench/x.py` is a script:

    args = form.parser(__doc__).parse_args()              # --json, --repeats, --peer, --peer_python, …
    first = form.first_call(run)                          # compiles, apart from the figures
    records = form.alternate({"ours": form.timed(run), "hf": peer_side}, repeats=args.repeats)
    results = {"plain_tokens_per_s": tokens / form.median(records["ours"])}
    form.finish("x", vars(args), results, args.json)      # prints the table, writes {"bench","config","machine","versions","results"}

Figures are medians of at least three repeats after warm-up. Both sides of a ratio come from one run and alternate, so a
machine that slows down slows both. Ratios near 1 are judged on interleaved pairs: `ratio` gives the median of the
pairwise ratios and a bootstrap interval.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MIN_REPEATS = 3  # a median of fewer says nothing
MIN_PAIRS = 8  # for bars within 10 % of 1
PACKAGES = ("adrl-jax", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "tokenizers", "safetensors", "gguf")


class FirstCall(NamedTuple):
    """A first call, which compiles: its value and its wall time in seconds."""

    value: Any
    seconds: float


class Ratio(NamedTuple):
    """Median of pairwise ratios and its bootstrap interval."""

    median: float
    low: float
    high: float

    def results(self, name: str) -> dict[str, float]:
        """The three entries of a results table: `name`, `name_low`, `name_high`."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}


def parser(description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has; a benchmark adds its own. Unknown flags end the run."""
    first, _, rest = (description or "").strip().partition("\n")
    flags = argparse.ArgumentParser(
        description=f"{first}\n{rest}", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--json", default=None, metavar="FILE", help="write the form to this file")
    flags.add_argument("--repeats", type=repeat_count, default=MIN_REPEATS, help=f"repeats of each figure, >= {MIN_REPEATS}")
    flags.add_argument(
        "--peer", default="", metavar="A,B", help="systems to run beside ours: hf, trl, tunix, as the benchmark has them"
    )
    flags.add_argument(
        "--peer_python",
        default="",
        metavar="A=PATH,B=PATH",
        help="the python that has each peer installed; the one running this benchmark where not named",
    )
    return flags


def repeat_count(text: str) -> int:
    """Parses `--repeats`; fewer than `MIN_REPEATS` is refused."""
    count = int(text)
    if count < MIN_REPEATS:
        raise argparse.ArgumentTypeError(f"repeats={count} must be >= {MIN_REPEATS}: figures are medians")
    return count


def first_call(run: Callable[[], Any]) -> FirstCall:
    """Runs once and waits for the result: compilation is a figure of its own, never part of another."""
    start = time.perf_counter()
    value = jax.block_until_ready(run())
    return FirstCall(value, time.perf_counter() - start)


def timed(run: Callable[[], Any]) -> Callable[[], float]:
    """A side for `alternate`: wall seconds of one call, the device's work included."""

    def side() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    return side


def alternate(sides: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, list[Any]]:
    """Runs the sides in turn, `repeats` rounds, every second round backwards (A B, B A, A B, …).

    Args:
        sides: each call runs one repeat and returns its figure: seconds, or a record of several figures.
        repeats: rounds kept.
        warmup: rounds run before and dropped.

    Returns:
        Per side what its calls returned, in order of the rounds.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats} must be >= 1 and warmup={warmup} >= 0")
    kept: dict[str, list[Any]] = {name: [] for name in sides}
    for turn in range(warmup + repeats):
        order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        for name in order:
            figure = sides[name]()
            if turn >= warmup:
                kept[name].append(figure)
    return kept


def median(records: Sequence[Any], key: str | None = None) -> float:
    """Median of figures, or of one figure of each record."""
    values = [record[key] for record in records] if key else list(records)
    if not values:
        raise ValueError("median of no figures")
    return float(statistics.median(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float], *, confidence=0.95, resamples=4000, seed=0) -> Ratio:
    """Median of the pairwise ratios `numerators[i] / denominators[i]` with a percentile bootstrap over the pairs.

    Raises:
        ValueError: the sides have different lengths, there are none, or a figure is not positive.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if above.shape != below.shape or above.ndim != 1 or above.size == 0:
        raise ValueError(f"pairs need two equally long lists, got {above.shape} and {below.shape}")
    if not (np.all(above > 0) and np.all(below > 0)):
        raise ValueError("figures of a ratio must be positive")
    ratios = above / below
    draws = np.random.default_rng(seed).integers(0, ratios.size, (resamples, ratios.size))
    medians = np.median(ratios[draws], axis=1)
    tail = (1 - confidence) / 2
    return Ratio(float(np.median(ratios)), float(np.quantile(medians, tail)), float(np.quantile(medians, 1 - tail)))


def pairs(ours: Callable[[], float], other: Callable[[], float], repeats: int = MIN_PAIRS, warmup: int = 1) -> Ratio:
    """Speed-up of `ours` over `other` (other's seconds / ours) on interleaved repeats, at least `MIN_PAIRS`."""
    if repeats < MIN_PAIRS:
        raise ValueError(f"repeats={repeats} must be >= {MIN_PAIRS} pairs")
    kept = alternate({"ours": ours, "other": other}, repeats, warmup)
    return ratio(kept["other"], kept["ours"])


def peak_rss_mb() -> float:
    """Peak resident memory of this process in MiB."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # getrusage would also count what the parent had resident when it started us
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if platform.system() == "Darwin" else peak / 1024


def rss_mb() -> float | None:
    """Resident memory of this process now, in MiB; None where the system does not tell."""
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), None)


def matmul_peak(dtype: Any = jnp.float32, sizes: Sequence[tuple[int, int, int]] | None = None, repeats: int = 5) -> float:
    """Best FLOP/s of a plain matrix product on this machine: the yardstick of `flops_fraction_of_peak`.

    Args:
        dtype: of both factors.
        sizes: (rows, inner, columns) of the products tried; default 512 to 2,048 rows.
        repeats: timed calls a size, of which the median counts.
    """
    multiply, best = jax.jit(jnp.matmul), 0.0
    for rows, inner, columns in sizes or ((512, 2048, 2048), (1024, 1024, 1024), (2048, 1024, 2048)):
        left, right = jnp.full((rows, inner), 0.5, dtype), jnp.full((inner, columns), 0.25, dtype)
        side = timed(lambda left=left, right=right: multiply(left, right))
        side()
        best = max(best, 2.0 * rows * inner * columns / median([side() for _ in range(repeats)]))
    return best


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": cores,
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory_mb"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    if hasattr(os, "getloadavg"):
        facts["load_average_1min"] = round(os.getloadavg()[0], 2)
    return facts


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Versions of python and of the packages that matter; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def finish(
    bench: str,
    config: Mapping[str, Any],
    results: Mapping[str, Any],
    json_path: str | os.PathLike | None = None,
    notes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Prints the table, writes the JSON, returns the form.

    Args:
        bench: the benchmark's name.
        config: what it was asked to do; where the peers' pythons lie on this machine is left out.
        results: figure name -> any JSON value; None for a figure that could not be measured.
        json_path: where the form is written; None prints only.
        notes: why a figure is None, or what to keep in mind, by figure name; printed below the table and kept in `config`.
    """
    made = document(bench, config, results, notes)
    print(table(bench, made["results"]))
    for name, reason in (notes or {}).items():
        print(f"  {name}: {reason}")
    if json_path:
        write(made, json_path)
        print(f"  written to {json_path}")
    return made


def document(
    bench: str, config: Mapping[str, Any], results: Mapping[str, Any], notes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The form itself, JSON values only; arguments as in `finish`."""
    asked = {name: value for name, value in config.items() if name != "peer_python"}
    return {
        "bench": bench,
        "config": {**_plain(asked), **({"notes": dict(notes)} if notes else {})},
        "machine": machine(),
        "versions": versions(),
        "results": _plain(dict(results)),
    }


def write(made: Mapping[str, Any], json_path: str | os.PathLike) -> None:
    """Writes a form; a reader never sees half a file."""
    text = json.dumps(made, indent=2, allow_nan=False)
    path = pathlib.Path(json_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text + "\n")
    partial.replace(path)


def table(bench: str, results: Mapping[str, Any]) -> str:
    """The results as two aligned columns."""
    shown = {name: _shown(value) for name, value in results.items()}
    width = max([len(bench), *map(len, shown)])
    lines = [f"{bench:<{width}}  value", f"{'-' * width}  {'-' * max([5, *map(len, shown.values())])}"]
    return "\n".join(lines + [f"{name:<{width}}  {value}" for name, value in shown.items()])


def _shown(value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, (list, dict)) and len(str(value)) > 80:
        return f"{len(value)} {'rows' if isinstance(value, list) else 'entries'}, see the JSON"
    return str(value)


def _plain(value: Any) -> Any:
    """JSON values only: numpy and JAX scalars and arrays become numbers and lists, non-finite numbers become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a form holds JSON values only, got {type(value).__name__}: {value!r}")
