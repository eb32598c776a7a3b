"""What the kernels for GPUs are worth on one: correctness, bandwidth, a verify round against a plain step, rollout tokens/s.

sh experiments/bench/kernels_gpu.sh kernels_gpu.json      (under 8 minutes on one Hopper GPU)
python -m experiments.bench.kernels_gpu --size=tiny --kernels=xla    (a rehearsal on any machine)

The model has random weights of a real model's sizes: speed does not depend on them. Drafts of a speculative round stand by
coin (`--acceptance`), so that the engine is measured apart from a drafter's luck. Bandwidth counts `minimum_bytes` of each
op, and is set against a copy measured in the same run. Times are medians over repeats of calls that are waited for.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels import choice
from adrl_kernels.sample_head import arguments as head_arguments
from adrl_kernels.sample_head import reference as head_reference
from adrl_kernels.sample_head import sample_head
from adrl_kernels.verify_attention import arguments as attention_arguments
from adrl_kernels.verify_attention import reference as attention_reference
from adrl_kernels.verify_attention import verify_attention
from adrl_kernels.verify_attention.arguments import Cache, Nodes

from adrl_jax.bandit.fixed import fixed
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout, init_params
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.speculation.ngram import Ngram
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, SamplingParams
from experiments.bench import form

DEPTH = 7  # drafts; a verify round has one token more
MAX_ERROR = {"verify_attention": 0.02, "sample_head": 0.01}
"""For bfloat16 inputs: outputs around 1 that are rounded to bfloat16, and scores up to 30 that are float32."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a run. `calls`: kernel calls timed together, so that starting one does not count."""

    model: ModelConfig
    capacity: int
    copy_mb: int
    tokens: int
    batches: tuple[int, ...]
    calls: int


SIZES = {
    "1.5b": Size(
        ModelConfig("llama", 151_936, 1536, 8960, 28, 12, 2, 128, max_positions=8192, dtype="bfloat16"),
        4096,
        1024,
        512,
        (1, 4, 16),
        50,
    ),
    "tiny": Size(ModelConfig("llama", 304, 128, 192, 2, 4, 2, 64, max_positions=256, dtype="bfloat16"), 128, 1, 24, (1, 4), 2),
}


def attention_inputs(size: Size, batch: int, nodes: int) -> tuple[Nodes, Cache, jax.Array]:
    """Rows of three quarters of the capacity, give or take."""
    m, rng = size.model, np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)  # noqa: E731
    lengths = np.linspace(size.capacity // 2, size.capacity - nodes, batch).astype(np.int32)
    sees = jnp.broadcast_to(jnp.tril(jnp.ones((nodes, nodes), bool)), (batch, nodes, nodes))
    fresh = [draw(batch, nodes, heads, m.head_dim) for heads in (m.num_heads, m.num_kv_heads, m.num_kv_heads)]
    kv = (batch, m.num_kv_heads)
    cache = Cache(draw(*kv, m.head_dim, size.capacity), draw(*kv, size.capacity, m.head_dim))
    return Nodes(fresh[0] * m.head_dim**-0.5, *fresh[1:], sees), cache, jnp.asarray(lengths)


def head_inputs(size: Size, count: int) -> tuple[jax.Array, ...]:
    m, rng = size.model, np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((count, m.hidden_size), np.float32), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((m.vocab_size, m.hidden_size), np.float32) * 0.05, jnp.bfloat16)
    keys = jnp.asarray(rng.integers(0, 2**32, (count, 2), dtype=np.uint32))
    return hidden, weight, keys, jnp.ones(count, jnp.float32)


def seconds(function, args, calls: int, repeats: int) -> float:
    """Of one call, as the median over repeats of `calls` calls."""
    function = jax.jit(function)
    form.first_call(lambda: function(*args))

    def several():
        return [function(*args) for _ in range(calls)]

    side = form.timed(several)
    return form.median([side() for _ in range(repeats)]) / calls


def copy_bandwidth(size: Size, repeats: int) -> float:
    """Bytes a second, read and written, of an addition over a large array."""
    x = jnp.zeros(size.copy_mb * 2**18, jnp.float32)
    return 2 * x.nbytes / seconds(lambda x: x + 1, (x,), max(size.calls // 10, 1), repeats)


def ops(size: Size, kernels: str, copy: float, repeats: int) -> list[dict[str, Any]]:
    """Correctness (against the op's reference, which sums in float32) and bandwidth of each op and batch."""
    rows = []
    for batch in size.batches:
        nodes = DEPTH + 1
        case = attention_inputs(size, batch, nodes)
        run = functools.partial(verify_attention, implementation=kernels)
        error = jnp.max(jnp.abs(jax.jit(run)(*case).astype(jnp.float32) - jax.jit(attention_reference.verify_attention)(*case)))
        moved = attention_arguments.minimum_bytes(*case[:2], np.asarray(case[2]))
        rows.append(_row("verify_attention", kernels, batch, float(error), moved, run, case, size, copy, repeats))

        inputs = head_inputs(size, batch * nodes)
        run = functools.partial(sample_head, implementation=kernels)
        exact = functools.partial(
            head_reference.sample_head, by_row=True, valid_vocab=size.model.vocab_size, draws=1, norm=None
        )
        found, right = jax.jit(run)(*inputs), jax.jit(exact)(*inputs)
        # Ids may differ at a tie only, and then the scores say so.
        error = jnp.max(jnp.abs(found.scores - right.scores)), jnp.max(jnp.abs(found.log_total - right.log_total))
        moved = head_arguments.minimum_bytes(*inputs[:2], True, size.model.vocab_size)
        rows.append(_row("sample_head", kernels, batch, float(max(error)), moved, run, inputs, size, copy, repeats))
    return rows


def _row(op, kernels, batch, error, moved, run, args, size, copy, repeats) -> dict[str, Any]:
    took = seconds(run, args, size.calls, repeats)
    return {
        "op": op,
        "kernels": kernels,
        "batch": batch,
        "max_error": error,
        "correct": error <= MAX_ERROR[op],  # false for NaN
        "us": 1e6 * took,
        "gb_per_s": moved / took / 1e9,
        "share_of_copy": moved / took / copy,
    }


class Rollouts:
    """An engine per set of kernels, and what its launches took."""

    def __init__(self, size: Size, kernels: str, acceptance: float):
        self.size = size
        self.strategies = (OFF, Strategy("ngram", DEPTH))
        config = EngineConfig(
            seed=0,
            eos_ids=(),
            strategies=self.strategies,
            max_batch=max(size.batches),
            batch_buckets=size.batches,
            simulate_acceptance=acceptance,
            rounds_per_launch=32,
            kernels=kernels,
        )
        self.engine = Engine(size.model, config, {"ngram": Ngram()})

    def run(self, batch: int, arm: int) -> dict[str, float]:
        rng = np.random.default_rng(batch)
        prompts = [Prompt(i, np.tile(rng.integers(3, 300, 8), 4)) for i in range(batch)]
        requests = [Request(p, 0, 0, p.prompt_id, self.size.tokens, forced_length=True) for p in prompts]
        bandit = fixed(arm, len(self.strategies))
        stats = self.engine.generate(requests, SamplingParams(1.0), bandit, bandit.init()).stats
        launches = [x for x in stats.launches if x.batch_bucket == batch]
        return {
            "tokens_per_s": batch * self.size.tokens / (stats.seconds - stats.compile_seconds),
            "round_s": sum(x.seconds for x in launches) / sum(x.rounds for x in launches),
        }


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="1.5b", help="sizes of the model and of the work")
    parser.add_argument("--kernels", default="xla,pallas_gpu", metavar="A,B", help="implementations, one after the other")
    parser.add_argument("--acceptance", type=float, default=0.8, help="chance that a draft stands, decided by coin")
    args = parser.parse_args(argv)
    names, size = args.kernels.split(","), SIZES[args.size]
    for name in names:
        choice.check_platform(name, "--kernels")

    copy = copy_bandwidth(size, args.repeats)
    results: dict[str, Any] = {"copy_gb_per_s": copy / 1e9}
    rows = [row for name in names for row in ops(size, name, copy, args.repeats)]
    params = engine_layout(init_params(size.model, jax.random.key(0)), size.model)
    for name in names:
        rollouts = Rollouts(size, name, args.acceptance)
        rollouts.engine.publish(params, 0)
        for batch in size.batches:
            sides = {s.name: functools.partial(rollouts.run, batch, i) for i, s in enumerate(rollouts.strategies)}
            records = form.alternate(sides, args.repeats)
            plain, spec = (records[s.name] for s in rollouts.strategies)
            place = f"{name}_b{batch}"
            results[f"plain_tokens_per_s_{place}"] = form.median(plain, "tokens_per_s")
            results[f"spec_tokens_per_s_{place}"] = form.median(spec, "tokens_per_s")
            results[f"verify_round_over_plain_{place}"] = form.median(spec, "round_s") / form.median(plain, "round_s")
    results["correct"] = all(row["correct"] for row in rows)
    finished = form.finish("kernels_gpu", vars(args), results | {"ops": rows}, args.json)
    if not results["correct"]:
        wrong = [f"{r['op']} by {r['kernels']} at batch {r['batch']}: {r['max_error']:.3g}" for r in rows if not r["correct"]]
        raise SystemExit(f"kernels differ from their references by more than {MAX_ERROR}: {'; '.join(wrong)}")
    return finished


if __name__ == "__main__":
    main()
