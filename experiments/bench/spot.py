"""Does training the drafter in a rollout's tail delay the rollout? Two device groups, one of them idle early.

python -m experiments.bench.spot --json=spot.json          (--tokens=64 --repeats=3 for a look)

A rollout of a few long and many short responses is spread over two devices. With `spot` the one whose share has ended trains the
drafter until the other's has; without, it idles. Both sides run in turn and draw the same tokens. `rollout_end_ratio` is when the
rollout was over with training, by when it was without: the median of the pairs. Two cores of one machine share caches and the way
to memory, which two accelerators do not: `rollout_end_ratio_asleep` is the same with steps that take as long as the real ones did, but
sleep where a device would compute; all that the host does for them remains. Without accelerators, two CPU devices stand for them,
on both sides alike with one core each: whatever a group launches runs within its own thread, and that thread stays on its core. (As
JAX comes, all CPU devices of a process share one pool of threads: a rollout that is left alone takes both cores, so training on
"the other device" could not but slow it down.) It takes two idle cores to say anything.
"""

import os

if "XLA_FLAGS" not in os.environ:  # before JAX is imported: an operation is one thread's work, and the pool has none to spare
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
    os.environ.setdefault("PJRT_NPROC", "1")
    os.environ.setdefault("NPROC", "1")  # what other versions of XLA call it

import time
from typing import Any

import jax
import numpy as np

from adrl_jax.bandit.fixed import fixed
from adrl_jax.drafter.buffer import DataBuffer, Sample
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.drafter.trainer import DrafterTrainer, Heads, TrainerConfig
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout, init_params
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.runtime.groups import EngineGroup, Grouped
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, Rollout, SamplingParams
from experiments.bench import form

SIDES = ("without", "with", "asleep")
CONFIG = ModelConfig("llama", 1024, 256, 768, 4, 4, 2, 64, max_positions=2048)
GROUPS, ROW = 2, 512


def requests_of(tokens: int, short: int = 8) -> list[Request]:
    """Even prompts (group 0) are answered with `tokens` tokens, odd ones (group 1) with an eighth of them."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, rng.integers(0, CONFIG.vocab_size, 16)) for i in range(8)]
    return [Request(p, 0, 0, p.prompt_id, tokens if p.prompt_id % 2 == 0 else max(tokens // short, 1)) for p in prompts]


class Pinned(Engine):
    """An engine whose calls, and whatever their thread does afterwards, stay on one core."""

    core: int | None = None

    def serving(self, *args, **more):
        made = super().serving(*args, **more)
        run = made.run

        def pinned():
            if self.core is not None:
                os.sched_setaffinity(0, {self.core})  # of the calling thread
            return run()

        made.run = pinned
        return made


class Asleep:
    """A drafter step that takes its time, changes nothing and needs no core."""

    def __init__(self, seconds: float, metrics: dict[str, Any]):
        self.seconds, self.metrics = seconds, metrics

    def __call__(self, state, fixed, head, lesson):
        time.sleep(self.seconds)
        return state, self.metrics


class World:
    """Two engines with a trainer that may be switched on and off."""

    def __init__(self, tokens: int):
        self.requests = requests_of(tokens)
        params = init_params(CONFIG, jax.random.key(0))
        drafter = Eagle(CONFIG)
        self.own = drafter.init_params(jax.random.key(1))
        served, own = engine_layout(params, CONFIG), engine_layout(self.own, CONFIG)
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-4))
        self.opt_state = optimizer.init(self.own)
        devices = jax.devices()[:GROUPS]
        settings = EngineConfig(
            seed=0,
            eos_ids=(),
            strategies=(OFF, Strategy("eagle", 3)),
            max_batch=4,
            batch_buckets=(4,),
            cache_bucket=512,
        )
        heads = Heads()
        heads.add(0, served)
        sizes = TrainerConfig(rows=1)
        self.trainer = DrafterTrainer(CONFIG, DrafterLossConfig(), optimizer, DataBuffer(1 << 28, ROW), heads, sizes)
        self.trainer.buffer.begin_step(0)
        engines = [Pinned(CONFIG, settings, {"eagle": drafter}) for _ in devices]
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.cores = cores[:GROUPS] if len(cores) >= GROUPS and devices[0].platform == "cpu" else None
        for engine, core in zip(engines, self.cores or ()):
            engine.core = core
        self.group = EngineGroup(engines, devices, lambda group: self.trainer.try_step(devices[group]))
        self.group.publish(served, 0, {"eagle": own})
        self.group.collect = lambda rollout, hidden: self.trainer.buffer.add(Sample(rollout, hidden, 0, 0))
        self.step = self.trainer._step
        self.trainer._step = self._measured
        self.seconds: list[float] = []
        self.metrics: dict[str, Any] = {}
        self.rollouts: dict[str, list[Rollout]] = {}

    def _measured(self, *args):
        began = time.perf_counter()
        state, self.metrics = jax.block_until_ready(self.step(*args))
        self.seconds.append(time.perf_counter() - began)
        return state, self.metrics

    def run(self, side: str) -> dict[str, float]:
        """One rollout: when it was over, how many steps were made meanwhile, and until when the last of them went on."""
        training = side != "without"
        if training:
            self.trainer._step = self._measured
            self.trainer.load(self.own, self.opt_state, 0)
            self.trainer.prepare(self.group.devices)
        if side == "asleep":
            self.trainer._step = Asleep(form.median(self.seconds[-20:]), self.metrics)
        bandit = Grouped(fixed(1, 2), GROUPS)
        result = self.group.generate(self.requests, SamplingParams(1.0), bandit, bandit.init())
        log = self.group.spot.wait()
        if training:
            self.trainer.unload()
        self.rollouts[side] = result.rollouts
        late = max((s.end for s in log.steps), default=0.0) - log.over
        return {"over": log.over, "steps": len(log.steps), "late": max(late, 0.0), "tail": log.over - min(log.finished)}


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=384, help="response tokens of the long responses, at most 480")
    args = parser.parse_args(argv)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # programs run in the thread that launches them
    if jax.device_count() < GROUPS:
        parser.error(f"needs {GROUPS} devices, there are {jax.device_count()}; unset XLA_FLAGS or ask it for two")
    world = World(args.tokens)

    def side(name: str):
        def once() -> dict[str, float]:
            record = world.run(name)
            print(f"  {name:<7}: over after {record['over']:.2f} s, {record['steps']} drafter steps", flush=True)
            return record

        return once

    records = form.alternate({name: side(name) for name in SIDES}, max(args.repeats, form.MIN_PAIRS), warmup=2)
    ends = {name: [r["over"] for r in found] for name, found in records.items()}
    results = form.ratio(ends["with"], ends["without"]).results("rollout_end_ratio")
    results |= form.ratio(ends["asleep"], ends["without"]).results("rollout_end_ratio_asleep")
    results |= {f"rollout_s_{name}": form.median(found) for name, found in ends.items()}
    results["drafter_steps"] = form.median(records["with"], "steps")
    results["last_step_late_s"] = form.median(records["with"], "late")
    results["one_core_each"] = world.cores is not None
    results["tail_s"] = form.median(records["without"], "tail")
    results["drafter_steps_asleep"] = form.median(records["asleep"], "steps")
    found = [[r.token_ids.tolist() for r in world.rollouts[name]] for name in SIDES]
    results["identical_tokens"] = found[0] == found[1] == found[2]
    return form.finish("spot", vars(args), results, args.json)


if __name__ == "__main__":
    main()
