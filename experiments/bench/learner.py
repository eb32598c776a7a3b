"""The learner's passes on a real model: a heavy-tailed batch packed and padded, beside a peer, and memory by row length.

python -m experiments.bench.learner --model=smollm2 --json=learner.json --peer=hf --peer_python=hf=/path/python

16 sequences of 32 to 512 tokens (1,472 in all, random ids), loss: mean next-token cross-entropy. `packed_over_padded` compares whole
updates, optimizer included, in useful tokens per second; `tokens_per_s` and `peer_tokens_per_s` are forward and backward passes of
the same packed batch, which is what the peer's script runs, and `loss_difference` says that both compute the same.
`flops_fraction_of_peak` is as in `bench.step`. `segment_cost_ratio` shows that cost follows the squares of segment lengths: one
row of many short segments against a row of one segment of the same length.

Memory is measured in a process of its own for each of `--memory_lengths` (1,024 to 8,192 tokens take some minutes; empty: none): `peak_rss_mb` and
`counted_mb` are those of the longest, `memory` has all, `memory_plot` names a picture of them.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.learner import packing, supervised
from adrl_jax.learner.attention import reach_of
from adrl_jax.learner.forward import ForwardConfig
from adrl_jax.learner.gradients import make_gradients
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.learner.update import data_mesh, init_state
from adrl_jax.types import Rollout
from experiments.bench import form, learner_memory, sides, workload
from experiments.bench.peers import client
from experiments.bench.step import useful_flops

LENGTHS = [32] * 10 + [96] * 4 + [256] + [512]
LEARNING_RATE = 1e-6


def sequences(vocab: int, lengths=LENGTHS, seed: int = 0) -> list[np.ndarray]:
    """Random ids, int32 `[length]` each."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in rng.permutation(lengths)]


def as_rollouts(found: list[np.ndarray]) -> list[Rollout]:
    """Each sequence with its first token as the prompt, so that every other token is a target."""
    return supervised.examples([(ids[:1], ids[1:]) for ids in found])


def batches(rollouts: list[Rollout], row_length: int) -> dict[str, Any]:
    """The batch packed into rows of `row_length`, and padded to one sequence a row."""
    zeros = np.zeros(len(rollouts), np.float32)
    longest = max(len(r.token_ids) for r in rollouts)
    sizes = dict(layout="plain", target_multiple=64)
    packed = packing.pack(rollouts, zeros, row_length=row_length, **sizes)
    rows = [packing.pack([r], [0.0], row_length=longest, layout="plain", target_multiple=longest) for r in rollouts]
    padded = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
    return {"packed": packed, "padded": padded}


class Passes:
    """Forward and backward passes, and whole updates, of one batch."""

    def __init__(self, model, batch, microbatch_rows: int):
        self.batch, self.reach = batch, reach_of(batch)
        config = ForwardConfig(1.0, model.valid_vocab)
        gradients = make_gradients(model.config, config, supervised.cross_entropy_objective, data_mesh(1), microbatch_rows)
        self._gradients = jax.jit(gradients, static_argnums=3)
        self.update = supervised.make_supervised_update(
            model.config,
            make_optimizer(OptimizerConfig(learning_rate=LEARNING_RATE)),
            data_mesh(1),
            microbatch_rows=microbatch_rows,
            valid_vocab=model.valid_vocab,
        )

    def gradients(self, params) -> Any:
        return self._gradients(params, None, self.batch, self.reach)

    def step(self, holder: dict[str, Any]) -> Any:
        holder["state"], metrics = self.update(holder["state"], self.batch)
        return metrics


def segment_cost(model, params, length: int = 1024, segments: int = 16) -> float:
    """Seconds of a row of one segment over seconds of a row of many, the same number of tokens."""
    sides_ = {}
    for name, lengths in (("one", [length]), ("many", [length // segments] * segments)):
        rollouts = as_rollouts(sequences(model.valid_vocab, lengths))
        batch = packing.pack(rollouts, np.zeros(len(rollouts)), row_length=length, layout="plain", target_multiple=length)
        passes = Passes(model, batch, 1)
        sides_[name] = form.timed(lambda passes=passes: passes.gradients(params))
    kept = form.alternate(sides_, form.MIN_REPEATS)
    return form.median(kept["one"]) / form.median(kept["many"])


def with_peer(args, model, found, ours, tokens: int, notes: dict[str, str]) -> dict[str, Any]:
    """Alternates our packed pass with the peer's."""
    config = {"model": str(workload.hf_folder(model)), "sequences": [ids.tolist() for ids in found]}
    peer, reason = client.start("hf", client.TRAIN["hf"], config, client.pythons(args.peer_python))
    if peer is None:
        notes["peer_tokens_per_s"] = reason
        return {"peer_tokens_per_s": None}
    with peer:
        records = form.alternate({"ours": ours, "hf": lambda: peer.run(timeout=1800.0, layout="packed")}, args.repeats)
    theirs = [x["seconds"] for x in records["hf"]]
    found_ratio = form.ratio(theirs, records["ours"]).results("over_peer")
    return {"peer_tokens_per_s": tokens / form.median(theirs), "peer_loss": records["hf"][0]["loss"], **found_ratio}


def memory(args, notes: dict[str, str]) -> dict[str, Any]:
    """Peak memory of an update for each row length, each in a process of its own."""
    rows = []
    for length in [int(x) for x in args.memory_lengths.split(",") if x]:
        command = [sys.executable, "-m", "experiments.bench.learner_memory", f"--model={args.model}", f"--length={length}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            notes[f"memory_{length}"] = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it failed"
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        sides.say(f"{length} tokens: peak {rows[-1]['peak_rss_mb']:.0f} MB, counted {rows[-1]['counted_mb']:.0f} MB")
    if not rows:
        return {"peak_rss_mb": None, "counted_mb": None, "memory": []}
    out = {name: rows[-1][name] for name in ("peak_rss_mb", "counted_mb")} | {"memory": rows}
    if args.json:
        out["memory_plot"] = str(learner_memory.plot(rows, pathlib.Path(args.json).with_suffix(".svg")))
    return out


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder or file of weights")
    parser.add_argument("--row_length", type=int, default=0, help="tokens of a packed row; 0: the longest sequence")
    parser.add_argument(
        "--memory_lengths", default="1024,2048,4096,8192", help="row lengths of the memory figures; empty: none"
    )
    args = parser.parse_args(argv)
    chosen = client.names(args.peer, client.TRAIN)
    model = sides.load(args.model)
    holder: dict[str, Any] = {"params": jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), model.params)}
    lengths = [n for n in LENGTHS if n <= model.config.max_positions]
    found = sequences(model.valid_vocab, lengths)
    rollouts, tokens = as_rollouts(found), sum(lengths)
    both = {name: Passes(model, batch, 1) for name, batch in batches(rollouts, args.row_length or max(lengths)).items()}

    results: dict[str, Any] = {}
    notes: dict[str, str] = {}
    sides.say("compiling the packed pass")
    first = form.first_call(lambda: both["packed"].gradients(holder["params"]))
    results["first_pass_s"] = first.seconds
    loss = float(first.value.loss.numerator / first.value.loss.denominator)
    ours = form.timed(lambda: both["packed"].gradients(holder["params"]))
    if "hf" in chosen:
        results |= with_peer(args, model, found, ours, tokens, notes)
        if results.get("peer_loss") is not None:
            results["loss_difference"] = abs(loss - results["peer_loss"])
    else:
        results["peer_tokens_per_s"] = None
    seconds = form.median([ours() for _ in range(args.repeats)])
    results["tokens_per_s"] = tokens / seconds
    peak = max(form.matmul_peak() for _ in range(3))
    results["flops_fraction_of_peak"] = useful_flops(model.config, rollouts) / seconds / peak
    results["matmul_peak_gflops"] = peak / 1e9
    sides.say(f"forward and backward: {results['tokens_per_s']:.0f} tokens/s; one long segment against many short ones")
    results["segment_cost_ratio"] = segment_cost(model, holder["params"], min(1024, model.config.max_positions))
    holder["state"] = init_state(holder.pop("params"), make_optimizer(OptimizerConfig(learning_rate=LEARNING_RATE)))
    sides.say("whole updates, packed and padded in turn")
    kept = form.alternate({name: form.timed(lambda p=p: p.step(holder)) for name, p in both.items()}, args.repeats)
    for name in both:
        results[f"{name}_update_s"] = form.median(kept[name])
        results[f"{name}_update_tokens_per_s"] = tokens / results[f"{name}_update_s"]
    results |= form.ratio(kept["padded"], kept["packed"]).results("packed_over_padded")
    results |= memory(args, notes)
    return form.finish("learner", vars(args), results, args.json, notes)


if __name__ == "__main__":
    main()
