"""Importance weights in the drafter's loss, on and off, on texts of a policy 0, 1 or 4 versions old.

python -m experiments.ablations.drafter_weights --json=weights.json          (--small for a look)

The quickstart's policy is warm-started, and goes on for four more versions of `--updates` supervised updates each. Texts are drawn by
the version `lag` before the last; the last one reads them (as a learner's pass does anyway), so hidden states and teacher are
current while contexts are old. A drafter that knows version 0 learns from them, each response weighted by the current law over the one
that drew it (`drafter.importance`): not at all, by token, by prefix. Then it drafts for the last version on held-out prompts, always
with the same noise. Figures: accept length by lag and weights, and the mean weight.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.fixed import fixed
from adrl_jax.drafter.buffer import DataBuffer, Sample
from adrl_jax.drafter.importance import KINDS
from adrl_jax.drafter.lessons import unpack_hidden
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.drafter.trainer import DrafterTrainer, Heads, TrainerConfig
from adrl_jax.learner import packing
from adrl_jax.learner.forward import ForwardConfig, forward
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.transformer import engine_layout
from adrl_jax.runtime import collect
from adrl_jax.runtime.parts import EVALUATION_VISIT, Parts
from adrl_jax.types import Rollout, SamplingParams
from experiments import build, config
from experiments.bench import form
from experiments.configs import quickstart

LAGS, VERSIONS, DEPTH = (0, 1, 4), 4, 5
ROW = 128
SMALL = {"warm_start.examples": 512, "warm_start.batch_size": 16, "task.train_prompts": 64, "task.eval_prompts": 16}


def history(parts: Parts, first: int, updates: int) -> tuple[list[Any], Any]:
    """Weights of versions 0 … 4, and the drafter of version 0."""
    learner, policies, drafter = parts.init_learner(), [], None
    for step in range(first + VERSIONS * updates):
        learner, _ = parts.warm_update(learner, parts.warm_batch(step))
        if step + 1 >= first and (step + 1 - first) % updates == 0:
            policies.append(jax.tree.map(lambda x: jnp.array(x, copy=True), learner.params))
            drafter = jax.tree.map(np.array, learner.drafter_params) if drafter is None else drafter
    return policies, drafter


def drawn(parts: Parts, params: Any, drafter: Any, version: int, prompts: Any, visit: int, arm: int, longest: int):
    """Responses of a version to some prompts, and how they came about."""
    c = parts.model_config
    parts.engine.publish(engine_layout(params, c), version, {"eagle": engine_layout(drafter, c)})
    requests = collect.requests_for(prompts, [visit] * len(prompts), 1, longest)
    bandit = fixed(arm, len(parts.strategies))
    return parts.engine.generate(requests, SamplingParams(1.0), bandit, bandit.init())


def reread(parts: Parts, params: Any, rollouts: list[Rollout], version: int) -> list[Sample]:
    """The texts with what another version makes of them, by the learner's own forward pass."""
    run = jax.jit(functools.partial(forward, model_config=parts.model_config, config=ForwardConfig()))
    samples = []
    for i in range(0, len(rollouts), 32):
        chosen = rollouts[i : i + 32]
        batch = packing.pack(chosen, [0.0] * len(chosen), row_length=ROW, layout="plain", target_multiple=ROW, row_multiple=32)
        out = run(params, batch=batch)
        hidden = unpack_hidden(batch, out.hidden, len(chosen))
        log_probs = packing.unpack_targets(batch, out.log_probs, len(chosen))
        samples += [Sample(r, h, version, 0, x) for r, h, x in zip(chosen, hidden, log_probs, strict=True)]
    return samples


def trained(parts: Parts, params: Any, drafter: Any, samples: list[Sample], kind: str, cap: float, steps: int, rate: float):
    """The drafter after some steps on the samples, and the mean of its weights."""
    buffer, heads = DataBuffer(1 << 30, ROW), Heads()
    buffer.begin_step(0)
    for s in samples:
        buffer.add(s)
    heads.add(VERSIONS, engine_layout(params, parts.model_config))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=rate))
    loss = DrafterLossConfig(1.0, 1.0, importance_weights=kind, importance_cap=cap)
    trainer = DrafterTrainer(parts.model_config, loss, optimizer, buffer, heads, TrainerConfig(rows=8))
    trainer.load(drafter, optimizer.init(drafter), 0)
    rows = [trainer.step() for _ in range(steps)]
    return trainer.unload().params, float(np.mean([row.get("weight", 1.0) for row in rows]))


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--first", type=int, default=600, help="supervised updates before version 0")
    parser.add_argument("--updates", type=int, default=60, help="supervised updates between versions")
    parser.add_argument("--texts", type=int, default=512, help="responses to learn from")
    parser.add_argument("--steps", type=int, default=200, help="training steps of each drafter")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="of the drafter")
    parser.add_argument("--cap", type=float, default=2.0, help="no weight is larger")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a minute, to see that it runs; figures mean nothing")
    args = parser.parse_args(argv)
    c = quickstart.get_config()
    c.seed, c.rollout.strategies, c.bandit.arm = args.seed, ("off", f"eagle-d{DEPTH}"), "off"
    sizes = (args.first, args.updates, args.texts, args.steps)
    if args.small:
        c.update_from_flattened_dict(SMALL)
        sizes = (6, 2, 32, 4)
    first, updates, texts, steps = sizes
    settings = config.freeze(c)
    longest = settings.train.max_new_tokens

    results: dict[str, Any] = {"accept_length": {}, "mean_weight": {}}
    with contextlib.ExitStack() as stack:
        parts = stack.enter_context(build.opened(settings))
        policies, drafter = history(parts, first, updates)
        prompts = [parts.train_prompts[i] for i in range(min(texts, len(parts.train_prompts)))]

        def accept_length(own: Any) -> float:
            found = drawn(parts, policies[-1], own, VERSIONS, list(parts.eval_prompts), EVALUATION_VISIT, 1, longest)
            return float(found.stats.accept_length)

        results["accept_length_untrained"] = accept_length(drafter)
        for lag in LAGS:
            version = VERSIONS - lag
            found = drawn(parts, policies[version], drafter, version, prompts, lag, 0, longest)
            samples = reread(parts, policies[-1], found.rollouts, VERSIONS)
            lengths, weights = {}, {}
            for kind in KINDS:
                own, mean = trained(
                    parts, policies[-1], drafter, samples, kind, args.cap, steps, args.learning_rate
                )  # fmt: skip
                lengths[kind], weights[kind] = accept_length(own), mean
            results["accept_length"][str(lag)], results["mean_weight"][str(lag)] = lengths, weights
    return form.finish("drafter_weights", vars(args), results, args.json)


if __name__ == "__main__":
    main()
