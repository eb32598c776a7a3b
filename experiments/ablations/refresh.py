"""Does refreshing stale batches pay: seconds an update, tokens reused, final reward, by lag and response length.

python -m experiments.ablations.refresh --json=refresh.json --plot=refresh.svg

Three ways to learn from a batch that is `lag` policies old: `none` (as it is, no ratio), `corrected` (the clipped ratio to the law
that sampled), `refreshed` (verified with its own noise under the current policy and continued where it differs, so that it is
on-policy). `on_policy` is the same run without lag. Response lengths are those of the division task with short and with long
solutions. A refresh costs less than generating anew where `refresh_s` is below `generate_s`.

78 runs of 40 batches from one start a length, of 64 long or 256 short responses: half an hour on two slow cores. The JSON grows with each
run; the same command goes on where it was ended.
"""

import contextlib
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from adrl_jax.runtime.choice import RefreshConfig
from experiments.ablations import common, plots
from experiments.ablations.rows import Rows
from experiments.bench import form
from experiments.figures import ACCENT, INK, OURS
from experiments.schema import ConfigError

LAGS = (1, 2, 4, 8)
# One row length each: lengths chosen from batch to batch would be a program each.
LENGTHS: dict[str, dict[str, Any]] = {
    # So short a response tells little: with 64 of them a batch, even fresh ones teach nothing.
    "short": {
        "warm_start.steps": 600,
        "train.prompts_per_step": 32,
        "learner.row_multiple": 128,
        "task.median_steps": 1.5,
        "task.max_steps": 8,
        "train.max_new_tokens": 48,
        "learner.row_length": 64,
        "learner.target_multiple": 64,
    },
    "long": {"warm_start.steps": 1000, "task.median_steps": 6.0, "task.max_steps": 32, "train.max_new_tokens": 104},
}
KEYS = ("length", "mode", "lag", "seed")
ALWAYS = RefreshConfig("always")
LOSS = {"none": common.UNCORRECTED, "on_policy": "ppo_clip", "corrected": "ppo_clip", "refreshed": "ppo_clip"}
COLORS = {"none": INK, "corrected": ACCENT, "refreshed": OURS}


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
    """`refresh_over_generate_<length>_lag<k>`: seconds of a refresh over those of generating anew; below 1 it costs less.
    `refreshed_less_on_policy_<length>_lag<k>`: reward against the run without lag, mean over seeds."""
    out = {}
    fresh = {(r["length"], r["seed"]): r["reward"] for r in rows if r["mode"] == "on_policy"}
    for length, lag in dict.fromkeys((r["length"], r["lag"]) for r in rows if r["mode"] == "refreshed"):
        own = [r for r in rows if (r["length"], r["lag"], r["mode"]) == (length, lag, "refreshed")]
        timed = [r["refresh_s"] / r["generate_s"] for r in own if r["refresh_s"]]
        if timed:
            out[f"refresh_over_generate_{length}_lag{lag}"] = statistics.median(timed)
        gaps = [r["reward"] - fresh[length, r["seed"]] for r in own if (length, r["seed"]) in fresh]
        if gaps:
            out[f"refreshed_less_on_policy_{length}_lag{lag}"] = statistics.mean(gaps)
    return out


def plot(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Final reward, share of tokens reused and cost of a refresh against lag, one column a length; 95 % bands over seeds."""
    lengths = list(dict.fromkeys(r["length"] for r in rows))
    lags = sorted({r["lag"] for r in rows} - {0})
    with plots.style():
        figure = Figure(figsize=(4.0 * len(lengths) + 0.6, 6.4), layout="constrained")
        axes = figure.subplots(3, len(lengths), squeeze=False, sharex="col", sharey="row")
        for column, length in enumerate(lengths):
            reward, reused, cost = axes[:, column]
            own = [r for r in rows if r["length"] == length]
            fresh = [r["reward"] for r in own if r["mode"] == "on_policy"]
            if fresh:
                reward.axhline(statistics.mean(fresh), color="#2aa198", linestyle="--", linewidth=1.4, label="no lag")
            for mode, color in COLORS.items():
                groups = [[r["reward"] for r in own if (r["mode"], r["lag"]) == (mode, lag)] for lag in lags]
                plots.band(reward, range(len(lags)), groups, color, mode)
            made = [r for r in own if r["mode"] == "refreshed" and r["refresh_s"]]
            by_lag = [[r for r in made if r["lag"] == lag] for lag in lags]
            plots.band(reused, range(len(lags)), [[r["reused"] for r in g] for g in by_lag], OURS, "")
            plots.band(cost, range(len(lags)), [[r["refresh_s"] / r["generate_s"] for r in g] for g in by_lag], OURS, "")
            cost.axhline(1.0, color=INK, linewidth=1, linestyle=":")
            cost.set_ylim(bottom=0)
            reward.set_title(f"{length} responses")
            cost.set_xlabel("age of the data, in policies")
            cost.set_xticks(range(len(lags)), [str(lag) for lag in lags])
            for ax in axes[:, column]:
                ax.grid(True, axis="y")
        axes[0, 0].set_ylabel("reward at the end")
        axes[1, 0].set_ylabel("tokens reused")
        axes[2, 0].set_ylabel("seconds, refresh / anew")
        plots.legend(figure, axes[0, 0])
        plots.save(figure, path)


def main(argv=None) -> dict[str, Any]:
    parser = form.parser(__doc__)
    parser.add_argument("--lags", default=",".join(map(str, LAGS)), help="policies")
    parser.add_argument("--lengths", default=",".join(LENGTHS), help="of " + ", ".join(LENGTHS))
    parser.add_argument("--steps", type=int, default=40, help="batches of each run")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate of all")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell")
    parser.add_argument("--changes", default="{}", help="JSON of config fields to change everywhere, for small forms")
    parser.add_argument(
        "--workdir", type=pathlib.Path, default=pathlib.Path("runs/refresh"), help="folder of the shared starts"
    )
    parser.add_argument("--plot", default="", metavar="FILE", help="picture of the table")
    args = parser.parse_args(argv)
    lengths = common.chosen(parser, "lengths", args.lengths, tuple(LENGTHS))
    lags, given = common.numbers(args.lags), common.changes(parser, args.changes)
    common.check_sizes(parser, lags, 1, steps=args.steps, seeds=args.seeds)
    asked = {**vars(args), "workdir": ""}
    wanted = [(n, *cell, seed) for n in lengths for seed in range(args.seeds) for cell in cells(lags)]
    try:
        rows = Rows("refresh", args.json, asked, same=("steps", "rate", "changes"), keys=KEYS, wanted=wanted)
        with contextlib.ExitStack() as stack:
            worlds: dict[str, common.Runs] = {}
            for length, mode, lag, seed in rows.missing:
                if length not in worlds:
                    changes = LENGTHS[length] | given
                    worlds[length] = stack.enter_context(common.Runs(args.workdir / length, args.steps, args.rate, changes))
                more = {"refresh": ALWAYS} if mode == "refreshed" else {}
                found = worlds[length].run(LOSS[mode], seed, mode="lagged", limit=lag, **more)
                kept = {k: found[k] for k in ("seconds", "reused", "refresh_s", "generate_s", "disagreement")}
                row = {"mode": mode, "lag": lag, "length": length, "seed": seed, "reward": found["reward_end"], **kept}
                rows.add(row, f"{length} {mode} lag {lag} seed {seed}: reward {found['reward_end']:.3f}")
    except ConfigError as error:
        parser.error(str(error))
    print(table(rows.rows))
    if args.plot:
        plot(rows.rows, pathlib.Path(args.plot))
    return form.finish("refresh", asked, {"rows": rows.rows, **verdict(rows.rows)}, args.json)


def cells(lags: Sequence[int]) -> list[tuple[str, int]]:
    """(mode, lag) of all runs of a seed."""
    return [("on_policy", 0), *((mode, lag) for mode in ("none", "corrected", "refreshed") for lag in lags)]


if __name__ == "__main__":
    main()
