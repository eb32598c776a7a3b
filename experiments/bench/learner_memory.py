"""Peak memory of one update of one long row, against what can be counted: `python -m experiments.bench.learner_memory --length=8192`.

Counted, in float32: parameters, gradients and Adam's two moments; what the backward pass keeps (each layer's input, the final
hidden states); one layer's own intermediate values, twice (value and cotangent); three blocks of logits. Besides, what the
process held before the model was loaded. The row holds responses of a quarter of its length each. Prints one line of JSON.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.log_probs.xla import default_block

from adrl_jax.learner import packing, supervised
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.learner.update import data_mesh, init_state
from adrl_jax.models.families import ModelConfig
from experiments.bench import form, sides

SEGMENTS = 4


def counted_bytes(config: ModelConfig, parameters: int, length: int, targets: int) -> float:
    """What an update with `remat` has to hold, in bytes."""
    c = config
    states = 4 * parameters * 4.0  # weights, gradients, two moments
    kept = (c.num_layers + 2) * length * c.hidden_size * 4.0
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    inside = length * (4 * c.hidden_size + heads + 3 * c.intermediate_size) * 4.0
    logits = 3 * targets * min(default_block(targets), c.vocab_size) * 4.0
    return states + kept + 2 * inside + logits


def measure(name: str, length: int) -> dict[str, float]:
    """Runs one update and reports `length`, `tokens`, `peak_rss_mb`, `counted_mb`, `base_mb` (before loading) and `ratio`."""
    jnp.zeros(8).block_until_ready()
    base = form.peak_rss_mb()
    model = sides.load(name)
    rng = np.random.default_rng(0)
    pieces = [rng.integers(0, model.valid_vocab, length // SEGMENTS).astype(np.int32) for _ in range(SEGMENTS)]
    rollouts = supervised.examples([(ids[:1], ids[1:]) for ids in pieces])
    batch = packing.pack(rollouts, np.zeros(SEGMENTS), row_length=length, layout="plain", target_multiple=64)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6))
    update = supervised.make_supervised_update(
        model.config, optimizer, data_mesh(1), microbatch_rows=1, valid_vocab=model.valid_vocab, remat=True
    )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), model.params)
    parameters = sum(x.size for x in jax.tree.leaves(params))
    config, model = model.config, None
    state = init_state(params, optimizer)
    del params
    # One is enough: gradients, moments and new weights all exist in it.
    state, metrics = update(state, batch)
    jax.block_until_ready((state, metrics))
    counted = base + counted_bytes(config, parameters, length, batch.target_ids.shape[1]) / 2**20
    peak = form.peak_rss_mb()
    return {
        "length": length,
        "tokens": sum(map(len, pieces)),
        "peak_rss_mb": peak,
        "counted_mb": counted,
        "base_mb": base,
        "ratio": peak / counted,
    }


def plot(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> pathlib.Path:
    """Peak and counted memory against row length."""
    import matplotlib.figure

    from experiments.figures import MUTED, OURS, STYLE

    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=(5, 3), layout="constrained")
        ax = figure.subplots()
        for name, color, style in (("peak_rss_mb", OURS, "-"), ("counted_mb", MUTED, "--")):
            ax.plot([r["length"] for r in rows], [r[name] / 1024 for r in rows], style, color=color, marker="o", label=name)
        ax.set(xlabel="tokens in a row", ylabel="GB", title="Memory of an update")
        ax.set_ylim(bottom=0)
        ax.grid(True, axis="y")
        ax.legend()
        figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": None})
    return path


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="smollm2", help="smollm2, or a folder or file of weights")
    flags.add_argument("--length", type=int, default=8192, help="tokens of the row")
    args = flags.parse_args()
    print(json.dumps(measure(args.model, args.length)))


if __name__ == "__main__":
    main()
