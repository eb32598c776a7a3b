"""Regret of every controller in simulated worlds, against an oracle that knows them: python -m experiments.bench.bandit --json=F

What is lost, and how a world works, is defined in `adrl_jax/bandit/simulate.py`. `regret` is the seconds lost over the seconds
that the oracle would have needed: controller -> table -> mean and standard deviation over the seeds, and a 95 % bootstrap
interval of the mean. `recovery_decisions`, for tables whose acceptance jumps: decisions after a jump until the next 20 together
are within 5 % of the oracle's rate: mean over seeds and jumps, the interval of the mean over seeds, and the slowest.
`within_bar` says of each table whether goodput's regret is at most half of BEG's or 1 % of the oracle's total, whichever is more.

A table is a JSON file in `experiments/bench/tables/`, or wherever `--tables` says:

    {"name": "cpu", "source": "where the numbers come from",
     "arms": [{"drafter": "none", "depth": 0}, {"drafter": "eagle", "depth": 4}, …],       fields of Strategy
     "batch_buckets": [1, 4, 16],                                                          ascending
     "thresholds": [1, 3],                            BEG's buckets; left out: 1, 3, 6, 12, … as many as needed
     "seconds_per_round": {"off": {"1": 0.016, …}, "eagle-d4": {"1": {"192": 0.02, "512": 0.03}, …}, …},
                                                      arm -> batch bucket -> seconds, or -> cache capacity -> seconds
     "acceptance": {"eagle": [0.8, 0.75, …]},         drafter (a tree: `eagle-w4-v16`) -> chance that the draft at each depth
                                                      stands, given that all before it did
     "world": {}}                                     what differs from `DEFAULTS` below
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from adrl_jax.bandit import simulate
from adrl_jax.bandit.acceptance import curves
from adrl_jax.bandit.base import Bandit, report_depth
from adrl_jax.bandit.beg import beg, beg_static
from adrl_jax.bandit.exp3 import exp3
from adrl_jax.bandit.fixed import fixed
from adrl_jax.bandit.goodput import goodput
from adrl_jax.bandit.thompson import thompson
from adrl_jax.bandit.ucb import ucb
from adrl_jax.speculation.strategy import Strategy
from experiments.bench import form
from experiments.figures import ACCENT, MUTED, OTHER, OURS, STYLE

TABLES = pathlib.Path(__file__).parent / "tables"
DEFAULTS = {
    "requests": 16,
    "rounds_per_launch": 8,
    "lengths": {"median": 64, "deviation": 1.0, "longest": 512},  # response tokens: log-normal, cut
    "prompt": 64,  # tokens in the cache at the start
    "drop": 0.6,  # log-odds that a policy update takes off a draft's acceptance; a number, or drafter -> number
    "recovery": 60,  # launches in which that shrinks to 1/e
    "shocks": [],  # {"at": decision, drafter: log-odds added from then on, …}
    "spread": 0.4,  # standard deviation of the log-odds between requests
    "noise": {"launch": 0.05, "outliers": 0.03, "factor": 5.0, "shared": 0.08, "memory": 30},
}
CONTROLLERS = ("off", "beg_static", "beg", "ucb", "thompson", "exp3", "goodput")
BAR_SHARE, BAR_OF_BEG = 0.01, 0.5


class Table(NamedTuple):
    """One world with its arms."""

    name: str
    strategies: tuple[Strategy, ...]
    batch_buckets: tuple[int, ...]
    thresholds: tuple[int, ...]
    world: simulate.World
    requests: int
    rounds: int


def read_table(path: pathlib.Path) -> Table:
    """Parses one file.

    Raises:
        ValueError: an entry is missing, unknown, or does not fit the others; names file and field.
    """
    raw = json.loads(path.read_text())

    def require(holds: bool, field: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"{path.name}: {field} {rule}")

    for field in ("name", "source", "arms", "batch_buckets", "seconds_per_round", "acceptance"):
        require(field in raw, field, "is missing")
    world = DEFAULTS | raw.get("world", {})
    unknown = world.keys() - DEFAULTS.keys()
    require(not unknown, f"world.{', '.join(sorted(unknown))}", f"is unknown; known are {', '.join(DEFAULTS)}")
    strategies = tuple(Strategy(**arm) for arm in raw["arms"])
    batches = tuple(raw["batch_buckets"])
    require(batches[-1] >= world["requests"], "batch_buckets", f"must reach world.requests={world['requests']}")
    groups = len({s.verify_tokens for s in strategies if s.speculates})
    thresholds = tuple(raw.get("thresholds", (1, *(3 * 2**i for i in range(groups - 1)))))

    found = raw["seconds_per_round"]
    missing = [s.name for s in strategies if s.name not in found]
    require(not missing, "seconds_per_round", f"lacks {', '.join(missing)}")
    by_arm = [[found[s.name].get(str(b)) for b in batches] for s in strategies]
    require(all(cell is not None for arm in by_arm for cell in arm), "seconds_per_round", f"lacks a batch of {batches}")
    caches = sorted({int(c) for arm in by_arm for cell in arm if isinstance(cell, Mapping) for c in cell}) or [2**30]
    seconds = np.asarray([[_over_caches(cell, caches) for cell in arm] for arm in by_arm])  # [A, B, H]
    require((seconds > 0).all(), "seconds_per_round", "must be positive")

    depth = report_depth(strategies)
    names = curves(strategies, depth).names
    for name in names if groups else ():
        require(len(raw["acceptance"].get(name, ())) >= depth, f"acceptance.{name}", f"must have {depth} depths")
    chances = np.asarray([raw["acceptance"][name][:depth] if groups else [0.5] for name in names])
    require(((0 < chances) & (chances < 1)).all(), "acceptance", "must lie between 0 and 1")

    def by_curve(values: Any, default: float = 0.0) -> list[float]:
        if not isinstance(values, Mapping):
            return [float(values)] * len(names)
        return [float(values.get(n, values.get(n.split("-w")[0], default))) for n in names]

    never = {"at": np.iinfo(np.int32).max}  # so that worlds with few shocks have the shape of those with more
    shocks = [*world["shocks"], *[never] * (4 - len(world["shocks"]))]
    f32 = np.float32
    return Table(
        raw["name"],
        strategies,
        batches,
        thresholds,
        simulate.World(
            seconds=seconds.transpose(1, 2, 0).astype(f32),
            batches=np.asarray(batches, np.int32),
            caches=np.asarray(caches, np.int32),
            logit=np.log(chances / (1 - chances)).astype(f32),
            drop=np.asarray(by_curve(world["drop"]), f32),
            recovery=f32(world["recovery"]),
            shock_at=np.asarray([s["at"] for s in shocks], np.int32),
            shock=np.asarray([by_curve({})] + [by_curve(s) for s in shocks], f32),
            spread=f32(world["spread"]),
            lengths=np.asarray([world["lengths"][k] for k in ("median", "deviation", "longest")], f32),
            prompt=f32(world["prompt"]),
            noise=np.asarray([world["noise"][k] for k in ("launch", "outliers", "factor", "shared")], f32),
            weather=f32(world["noise"]["memory"]),
        ),
        world["requests"],
        world["rounds_per_launch"],
    )


def _over_caches(cell: float | Mapping[str, float], caches: Sequence[int]) -> list[float]:
    """Seconds at each capacity; between and beyond the measured ones the nearest smaller, else the smallest."""
    if not isinstance(cell, Mapping):
        return [float(cell)] * len(caches)
    known = sorted((int(c), float(s)) for c, s in cell.items())
    return [next((s for k, s in reversed(known) if k <= c), known[0][1]) for c in caches]


def controller(name: str, table: Table) -> Bandit:
    """A controller by name, with its defaults."""
    strategies, batches = table.strategies, table.batch_buckets
    makers = {
        "off": lambda: fixed([s.depth for s in strategies].index(0), len(strategies)),
        "beg_static": lambda: beg_static(strategies, table.thresholds),
        "beg": lambda: beg(strategies, table.thresholds),
        "ucb": lambda: ucb(strategies, batches),
        "thompson": lambda: thompson(strategies, batches),
        "exp3": lambda: exp3(strategies, batches),
        "goodput": lambda: goodput(strategies, batches),
    }
    return makers[name]()


class Runner:
    """Plays controllers in worlds; worlds of the same shape share a compiled program."""

    def __init__(self, decisions: int, seeds: int):
        self.decisions, self.keys, self.programs = decisions, jax.random.split(jax.random.key(0), seeds), {}

    def __call__(self, name: str, table: Table) -> simulate.Trace:
        """Traces `[seeds, decisions]`, on the host."""
        key = (name, table.strategies, table.batch_buckets, table.thresholds, table.requests, table.rounds)
        if key not in self.programs:
            bandit = controller(name, table)

            def play(world, key):
                sizes = dict(decisions=self.decisions, requests=table.requests, rounds=table.rounds)
                return simulate.run(bandit, table.strategies, world, key, **sizes)

            self.programs[key] = jax.jit(jax.vmap(play, in_axes=(None, 0)))
        world = jax.tree.map(jnp.asarray, table.world)
        return jax.tree.map(np.asarray, self.programs[key](world, self.keys))


def summary(values: np.ndarray, resamples: int = 4000) -> dict[str, float]:
    """Mean, standard deviation and a 95 % bootstrap interval of the mean over seeds."""
    draws = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return {"mean": float(values.mean()), "sd": float(values.std(ddof=1)), "low": float(low), "high": float(high)}


def recoveries(trace: simulate.Trace, table: Table) -> dict[str, float] | None:
    """`recovery_decisions` of one controller on one table; None where nothing jumps."""
    jumps = [at for at in table.world.shock_at.tolist() if at + 20 <= trace.arm.shape[1]]
    if not jumps:
        return None
    waits = np.stack([simulate.recovery(trace, at) for at in jumps], axis=1).astype(float)  # [seeds, jumps]
    return summary(waits.mean(1)) | {"slowest": float(waits.max())}


def plot(traces: Mapping[str, Mapping[str, simulate.Trace]], path: pathlib.Path) -> None:
    """Cumulative regret by decision, one panel a table, the mean over seeds with a band of one standard deviation."""
    colors = dict(zip(CONTROLLERS, ("#9aa4b2", OTHER, ACCENT, "#7a5cc2", "#3c9d73", "#c25c84", OURS)))
    tables = list(next(iter(traces.values())))
    with matplotlib.rc_context(STYLE):
        columns = min(4, len(tables))
        rows = -(-len(tables) // columns)
        figure = Figure(figsize=(3 * columns, 2.4 * rows + 0.4), layout="constrained")
        axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
        for ax, name in zip(axes, tables):
            for who, by_table in traces.items():
                trace = by_table[name]
                lost = np.cumsum(trace.seconds * (1 - trace.ratio), axis=1, dtype=np.float64)
                total = (trace.seconds * trace.ratio).sum(1, dtype=np.float64)[:, None]
                share = 100 * lost / total
                mean, sd = share.mean(0), share.std(0)
                steps = np.linspace(0, len(mean) - 1, 120).astype(int)
                ax.plot(steps, mean[steps], label=who, color=colors[who], linewidth=1.8 if who == "goodput" else 1.2)
                ax.fill_between(steps, (mean - sd)[steps], (mean + sd)[steps], color=colors[who], alpha=0.15, linewidth=0)
            bound = 3 * max(
                np.asarray(traces[w][name].seconds * (1 - traces[w][name].ratio)).sum(1).mean()
                / (traces[w][name].seconds * traces[w][name].ratio).sum(1).mean()
                for w in ("beg", "goodput")
                if w in traces
            )
            ax.set_ylim(0, 100 * max(bound, 1e-3))
            ax.set_title(name)
            ax.grid(True, axis="y")
        for ax in axes[len(tables) :]:
            ax.set_visible(False)
        axes[0].set_ylabel("seconds lost, % of the oracle's", color=MUTED)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(traces))
        figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": None})


def main(argv: Sequence[str] | None = None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--tables", type=pathlib.Path, default=TABLES, help="folder of tables, or one file")
    parser.add_argument("--only", default="", metavar="A,B", help="names of tables; all where left out")
    parser.add_argument("--controllers", default=",".join(CONTROLLERS), metavar="A,B", help="which controllers")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each controller in each world, >= 2")
    parser.add_argument("--decisions", type=int, default=1600, help="launches of a run")
    parser.add_argument("--plot", type=pathlib.Path, default=None, metavar="FILE", help="draw cumulative regret to this file")
    args = parser.parse_args(argv)
    names = tuple(args.controllers.split(","))
    unknown = [n for n in names if n not in CONTROLLERS]
    if unknown:
        parser.error(f"controllers={','.join(unknown)} unknown; known are {', '.join(CONTROLLERS)}")
    if args.seeds < 2:
        parser.error(f"seeds={args.seeds} must be >= 2: an interval is reported")
    files = sorted(args.tables.glob("*.json")) if args.tables.is_dir() else [args.tables]
    tables = [t for t in map(read_table, files) if not args.only or t.name in args.only.split(",")]
    if not tables:
        parser.error(f"tables={args.tables} has no table{f' among {args.only}' if args.only else ''}")

    runner = Runner(args.decisions, args.seeds)
    traces = {name: {table.name: runner(name, table) for table in tables} for name in names}
    shares = {who: {t: _share(trace) for t, trace in by_table.items()} for who, by_table in traces.items()}
    results: dict[str, Any] = {"regret": {w: {t: summary(v) for t, v in by.items()} for w, by in shares.items()}}
    results["recovery_decisions"] = {
        who: {t.name: found for t in tables if (found := recoveries(traces[who][t.name], t))} for who in names
    }
    if {"beg", "goodput"} <= set(names):
        limits = {t.name: max(BAR_SHARE, BAR_OF_BEG * shares["beg"][t.name].mean()) for t in tables}
        results["bar"] = limits
        results["within_bar"] = {t: bool(shares["goodput"][t].mean() <= limit) for t, limit in limits.items()}
    if args.plot:
        plot(traces, args.plot)
    return form.finish("bandit", vars(args), results, args.json)


def _share(trace: simulate.Trace) -> np.ndarray:
    lost, total = simulate.regret(trace)
    return lost / total


if __name__ == "__main__":
    main()
