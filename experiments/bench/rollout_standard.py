"""Workload `standard`: 16 x 64 tokens as 4 prompts x 4 samples, and 1 x 128. Prefill included, temperature 1.

Lengths are forced. `plain` is decoding without speculation; `spec` lets a BEG-MAB choose among no speculation and the
drafters at hand. `host_gap_fraction` is the share of a plain rollout in which the device waits for the host (the worse of the
two sizes), `noise_fraction` the share of a decode step that goes into random numbers, `identical_tokens` whether speculation
changed anything (`tie_divergences` counts float ties).
"""

import functools
import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.beg import beg
from adrl_jax.models import weights
from adrl_jax.models.transformer import engine_layout
from adrl_jax.rollout import ties
from adrl_jax.rollout.engine import Engine
from adrl_jax.sampling import noise
from adrl_jax.speculation.ngram import Ngram
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Request, SamplingParams
from experiments.bench import form, sides, workload
from experiments.bench.peers import client
from experiments.bench.sides import SEED, Side, say

STRATEGIES = (OFF, Strategy("ngram", 2), Strategy("ngram", 4))
THRESHOLDS = (1, 6)  # long drafts for small batches, short ones for large
SAMPLING = SamplingParams(temperature=1.0)


class Size(NamedTuple):
    """`prompts` x `samples` responses of exactly `tokens` tokens."""

    name: str
    prompts: int
    samples: int
    tokens: int


SIZES = (Size("16", 4, 4, 64), Size("1", 1, 1, 128))


def requests(model: weights.Model, size: Size) -> list[Request]:
    return [
        Request(prompt, visit=0, sample=s, group_id=prompt.prompt_id, max_new_tokens=size.tokens, forced_length=True)
        for prompt in workload.prompts(model.tokenizer, size.prompts)
        for s in range(size.samples)
    ]


def compile_all(engine: Engine, work: list[Request]) -> None:
    """Compiles every arm at the sizes of this work, so that the bandit's first choices cost what they will cost."""
    for arm, strategy in enumerate(engine.config.strategies):
        side = sides.fixed_side(engine, work, SAMPLING, arm)
        side()
        say(
            f"{strategy.name}: {side.result.stats.compile_seconds:.0f} s compiling, {side.result.stats.tokens_per_s:.1f} tokens/s"
        )


def noise_seconds(batch: int, vocab: int, repeats: int = 20) -> float:
    """Median seconds for the random numbers of one decode step, the maximum taken so that none can be left out."""

    @jax.jit
    def draw(request_keys, positions):
        keys = noise.position_keys(request_keys, positions, noise.Role.TARGET)
        return jnp.max(noise.exponential_of_bits(noise.bits(keys, vocab)).reshape(batch, -1, 128), axis=1)

    keys = jnp.asarray(noise.request_keys(SEED, np.arange(batch), 0, 0))
    side = form.timed(lambda: draw(keys, jnp.full((batch, 1), 100, jnp.int32)))
    side()
    return statistics.median(side() for _ in range(repeats))


def peer_sides(args, model: weights.Model, work: dict[str, list[Request]], notes: dict[str, str]):
    """Starts the peers that are asked for: (peers to close, sides by name)."""
    peers, found = [], {}
    chosen = client.names(args.peer, client.GENERATE)
    folder = str(workload.hf_folder(model)) if chosen else ""
    for name in chosen:
        config = {"model": folder, "temperature": SAMPLING.temperature, "seed": SEED}
        peer, reason = client.start(name, client.GENERATE[name], config, client.pythons(args.peer_python))
        if peer is None:
            notes[name] = reason
            continue
        peers.append(peer)
        for size in SIZES:
            ids = [r.prompt.token_ids.tolist() for r in work[size.name]]

            def side(peer=peer, ids=ids, tokens=size.tokens):
                record = peer.run(prompts=ids, new_tokens=tokens)
                return record["tokens"] / record["seconds"]

            found[f"{name}_tokens_per_s_{size.name}"] = side
    return peers, found


def run(args) -> tuple[dict, dict[str, str]]:
    """Results and notes."""
    model = sides.load(args.model)
    params = engine_layout(model.params, model.config)
    engine = sides.make_engine(
        model,
        params,
        STRATEGIES,
        {"ngram": Ngram()},
        {},
        max_batch=16,
        batch_buckets=(1, 4, 16),
        rounds_per_launch=args.rounds_per_launch,
    )
    work = {size.name: requests(model, size) for size in SIZES}
    ours: dict[str, Side] = {}
    for size in SIZES:
        compile_all(engine, work[size.name])
        ours[f"plain_tokens_per_s_{size.name}"] = sides.fixed_side(engine, work[size.name], SAMPLING, 0)
        ours[f"spec_tokens_per_s_{size.name}"] = Side(engine, work[size.name], SAMPLING, beg(STRATEGIES, THRESHOLDS))
    for side in ours.values():
        side.until_compiled()

    notes: dict[str, str] = {}
    peers, others = peer_sides(args, model, work, notes)
    try:
        records = form.alternate({**ours, **others}, args.repeats)
    finally:
        for peer in peers:
            peer.close()

    results = {name: form.median(values) for name, values in records.items()}
    for name in client.GENERATE:
        for size in SIZES:
            results.setdefault(f"{name}_tokens_per_s_{size.name}", None)
    plain = {size.name: ours[f"plain_tokens_per_s_{size.name}"] for size in SIZES}
    spec = {size.name: ours[f"spec_tokens_per_s_{size.name}"] for size in SIZES}
    results["accept_length"] = _accept_length(spec.values())
    results["host_gap_fraction"] = max(statistics.median(side.gaps) for side in plain.values())
    results["noise_fraction"] = max(
        noise_seconds(len(work[name]), model.config.vocab_size) / side.step_seconds for name, side in plain.items()
    )
    compare = functools.partial(ties.compare, model.config, params, seed=SEED, valid_vocab=model.valid_vocab)
    agreements = [compare(plain[s.name].result.rollouts, spec[s.name].result.rollouts) for s in SIZES]
    results["identical_tokens"] = all(a.identical for a in agreements)
    results["tie_divergences"] = sum(a.tie_divergences for a in agreements)
    for size in SIZES:
        results[f"plain_step_ms_{size.name}"] = 1e3 * plain[size.name].step_seconds
        results[f"plain_prefill_s_{size.name}"] = plain[size.name].result.stats.prefill_seconds
        results[f"arms_{size.name}"] = [STRATEGIES[a].name for a in spec[size.name].result.stats.arm_trace]
        for name in client.GENERATE:
            peer = f"{name}_tokens_per_s_{size.name}"
            if peer in records:
                ratio = form.ratio(records[f"plain_tokens_per_s_{size.name}"], records[peer])
                results |= ratio.results(f"plain_over_{name}_{size.name}")
    results["compile_seconds"] = engine.programs.compile_seconds
    results["programs"] = len(engine.programs)
    return results, notes


def _accept_length(speculative) -> float | None:
    stats = [side.result.stats for side in speculative]
    passes = sum(s.accept_passes for s in stats)
    return sum(x.accept_tokens for s in stats for x in s.launches) / passes if passes else None
