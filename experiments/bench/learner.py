"""The learner's passes on a real model: a heavy-tailed batch packed and padded, beside a peer, and memory of a long row.

python -m experiments.bench.learner --model=smollm2 --json=learner.json
python -m experiments.bench.learner --model=smollm2 --json=learner.json --peer=hf --peer_python=hf=/path/python

16 sequences of 32 to 512 tokens (1,472 in all, random ids), loss: mean next-token cross-entropy. `tokens_per_s` and
`peer_tokens_per_s` are forward and backward passes of the packed batch, the very sequences that the peer's script runs, and
`loss_difference` says that both compute the same. `flops_fraction_of_peak` is as in `bench.step`.

`packed_over_padded` compares whole updates, optimizer included, in useful tokens per second, alternating in one run. Every length is
`--update_divisor` times shorter there (padded, most of the work is padding, which takes minutes): longest over mean, on which the
ratio depends, stays. `segment_cost_ratio` shows that cost follows the squares of segment lengths and not of row lengths: a row of one
segment against a row of many, as long, through four layers; `segment_cost_expected` is what counted operations say.

Memory is measured in a process of its own for each of `--memory_lengths` (empty: none): `peak_rss_mb` and `counted_mb` are those of the
longest, `memory` has all, `memory_plot` names a picture of them. About five minutes on two slow cores, of which one row of 8,192
tokens takes two; `--memory_lengths=1024,2048,4096,8192` takes two more and shows the line.

The JSON is written after each part. `part_s`: seconds of each, compilation included.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time
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
from adrl_jax.models.transformer import init_params
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


def segment_cost(model, repeats: int, length: int = 2048, segments: int = 16) -> dict[str, float]:
    """Seconds of a row of one segment over seconds of a row of `segments`, the same number of tokens.

    Four layers of the model's sizes with fresh weights; only the last four tokens of a segment are targets, so that the head, which
    sees no difference, does not hide it.
    """
    config = dataclasses.replace(model.config, num_layers=4)
    small = dataclasses.replace(model, config=config, params=init_params(config, jax.random.key(0)))
    sides_, work = {}, {}
    for name, lengths in (("one", [length]), ("many", [length // segments] * segments)):
        rollouts = supervised.examples([(ids[:-4], ids[-4:]) for ids in sequences(model.valid_vocab, lengths)])
        sizes = dict(row_length=length, layout="plain", target_multiple=4 * segments)
        passes = Passes(small, packing.pack(rollouts, np.zeros(len(rollouts)), **sizes), 1)
        sides_[name] = form.timed(lambda passes=passes: passes.gradients(small.params))
        work[name] = useful_flops(config, rollouts)
    kept = form.alternate(sides_, repeats)
    return {
        **form.ratio(kept["one"], kept["many"]).results("segment_cost_ratio"),
        "segment_cost_expected": work["one"] / work["many"],
    }


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


def memory(args, lengths: list[int], notes: dict[str, str]) -> dict[str, Any]:
    """Peak memory of an update for each row length, each in a process of its own."""
    rows = []
    for length in lengths:
        sides.say(f"one update of a row of {length} tokens, in a process of its own")
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


class Report:
    """Results of parts as they come, in the JSON after each."""

    def __init__(self, args):
        self.args, self.results, self.notes = args, {}, {}
        self._seconds: dict[str, float] = {}

    def part(self, name: str, told: str, run) -> None:
        """Runs one part, which returns entries of the results."""
        sides.say(f"[{sum(self._seconds.values()):.0f} s] {told}")
        began = time.monotonic()
        self.results |= run()
        self._seconds[name] = time.monotonic() - began
        self.results["part_s"] = dict(self._seconds)
        if self.args.json:
            notes = {**self.notes, "parts": f"so far {', '.join(self._seconds)}"}
            form.write(form.document("learner", vars(self.args), self.results, notes), self.args.json)


def passes_of(args, model, found: list[np.ndarray], chosen: list[str], notes: dict[str, str]) -> dict[str, Any]:
    """Forward and backward passes of the packed batch, alternating with the peer where there is one."""
    rollouts, tokens = as_rollouts(found), sum(map(len, found))
    longest = max(map(len, found))
    packed = Passes(model, batches(rollouts, args.row_length or longest)["packed"], 1)
    first = form.first_call(lambda: packed.gradients(model.params))
    loss = float(first.value.loss.numerator / first.value.loss.denominator)
    results: dict[str, Any] = {"first_pass_s": first.seconds, "loss": loss, "peer_tokens_per_s": None}
    del first  # gradients of the whole model
    ours = form.timed(lambda: packed.gradients(model.params))
    if "hf" in chosen:
        results |= with_peer(args, model, found, ours, tokens, notes)
        if results.get("peer_loss") is not None:
            results["loss_difference"] = abs(loss - results["peer_loss"])
    seconds = form.median([ours() for _ in range(args.repeats)])
    peak = max(form.matmul_peak() for _ in range(3))
    results["tokens_per_s"] = tokens / seconds
    results["flops_fraction_of_peak"] = useful_flops(model.config, rollouts) / seconds / peak
    results["matmul_peak_gflops"] = peak / 1e9
    sides.say(f"forward and backward: {results['tokens_per_s']:.0f} tokens/s")
    return results


def updates_of(args, model, found: list[np.ndarray]) -> dict[str, Any]:
    """Whole updates of a batch, packed and padded in turn. Takes the model's weights over."""
    rollouts, tokens = as_rollouts(found), sum(map(len, found))
    row_length = -(-(args.row_length or max(map(len, found)) * args.update_divisor) // args.update_divisor)
    both = {name: Passes(model, batch, 1) for name, batch in batches(rollouts, row_length).items()}
    holder = {"state": init_state(model.params, make_optimizer(OptimizerConfig(learning_rate=LEARNING_RATE)))}
    results: dict[str, Any] = {}
    for name, p in both.items():
        results[f"{name}_first_update_s"] = form.first_call(lambda p=p: p.step(holder)).seconds
        sides.say(f"{name}: first update {results[f'{name}_first_update_s']:.0f} s, with compilation")
    # The first calls were the warm-up.
    kept = form.alternate({name: form.timed(lambda p=p: p.step(holder)) for name, p in both.items()}, args.repeats, warmup=0)
    for name in both:
        results[f"{name}_update_s"] = form.median(kept[name])
        results[f"{name}_update_tokens_per_s"] = tokens / results[f"{name}_update_s"]
    return results | form.ratio(kept["padded"], kept["packed"]).results("packed_over_padded")


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder or file of weights")
    parser.add_argument("--row_length", type=int, default=0, help="tokens of a packed row; 0: the longest sequence")
    parser.add_argument("--update_divisor", type=int, default=4, help="sequences of whole updates are so many times shorter")
    parser.add_argument("--memory_lengths", default="8192", help="row lengths of the memory figures; empty: none")
    args = parser.parse_args(argv)
    lengths = [int(x) for x in args.memory_lengths.split(",") if x]
    if not 1 <= args.update_divisor <= min(LENGTHS) // 2:
        parser.error(f"--update_divisor={args.update_divisor} must be between 1 and {min(LENGTHS) // 2}")
    if args.row_length and args.row_length < max(LENGTHS):
        parser.error(f"--row_length={args.row_length} must be 0 or at least the longest sequence, {max(LENGTHS)}")
    chosen = client.names(args.peer, client.TRAIN)
    model = sides.load(args.model)
    if lengths and not learner_memory.SEGMENTS * 2 <= min(lengths) <= max(lengths) <= model.config.max_positions:
        least, most = learner_memory.SEGMENTS * 2, model.config.max_positions
        parser.error(f"--memory_lengths={args.memory_lengths}: each from {least} to the model's {most} positions")
    model = dataclasses.replace(model, params=jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), model.params))
    kept = [n for n in LENGTHS if n <= model.config.max_positions]
    found = sequences(model.valid_vocab, kept)
    report = Report(args)
    passes = lambda: passes_of(args, model, found, chosen, report.notes)  # noqa: E731
    report.part("passes", f"{sum(kept)} tokens packed, forward and backward; compiling first", passes)
    longest = min(2048, model.config.max_positions)
    report.part("segments", "one long segment and many short ones", lambda: segment_cost(model, args.repeats, longest))
    shorter = [ids[: len(ids) // args.update_divisor] for ids in found]
    told = f"whole updates of {sum(map(len, shorter))} tokens, packed and padded in turn; compiling both first"
    report.part("updates", told, lambda: updates_of(args, model, shorter))
    report.part("memory", "memory", lambda: memory(args, lengths, report.notes))
    return form.finish("learner", vars(args), report.results, args.json, report.notes)


if __name__ == "__main__":
    main()
