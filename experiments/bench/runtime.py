"""Overlap of generation and learning: steps per second of sync, overlap and in-flight runs, with and without the drafter.

python -m experiments.bench.runtime --json=runtime.json --plot=runtime.svg

Each side is a whole run in a process of its own, from the same warm-started weights, over the same prompts and as many updates;
first steps and compilation are left out. `sync` has one CPU device with all cores, `overlap` and `in_flight` two devices with
one core each. On such a machine both cores are busy in `sync` already, so the gain is bounded by

    overlap_bound = min((G + L) / max(s_g G, s_l L), 1 / s_g + 1 / s_l),

with G and L the seconds of generating and learning in `sync`, and s_g, s_l how much faster each is on two cores than on one,
from a `sync` run that may use one core only. `overlap_emulated_over_sync` has the generator emulated (recorded latencies slept,
not computed, stretched until G = L), as if it had a chip of its own. Steps are the repeats of a rate; every second seed runs the
sides in the opposite order. SmolLM2 has one seed.
"""

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.bench import form

MODES = ("sync", "overlap", "in_flight")
MODELS = ("quickstart", "smollm2")
SHORT = 15  # updates of the emulated runs
TWO_DEVICES = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def overlap_bound(generate: float, learn: float, speedup_generate: float, speedup_learn: float) -> float:
    """The most that overlapping on one core each can gain over taking turns on two.

    Args:
        generate, learn: G and L, seconds on two cores.
        speedup_generate, speedup_learn: s_g and s_l, two cores over one.
    """
    slower = max(speedup_generate * generate, speedup_learn * learn)
    return min((generate + learn) / slower, 1 / speedup_generate + 1 / speedup_learn)


def side(ask: Mapping[str, Any], cores: int = 2) -> dict[str, Any]:
    """Runs one side and returns what it measured.

    Raises:
        RuntimeError: it failed; its last lines are quoted.
    """
    overlapped = ask["mode"] in ("overlap", "in_flight")
    flags = TWO_DEVICES if overlapped else ONE_THREAD if cores == 1 else ""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | ({"XLA_FLAGS": flags} if flags else {})
    env.setdefault("JAX_PLATFORMS", "cpu")
    command = [sys.executable, "-m", "experiments.bench.runtime_side", json.dumps(ask)]
    if cores == 1 and shutil.which("taskset"):
        command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"side {ask} failed with exit code {done.returncode}:\n" + done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


class Starts:
    """Warm-started runs to begin from, one a model, seed and set of arms, made when first asked for."""

    def __init__(self, folder: pathlib.Path, changes: Mapping[str, Any]):
        self._folder, self._changes = folder, dict(changes)

    def ask(self, model: str, mode: str, spec: bool, seed: int, steps: int, **more: Any) -> dict[str, Any]:
        """What to send to a side."""
        common = {"model": model, "spec": spec, "seed": seed, "changes": self._changes}
        start = self._folder / f"{model}-{'spec' if spec else 'plain'}-{seed}"
        if not start.exists():
            print(f"  warm start: {start.name}", flush=True)
            side(common | {"mode": "sync", "steps": 0, "workdir": str(start)})
            (start / "summary.json").unlink(missing_ok=True)
        return common | {"mode": mode, "steps": steps, "start": str(start), **more}


def of_model(model: str, starts: Starts, steps: int, seeds: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of one model, names without its suffix, and learning curves by mode.

    With the drafter every seed runs; without, and on one core, the first seed alone: rates only.
    """
    results: dict[str, Any] = {}
    rewards: dict[str, list[float]] = {mode: [] for mode in MODES}
    curves: dict[str, list[Any]] = {}
    for spec in (False, True):
        suffix = "_spec" if spec else ""
        records: dict[str, list[dict[str, Any]]] = {mode: [] for mode in (*MODES, "one_core")}
        for turn, seed in enumerate(seeds if spec else seeds[:1]):
            order = [n for n in records if n != "one_core" or turn == 0]
            for name in order if turn % 2 == 0 else order[::-1]:
                mode, cores = ("sync", 1) if name == "one_core" else (name, 2)
                found = side(starts.ask(model, mode, spec, seed, steps), cores)
                records[name].append(found)
                print(f"  {model} {name}{suffix} seed {seed}: {found['step_s']:.3f} s a step", flush=True)
                if spec and name in MODES:
                    rewards[name].append(found["reward_end"])
                    curves.setdefault(name, []).append(found["curve"])
        for mode in MODES:
            results[f"{mode}_steps_per_s{suffix}"] = 1 / form.median(records[mode], "step_s")
        g, learn = (form.median(records["sync"], key) for key in ("generate_s", "learn_s"))
        g1, learn1 = (form.median(records["one_core"], key) for key in ("generate_s", "learn_s"))
        results |= {f"generate_s{suffix}": g, f"learn_s{suffix}": learn}
        results |= {f"two_cores_over_one_generate{suffix}": g1 / g, f"two_cores_over_one_learn{suffix}": learn1 / learn}
        bound = overlap_bound(g, learn, g1 / g, learn1 / learn)
        overlap = results[f"overlap_steps_per_s{suffix}"] / results[f"sync_steps_per_s{suffix}"]
        results |= {f"overlap_bound{suffix}": bound, f"overlap_over_sync{suffix}": overlap}
        results[f"overlap_over_bound{suffix}"] = overlap / bound
        for mode in ("overlap", "in_flight"):
            results[f"{mode}_staleness{suffix}"] = form.median(records[mode], "staleness")
    results["async_spec_over_sync_plain"] = results["overlap_steps_per_s_spec"] / results["sync_steps_per_s"]
    for mode in MODES:
        found = rewards[mode]
        results[f"reward_{mode}"] = [statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0]
    emulated = side(starts.ask(model, "sync", True, seeds[0], min(steps, SHORT), emulated=True))
    sync, overlap, in_flight = (emulated[mode]["step_s"] for mode in MODES)
    results |= {
        "overlap_emulated_over_sync": sync / overlap,
        "in_flight_emulated_over_sync": sync / in_flight,
        "in_flight_emulated_over_overlap": overlap / in_flight,
        "emulated_generate_s": emulated["sync"]["generate_s"],
        "emulated_learn_s": emulated["sync"]["learn_s"],
    }
    return results, curves


def plot(path: pathlib.Path, curves: Mapping[str, Mapping[str, Any]], responses: Mapping[str, int]) -> None:
    """Training reward against seconds and against responses, one row a model; thin lines are seeds."""
    colors = {"sync": "#6b7483", "overlap": "#2f6fed", "in_flight": "#e8833a"}
    figure = Figure(figsize=(9, 3.2 * len(curves)), layout="constrained")
    for axes, (model, by_mode) in zip(figure.subplots(len(curves), 2, squeeze=False), curves.items()):
        for mode, runs in by_mode.items():
            for i, curve in enumerate(runs):
                label = mode.replace("_", " ") if i == 0 else None
                reward = [r for _, r in curve]
                axes[0].plot([t for t, _ in curve], reward, color=colors[mode], label=label, lw=1.2, alpha=0.8)
                samples = [(k + 1) * responses[model] for k in range(len(curve))]
                axes[1].plot(samples, reward, color=colors[mode], lw=1.2, alpha=0.8)
        axes[0].set_title(model, loc="left")
        axes[0].set_xlabel("seconds")
        axes[1].set_xlabel("responses learnt from")
        axes[0].set_ylabel("training reward")
        axes[0].legend(frameon=False)
    figure.savefig(path)


def main(argv=None) -> dict[str, Any]:
    parser = form.parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--steps", type=int, default=0, help="updates of each run; 0: 50 of quickstart, 8 of smollm2")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode for the rewards' spread, quickstart only")
    parser.add_argument("--changes", default="{}", help="JSON of config fields to change on all sides, for small forms")
    parser.add_argument("--plot", default="", metavar="FILE", help="picture of the learning curves")
    args = parser.parse_args(argv)
    chosen = [m for m in args.models.split(",") if m]
    unknown = [m for m in chosen if m not in MODELS]
    if unknown:
        parser.error(f"--models={unknown[0]!r} is unknown; choose of {', '.join(MODELS)}")
    steps = {"quickstart": args.steps or 50, "smollm2": args.steps or 8}
    seeds = {"quickstart": range(args.seeds), "smollm2": range(1)}
    results: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        starts = Starts(pathlib.Path(folder), json.loads(args.changes))
        for model in chosen:
            found, curves[model] = of_model(model, starts, steps[model], seeds[model])
            results |= {name + ("" if model == chosen[0] else f"_{model}"): value for name, value in found.items()}
    if args.plot:
        plot(pathlib.Path(args.plot), curves, {"quickstart": 128, "smollm2": 64})
    return form.finish("runtime", vars(args), results, args.json)


if __name__ == "__main__":
    main()
