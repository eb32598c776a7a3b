"""Plans asynchronous runs: sync, one-step and in-flight schedules by a discrete-event model, checked against runs, then at scale.

python -m experiments.bench.schedule --json=schedule.json --plot=schedule.svg

First the check: the quickstart with an emulated accelerator (recorded latencies slept) runs in every mode, with real threads,
queue and learner; the model gets the same latencies, lengths and update time, and `*_predicted_over_measured` compares seconds a
step. Then the plan for 64 to 4,096 accelerators: heavy-tailed responses (log-normal), engines of 8 chips, an update that is
divided among the learners plus a collective that grows with their number; for each scale and schedule the best division of
devices. `rows` has them all; the picture shows utilisation against staleness and scale.
"""

import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.ablations import plots
from experiments.bench import form
from experiments.bench.runtime import Starts, side
from experiments.bench.simulate import SCHEDULES, Machine, Outcome, simulate
from experiments.figures import MUTED

SCALES = (64, 256, 1024, 4096)
LIMITS = (1, 2, 4, 8)
ENGINE = 8  # chips
TRIED = 256
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)  # of devices that learn


def accelerators(batch_tokens: float) -> Machine:
    """A model accelerator: an engine of 8 chips with a 7B policy.

    A round reads the weights (2 ms at 8 x 1 TB/s) and costs 12 microseconds a row above that; an update of the batch takes
    6 x 7e9 x tokens operations at 40 % of 400 TFLOP/s a chip, and 50 ms + 10 ms a doubling for collectives; publishing 0.5 s.
    """

    def update_s(learners: int) -> float:
        return 6 * 7e9 * batch_tokens / (learners * 0.4 * 400e12) + 0.05 + 0.01 * np.log2(learners)

    rounds = {rows: 2e-3 + 12e-6 * rows for rows in (1, 16, 64, 256)}
    return Machine(rounds, 1.0, 256, update_s, publish_s=0.5)


def lengths(count: int, median: float, sigma: float, longest: int, seed: int = 0) -> list[int]:
    """Heavy-tailed response lengths in tokens."""
    drawn = median * np.exp(sigma * np.random.default_rng(seed).standard_normal(count))
    return np.clip(drawn, 16, longest).astype(int).tolist()


def plan(scales: Sequence[int], limits: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Each schedule at each scale with its best division of devices; 32 responses a chip and batch.

    Divisions are tried at up to `TRIED` devices; larger scales take over the best one.
    """
    rows = []
    chosen: dict[tuple[str, int], float] = {}
    for devices in sorted(scales):
        batch = 32 * devices
        drawn = lengths(min(batch * 2, 200_000), 800, 1.0, 16_384)
        machine = accelerators(batch * float(np.mean(drawn)))
        for schedule, limit in (("sync", 0), ("one_step", 1), *(("in_flight", k) for k in limits)):
            best: tuple[Outcome, float] | None = None
            known = chosen.get((schedule, limit))
            shares = (1.0,) if schedule == "sync" else SHARES if known is None or devices <= TRIED else (known,)
            for share in shares:
                learners = max(ENGINE, int(devices * share) // ENGINE * ENGINE) if schedule != "sync" else None
                found = simulate(
                    schedule, machine, drawn, devices=devices, learners=learners, devices_per_engine=ENGINE, batch=batch,
                    limit=limit, steps=steps,
                )  # fmt: skip
                if best is None or found.step_s < best[0].step_s:
                    best = found, share
            rows.append(
                {"devices": devices, "schedule": schedule, "limit": limit, "learner_share": best[1], **best[0]._asdict()}
            )
    return rows


def check(changes: Mapping[str, Any], steps: int) -> dict[str, float]:
    """The model against runs with real threads and an emulated accelerator."""
    with tempfile.TemporaryDirectory() as folder:
        starts = Starts(pathlib.Path(folder), changes)
        found = side(starts.ask("quickstart", "sync", True, 0, steps, emulated=True))
    pace = found["pace"]
    curve = {int(n): s for n, s in pace["seconds"].items()}
    drawn = [n for batch in found["lengths"] for n in batch]
    results = {}
    for schedule, mode in zip(SCHEDULES, ("sync", "overlap", "in_flight")):
        # What is not generation: the learner's own step, measured in the same run as the schedule that is predicted.
        learn = found[mode]["step_s"] - found[mode]["generate_s"] - found[mode]["learner_wait_s"]
        machine = Machine(curve, pace["tokens"], pace["rows"], lambda learners, learn=learn: learn)
        how = dict(devices=1) if schedule == "sync" else dict(devices=2, learners=1)
        predicted = simulate(schedule, machine, drawn, batch=len(found["lengths"][0]), limit=1, steps=steps, **how)
        results[f"{schedule}_predicted_s"] = predicted.step_s
        results[f"{schedule}_measured_s"] = found[mode]["step_s"]
        results[f"{schedule}_predicted_over_measured"] = predicted.step_s / found[mode]["step_s"]
    return results


def plot(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Utilisation against mean staleness, one line a scale from sync through the limits of in_flight, one-step as a cross beside
    it; and steps a second over those of sync, by scale."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    scales = sorted({r["devices"] for r in rows})
    for i, devices in enumerate(scales):
        for marks, label, chosen in (("o-", f"{devices:,}", ("sync", "in_flight")), ("x", None, ("one_step",))):
            own = [r for r in rows if r["devices"] == devices and r["schedule"] in chosen]
            own.sort(key=lambda r: r["staleness_mean"])
            x, y = ([r[name] for r in own] for name in ("staleness_mean", "utilization"))
            left.plot(x, y, marks, color=f"C{i}", label=label)
    if any(r["schedule"] == "one_step" for r in rows):
        left.plot([], [], "x", color=MUTED, label="one step")
    left.set_xlabel("mean staleness, versions")
    left.set_ylabel("utilisation of all devices")
    left.legend(title="devices", frameon=False)
    for name, limit in dict.fromkeys((r["schedule"], r["limit"]) for r in rows):
        own = [r for r in rows if (r["schedule"], r["limit"]) == (name, limit)]
        sync = {r["devices"]: r["step_s"] for r in rows if r["schedule"] == "sync"}
        label = name.replace("_", " ") + (f" {limit}" if name == "in_flight" else "")
        right.plot([r["devices"] for r in own], [sync[r["devices"]] / r["step_s"] for r in own], "o-", label=label)
    right.set_xscale("log", base=2)
    right.set_xlabel("devices")
    right.set_ylabel("steps per second over sync")
    right.set_ylim(top=1.35 * max(sync[r["devices"]] / r["step_s"] for r in rows))
    right.legend(frameon=False, ncols=3, loc="upper center")
    plots.save(figure, path)


def main(argv=None) -> dict[str, Any]:
    parser = form.parser(__doc__)
    parser.add_argument("--scales", default=",".join(map(str, SCALES)), help="numbers of devices, multiples of 16")
    parser.add_argument("--limits", default=",".join(map(str, LIMITS)), help="staleness limits of in_flight")
    parser.add_argument("--steps", type=int, default=10, help="batches of a simulated run")
    parser.add_argument(
        "--check_steps", type=int, default=15, help="batches of the runs that the model is checked against; 0: none"
    )
    parser.add_argument("--changes", default="{}", help="JSON of config fields to change in those runs, for small forms")
    parser.add_argument("--plot", default="", metavar="FILE", help="picture of the plan")
    args = parser.parse_args(argv)
    numbers = [tuple(int(x) for x in text.split(",") if x) for text in (args.scales, args.limits)]
    results: dict[str, Any] = {}
    if args.check_steps:
        results |= check(json.loads(args.changes), args.check_steps)
    rows = plan(*numbers, args.steps)
    for r in rows:
        print(
            f"  {r['devices']:>5} devices {r['schedule']:<10} limit {r['limit']}: {r['step_s']:8.2f} s a step, utilisation "
            f"{r['utilization']:.2f}, staleness {r['staleness_mean']:.2f} (most {r['staleness_max']:.0f})"
        )
    if args.plot:
        plot(rows, pathlib.Path(args.plot))
    return form.finish("schedule", vars(args), results | {"rows": rows}, args.json)


if __name__ == "__main__":
    main()
