"""One whole GRPO step on a real model: generate, reward, pack, update, publish. Forced lengths, temperature 1.

python -m experiments.bench.step --model=smollm2 --json=step.json --peer=trl --peer_python=trl=/path/python,…

Two sizes: 4 prompts x 4 responses x 64 tokens, and 1 x 4 x 256. `generate_s` includes prefill, `update_s` packing, the
optimizer step and publishing the new weights to the engine. `flops_fraction_of_peak` sets the useful work of the 4x4x64
optimizer step (6 x body parameters x unique tokens, the vocabulary projection on response positions, attention inside
segments) against the best matrix product of this machine in this run. Peers run one at a time after ours, each beside a
second set of our steps: two of them do not fit into a laptop's memory.
"""

import dataclasses
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.fixed import fixed
from adrl_jax.learner import packing
from adrl_jax.learner.advantages import group_normalized
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.learner.update import data_mesh, init_state, make_update
from adrl_jax.models import weights
from adrl_jax.models.families import ModelConfig
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.runtime import publish
from adrl_jax.speculation.strategy import OFF
from adrl_jax.types import Request, Rollout, SamplingParams
from experiments.bench import form, workload
from experiments.bench.peers import client

SEED = 0
LEARNING_RATE = 1e-6
SAMPLING = SamplingParams(temperature=1.0)


class Size(NamedTuple):
    """`prompts` x `samples` responses of exactly `tokens` tokens; a group is packed into `rows_per_group` rows."""

    name: str
    prompts: int
    samples: int
    tokens: int
    microbatch_rows: int
    rows_per_group: int


# Half of each batch at a time: a whole one would need more than 6 GB with the engine beside it.
SIZES = (Size("4x4x64", 4, 4, 64, 2, 1), Size("1x4x256", 1, 4, 256, 1, 2))


class Step:
    """Our step. Calling it runs one and returns its seconds: `seconds`, `generate_s`, `update_s`, `optimizer_s`."""

    def __init__(self, model: weights.Model, engine: Engine, learner: dict[str, Any], size: Size):
        self.model, self.engine, self.learner, self.size = model, engine, learner, size
        self.requests = [
            Request(prompt, visit=0, sample=s, group_id=prompt.prompt_id, max_new_tokens=size.tokens, forced_length=True)
            for prompt in workload.prompts(model.tokenizer, size.prompts)
            for s in range(size.samples)
        ]
        self.update = make_update(
            model.config,
            LossConfig(),
            learner["optimizer"],
            data_mesh(1),
            microbatch_rows=size.microbatch_rows,
            temperature=SAMPLING.temperature,
            valid_vocab=model.valid_vocab,
        )
        self.flops = 0.0

    def __call__(self) -> dict[str, float]:
        start = time.perf_counter()
        bandit = fixed(0, 1)
        result = self.engine.generate(self.requests, SAMPLING, bandit, bandit.init())
        generated = time.perf_counter()
        rollouts = result.rollouts
        rewards = np.array([int(r.response_ids.sum()) % 17 / 17.0 for r in rollouts])  # differs within a group
        groups = np.array([r.group_id for r in rollouts])
        version = int(self.learner["state"].version)
        row_length = packing.round_up(self._row_tokens(rollouts), 64)
        batch = packing.pack(
            rollouts,
            list(group_normalized(rewards, groups).values),
            row_length=row_length,
            row_multiple=self.size.microbatch_rows,
            version=version,
        )
        packed = time.perf_counter()
        self.learner["state"], metrics = self.update(self.learner["state"], batch)
        jax.block_until_ready((self.learner["state"], metrics))
        updated = time.perf_counter()
        publish_weights(self.model.config, self.engine, self.learner["state"])
        end = time.perf_counter()
        self.flops = useful_flops(self.model.config, rollouts)
        if float(metrics["skipped"]):
            raise RuntimeError("the update was skipped: its loss or gradient is not finite")
        return {
            "seconds": end - start,
            "generate_s": generated - start,
            "update_s": end - generated,
            "optimizer_s": updated - packed,
        }

    def _row_tokens(self, rollouts: list[Rollout]) -> int:
        """Tokens of the longest row, its prompt counted once."""
        prompt = max(r.prompt_length for r in rollouts)
        return prompt + self.size.samples // self.size.rows_per_group * self.size.tokens


def publish_weights(config: ModelConfig, engine: Engine, state) -> None:
    shot = publish.snapshot(state.params, int(state.version), config)
    engine.publish(shot.params, shot.version)


def useful_flops(config: ModelConfig, rollouts: list[Rollout]) -> float:
    """Floating-point operations a GRPO update on these rollouts cannot do without, forward and backward (3 x forward)."""
    c = config
    heads = c.num_heads * c.head_dim
    layer = c.hidden_size * (heads + 2 * c.num_kv_heads * c.head_dim + heads)
    layer += (3 if c.gated_mlp else 2) * c.hidden_size * c.intermediate_size
    prompts = {r.group_id: r.prompt_length for r in rollouts}
    responses = [r.response_length for r in rollouts]
    tokens = sum(prompts.values()) + sum(responses)
    pairs = sum(p * (p + 1) / 2 for p in prompts.values())
    pairs += sum(r.response_length * r.prompt_length + r.response_length * (r.response_length + 1) / 2 for r in rollouts)
    body = 6.0 * c.num_layers * layer * tokens
    attention = 12.0 * c.num_layers * heads * pairs
    head = 6.0 * c.vocab_size * c.hidden_size * sum(responses)
    return body + attention + head


def with_peer(name: str, args, model: weights.Model, step: Step, notes: dict[str, str]) -> dict[str, Any]:
    """Alternates our step with the peer's, which is started for this size and ended after it."""
    size = step.size
    prompts = workload.prompts(model.tokenizer, size.prompts)
    config = {
        "model": str(workload.hf_folder(model)),
        "prompts": [p.token_ids.tolist() for p in prompts],
        "texts": [p.text for p in prompts],
        "group": size.samples,
        "new_tokens": size.tokens,
        "temperature": SAMPLING.temperature,
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
    }
    found: dict[str, Any] = {f"{name}_step_s_{size.name}": None}
    peer, reason = client.start(name, client.GRPO[name], config, client.pythons(args.peer_python))
    if peer is None:
        notes[name] = reason
        return found
    with peer:
        sides = {"ours": lambda: step()["seconds"], name: lambda: peer.run(timeout=1800.0)}
        records = form.alternate(sides, args.repeats)
    theirs = [x["seconds"] for x in records[name]]
    found[f"{name}_step_s_{size.name}"] = form.median(theirs)
    found[f"{name}_generate_s_{size.name}"] = form.median(records[name], "generate_s")
    found[f"{name}_update_s_{size.name}"] = form.median(records[name], "update_s")
    return found | form.ratio(theirs, records["ours"]).results(f"{name}_over_ours_{size.name}")


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder or file of weights")
    args = parser.parse_args(argv)
    chosen = client.names(args.peer, client.GRPO)
    model = weights.load_named(args.model) if args.model in weights.NAMED else weights.load(args.model)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=LEARNING_RATE))
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), model.params)
    # The learner owns its copy; the loaded one is not needed beside it.
    if chosen:
        workload.hf_folder(model)
    model = dataclasses.replace(model, params=None)
    learner = {"optimizer": optimizer, "state": init_state(params, optimizer)}
    del params
    config = EngineConfig(
        seed=SEED,
        eos_ids=tuple(model.tokenizer.eos_ids),
        valid_vocab=model.valid_vocab,
        strategies=(OFF,),
        max_batch=16,
        batch_buckets=(4, 16),
        rounds_per_launch=16,
    )
    engine = Engine(model.config, config)
    publish_weights(model.config, engine, learner["state"])
    steps = {size.name: Step(model, engine, learner, size) for size in SIZES}

    results: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for name, step in steps.items():
        compiled = form.first_call(step)
        records = [step() for _ in range(args.repeats + 1)][1:]
        results[f"step_s_{name}"] = form.median(records, "seconds")
        results[f"generate_s_{name}"] = form.median(records, "generate_s")
        results[f"update_s_{name}"] = form.median(records, "update_s")
        results[f"optimizer_s_{name}"] = form.median(records, "optimizer_s")
        results[f"first_step_s_{name}"] = compiled.seconds
        peak = statistics.median(form.matmul_peak() for _ in range(3))
        fraction = step.flops / results[f"optimizer_s_{name}"] / peak
        results["flops_fraction_of_peak" if name == SIZES[0].name else f"flops_fraction_of_peak_{name}"] = fraction
        results[f"matmul_peak_gflops_{name}"] = peak / 1e9
    results["peak_rss_mb"] = form.peak_rss_mb()
    for name in client.GRPO:
        for size in SIZES:
            if name in chosen:
                results |= with_peer(name, args, model, steps[size.name], notes)
            else:
                results[f"{name}_step_s_{size.name}"] = None
    return form.finish("step", vars(args), results, args.json, notes)


if __name__ == "__main__":
    main()
