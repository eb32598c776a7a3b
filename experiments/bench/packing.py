"""Packed against padded batches of heavy-tailed lengths, in the drafter's training step.

python -m experiments.bench.packing --json=packing.json            (--samples=16 --longest=256 for a look)

Both sides take the same responses, once each, with the same loss and optimizer: `packed` lays them end to end in rows of the
longest one's length (`drafter.lessons`), `padded` puts `--batch` of them, as they come, into a batch as long as its longest. A
useful token is a response token. Before anything is timed, the gradients of both are compared over the first `--compared` responses.
About three minutes on two cores, most of them compilation: a padded batch of another length is another program.
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.drafter import warmup
from adrl_jax.drafter.buffer import Sample
from adrl_jax.drafter.lessons import pack_samples
from adrl_jax.drafter.loss import DrafterLossConfig, packed_drafter_loss
from adrl_jax.drafter.warmup import Lesson
from adrl_jax.learner import packing
from adrl_jax.learner.forward import Forward, ForwardConfig
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import init_params
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.types import FinishReason, Rollout, SamplingParams
from experiments.bench import form

CONFIG = ModelConfig("llama", 4096, 256, 768, 1, 4, 2, 64)
LOSS = DrafterLossConfig(1.0, 0.1)
PROMPT, UNIT, TARGETS = 24, 64, 64


def samples_of(count: int, longest: int, median: float, sigma: float, seed: int = 0) -> list[Sample]:
    """Responses of log-normal lengths, cut at `longest` tokens with their prompt, with hidden states of the right scale."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(median), sigma, count).astype(int) + 1, 1, longest - PROMPT)
    found = []
    for i, r in enumerate(lengths.tolist()):
        ids = rng.integers(0, CONFIG.vocab_size, PROMPT + r).astype(np.int32)
        facts = (np.full(r, -5.0, np.float32), np.zeros(r, np.int32), FinishReason.STOP, SamplingParams())
        hidden = rng.normal(size=(PROMPT + r - 1, CONFIG.hidden_size)).astype(np.float32)
        found.append(Sample(Rollout(i, 0, 0, i, ids, PROMPT, r, *facts), hidden, 0, 0))
    return found


def packed(samples: Sequence[Sample], rows: int, longest: int) -> list[Lesson]:
    """First-fit-decreasing rows, `rows` to a lesson."""
    plan = packing.plan([s.rollout for s in samples], "plain", longest)
    groups = [
        [samples[m] for row in plan[i : i + rows] for segment in row for m in segment.members]
        for i in range(0, len(plan), rows)
    ]
    return [pack_samples(g, rows=rows, row_length=longest, target_multiple=TARGETS) for g in groups]


def padded(samples: Sequence[Sample], batch: int) -> list[Lesson]:
    """`batch` responses to a lesson, a row each, as long as the longest of them (in steps of 64 tokens)."""
    lessons = []
    for i in range(0, len(samples), batch):
        chosen = samples[i : i + batch]
        length = packing.round_up(max(s.tokens for s in chosen), UNIT)
        targets = packing.round_up(max(s.length for s in chosen), TARGETS)
        each = [pack_samples([s], rows=1, row_length=length, target_multiple=min(targets, length)) for s in chosen]
        whole = jax.tree.map(lambda *x: np.concatenate(x), *[warmup.arrays_of(x) for x in each])
        lessons.append(Lesson(whole[0], whole[1], each[0].temperature, each[0].reach, whole[2]))
    return lessons


def gradient_of(params, trained, lessons: Sequence[Lesson]):
    """Of the summed loss over all lessons, and the number of targets."""

    @jax.jit
    def one(trained, batch, hidden, log_probs):
        def numerator(trained):
            out = Forward(hidden, log_probs, jnp.zeros_like(log_probs))
            loss = packed_drafter_loss(LOSS, trained, params, CONFIG, ForwardConfig(), out, batch)
            return loss.numerator, loss.denominator

        return jax.grad(numerator, has_aux=True)(trained)

    parts = [one(trained, *warmup.arrays_of(x)) for x in lessons]
    return jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x), *parts)


def difference(params, trained, a: Sequence[Lesson], b: Sequence[Lesson]) -> float:
    """Largest relative distance between two gradients, leaf by leaf."""
    (left, left_count), (right, right_count) = (gradient_of(params, trained, x) for x in (a, b))
    if left_count != right_count:
        raise RuntimeError(f"the sides train on {left_count} and {right_count} targets")
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(x)) for x, y in pairs)


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--samples", type=int, default=64, help="responses")
    parser.add_argument("--compared", type=int, default=16, help="responses whose gradients are compared first")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest sequence, a multiple of 64")
    parser.add_argument("--median", type=float, default=60.0, help="response tokens")
    parser.add_argument("--sigma", type=float, default=1.2, help="deviation of the logarithm of the lengths")
    parser.add_argument("--batch", type=int, default=8, help="responses of a padded batch")
    parser.add_argument("--rows", type=int, default=2, help="rows of a packed batch")
    args = parser.parse_args(argv)
    samples = samples_of(args.samples, args.longest, args.median, args.sigma)
    params = init_params(CONFIG, jax.random.key(0))
    trained = Eagle(CONFIG).init_params(jax.random.key(1))
    lessons = {"packed": packed(samples, args.rows, args.longest), "padded": padded(samples, args.batch)}
    few = samples[: args.compared]
    print(f"  comparing gradients over {len(few)} responses", flush=True)
    apart = difference(params, trained, packed(few, args.rows, args.longest), padded(few, args.batch))
    print(f"  they differ by {apart:.1e}; {', '.join(f'{len(x)} {name} batches' for name, x in lessons.items())}", flush=True)

    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-4))
    step = warmup.make_step(CONFIG, LOSS, optimizer)
    tokens = sum(s.length for s in samples)

    def side(name: str):
        def run() -> float:
            state = warmup.init_state(jax.tree.map(jnp.array, trained), optimizer)
            began = time.perf_counter()
            for lesson in lessons[name]:
                state, _ = step(state, {}, params, lesson)
            jax.block_until_ready(state)
            rate = tokens / (time.perf_counter() - began)
            print(f"  {name}: {rate:,.0f} useful tokens/s", flush=True)
            return rate

        return run

    records = form.alternate({name: side(name) for name in lessons}, args.repeats)
    results = {f"{name}_tokens_per_s": form.median(found) for name, found in records.items()}
    results["packed_over_padded"] = float(np.median(np.divide(records["packed"], records["padded"])))
    results["gradient_difference"] = apart
    for name, found in lessons.items():
        results[f"{name}_places_used"] = tokens / sum(x.batch.target_ids.size for x in found)
        results[f"{name}_steps"] = len(found)
    results |= {"tokens": tokens, "longest_over_mean": max(s.length for s in samples) * len(samples) / tokens}
    return form.finish("packing", vars(args), results, args.json)


if __name__ == "__main__":
    main()
