"""Does refreshing stale batches pay: seconds an update, tokens reused, final reward, by lag and response length.

python -m experiments.ablations.refresh --json=refresh.json --plot=refresh.svg

Three ways to learn from a batch that is `lag` policies old: `none` (as it is, no ratio), `corrected` (the clipped ratio to the law
that sampled), `refreshed` (verified with its own noise under the current policy and continued where it differs, so that it is
on-policy). `on_policy` is the same run without lag. Response lengths are those of the division task with short and with long
solutions. A refresh costs less than generating anew where `refresh_s` is below `generate_s`.
"""

import json
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from adrl_jax.runtime.choice import RefreshConfig
from experiments.ablations import common
from experiments.bench import form

LAGS = (1, 2, 4, 8)
LENGTHS: dict[str, dict[str, Any]] = {
    "short": {"task.median_steps": 1.5, "task.max_steps": 8, "train.max_new_tokens": 48, "learner.row_length": 0},
    "long": {"task.median_steps": 6.0, "task.max_steps": 32, "train.max_new_tokens": 104},
}
MODES = ("none", "corrected", "refreshed")
ALWAYS = RefreshConfig("always")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a cell, means over seeds."""
    head = f"{'length':<8}{'mode':<12}{'lag':>4}{'reward':>9}{'s/update':>10}{'reused':>8}{'refresh s':>11}{'generate s':>12}"
    lines = [head]
    keys = list(dict.fromkeys((r["length"], r["mode"], r["lag"]) for r in rows))
    for key in keys:
        own = [r for r in rows if (r["length"], r["mode"], r["lag"]) == key]

        def mean(name: str, digits: int, own=own) -> str:
            found = [r[name] for r in own if r[name] is not None]
            return f"{statistics.mean(found):.{digits}f}" if found else "–"

        lines.append(
            f"{key[0]:<8}{key[1]:<12}{key[2]:>4}{mean('reward', 3):>9}{mean('seconds', 3):>10}{mean('reused', 2):>8}"
            f"{mean('refresh_s', 3):>11}{mean('generate_s', 3):>12}"
        )
    return "\n".join(lines)


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`refresh_over_generate_<length>_lag<k>`: seconds of a refresh over those of generating anew; below 1 it costs less."""
    out = {}
    for length, lag in dict.fromkeys((r["length"], r["lag"]) for r in rows if r["mode"] == "refreshed"):
        own = [r for r in rows if (r["length"], r["lag"], r["mode"]) == (length, lag, "refreshed") and r["refresh_s"]]
        if own:
            out[f"refresh_over_generate_{length}_lag{lag}"] = statistics.median(r["refresh_s"] / r["generate_s"] for r in own)
    return out


def plot(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Final reward and share of tokens reused against lag, one column a length."""
    lengths = list(dict.fromkeys(r["length"] for r in rows))
    figure = Figure(figsize=(4.2 * len(lengths), 6), layout="constrained")
    axes = figure.subplots(2, len(lengths), squeeze=False)
    for column, length in enumerate(lengths):
        for mode in dict.fromkeys(r["mode"] for r in rows):
            own = [r for r in rows if r["length"] == length and r["mode"] == mode]
            lags = sorted({r["lag"] for r in own})
            for ax, name in zip(axes[:, column], ("reward", "reused")):
                means = [statistics.mean(found) if (found := _of(own, lag, name)) else float("nan") for lag in lags]
                ax.plot(lags, means, "o-" if len(lags) > 1 else "o", label=mode.replace("_", " "))
        axes[0, column].set_title(f"{length} responses", loc="left")
        axes[1, column].set_xlabel("lag in policies")
    axes[0, 0].set_ylabel("held-out reward at the end")
    axes[1, 0].set_ylabel("share of tokens reused")
    axes[0, 0].legend(frameon=False)
    figure.savefig(path)


def _of(rows: Sequence[Mapping[str, Any]], lag: int, name: str) -> list[float]:
    return [r[name] for r in rows if r["lag"] == lag and r[name] is not None]


def main(argv=None) -> dict[str, Any]:
    parser = form.parser(__doc__)
    parser.add_argument("--lags", default=",".join(map(str, LAGS)), help="policies")
    parser.add_argument("--lengths", default=",".join(LENGTHS), help="of " + ", ".join(LENGTHS))
    parser.add_argument("--steps", type=int, default=40, help="batches of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell")
    parser.add_argument("--changes", default="{}", help="JSON of config fields to change everywhere, for small forms")
    parser.add_argument("--plot", default="", metavar="FILE", help="picture of the table")
    args = parser.parse_args(argv)
    lengths = [x for x in args.lengths.split(",") if x]
    unknown = [x for x in lengths if x not in LENGTHS]
    if unknown:
        parser.error(f"--lengths={unknown[0]!r} is unknown; choose of {', '.join(LENGTHS)}")
    lags = common.numbers(args.lags)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        with tempfile.TemporaryDirectory() as folder:
            runs = common.Runs(pathlib.Path(folder), args.steps, LENGTHS[length] | json.loads(args.changes))
            for seed in range(args.seeds):
                rows += cells(runs, length, seed, lags)
    print(table(rows))
    if args.plot:
        plot(rows, pathlib.Path(args.plot))
    return form.finish("refresh", vars(args), {"rows": rows, **verdict(rows)}, args.json)


def cells(runs: common.Runs, length: str, seed: int, lags: Sequence[int]) -> list[dict[str, Any]]:
    """All runs of a seed."""
    stale = [(str(lag), {"mode": "lagged", "limit": lag}) for lag in lags]
    fresh = [(f"r{lag}", {"mode": "lagged", "limit": lag, "refresh": ALWAYS}) for lag in lags]
    plan = (("none", stale), ("ppo_clip", [("0", {"mode": "lagged", "limit": 0}), *stale, *fresh]))
    rows = []
    for correction, variants in plan:
        for name, found in runs.each(correction, seed, variants):
            lag, refreshed = int(name.lstrip("r")), name.startswith("r")
            mode = "none" if correction == "none" else "refreshed" if refreshed else "corrected" if lag else "on_policy"
            keep = {k: found[k] for k in ("seconds", "reused", "refresh_s", "generate_s", "disagreement")}
            rows.append({"mode": mode, "lag": lag, "length": length, "seed": seed, "reward": found["reward_end"], **keep})
            common.say(f"{length} {mode} lag {lag} seed {seed}: reward {found['reward_end']:.3f}")
    return rows


if __name__ == "__main__":
    main()
