"""Shapes of real models for `bench.kernels`, and the bytes that a whole round of theirs moves.

Counted are: every weight of the body and of the vocabulary projection once; the kernels' own counts from their grids and blocks;
and what each token's activations write and read between the products of a layer, as if none of it stayed on the chip.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.commit import api as commit_api
from adrl_kernels.commit import pallas_tpu as commit_tpu
from adrl_kernels.log_probs import api as log_probs_api
from adrl_kernels.log_probs import pallas_tpu as log_probs_tpu
from adrl_kernels.log_probs.xla import Static
from adrl_kernels.sample_head import arguments as head_arguments
from adrl_kernels.sample_head import pallas_tpu as head_tpu
from adrl_kernels.verify_attention import arguments as attention_arguments
from adrl_kernels.verify_attention import pallas_tpu as attention_tpu
from adrl_kernels.verify_attention.arguments import Cache, Nodes


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes, as in `ModelConfig`."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """Parameters of one layer (norms aside)."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    def activations(self, tokens: int) -> int:
        """Elements that a layer writes and reads between its products, for `tokens` tokens."""
        fused = (self.heads + 2 * self.kv_heads) * self.head_dim
        return tokens * (6 * self.hidden + 2 * fused + 6 * self.intermediate)


MODELS = {
    m.name: m
    for m in (
        Model("SmolLM2-135M", 576, 30, 9, 3, 64, 1536, 49_152),
        Model("Qwen2.5-7B", 3584, 28, 28, 4, 128, 18_944, 152_064),
        Model("Llama-3.1-70B", 8192, 80, 64, 8, 128, 28_672, 128_256),
    )
}
CAPACITY = 4096
TARGETS = 1024


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        function, args: what is compiled.
        moved: HBM bytes by operand.
        minimum: bytes that no implementation can do without.
        flops: operations of its matrix products.
        donate: arguments whose buffers are reused.
    """

    function: object
    args: tuple
    moved: Mapping[str, int]
    minimum: int
    flops: float
    donate: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(self.moved.values())


def lengths_of(batch: int) -> np.ndarray:
    """Ragged: 1,024 to 3,072 tokens, evenly spread and odd."""
    return np.linspace(1024, 3072, batch).astype(np.int32) // 2 * 2 + 1 if batch > 1 else np.array([2049], np.int32)


def _struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(m: Model, batch: int, nodes: int, dtype) -> Case:
    fresh = _struct((batch, nodes, m.kv_heads, m.head_dim), dtype)
    queries = _struct((batch, nodes, m.heads, m.head_dim), dtype)
    cache = _cache(m, batch, dtype)
    arguments = Nodes(queries, fresh, fresh, _struct((batch, nodes, nodes), jnp.bool_))
    lengths = lengths_of(batch)
    moved = attention_tpu.plan(arguments, cache).traffic(*attention_tpu.scalars(arguments, cache, lengths))
    minimum = attention_arguments.minimum_bytes(arguments, cache, lengths)
    flops = 4.0 * float(lengths.sum()) * nodes * m.heads * m.head_dim
    args = (arguments, cache, _struct((batch,), jnp.int32))
    return Case(attention_tpu.verify_attention, args, moved, minimum, flops)


def head(m: Model, batch: int, nodes: int, dtype) -> Case:
    count = batch * nodes
    hidden, weight = _struct((count, m.hidden), dtype), _struct((m.vocab, m.hidden), dtype)
    options = dict(by_row=True, valid_vocab=m.vocab)

    def run(hidden, weight, keys, temperature):
        return head_tpu.sample_head(hidden, weight, keys, temperature, **options, draws=1, norm=None)

    args = (hidden, weight, _struct((count, 2), jnp.uint32), _struct((count,), jnp.float32))
    moved = head_tpu.plan(hidden, weight, **options).traffic()
    return Case(run, args, moved, head_arguments.minimum_bytes(hidden, weight, True, m.vocab), 2.0 * count * m.hidden * m.vocab)


def commit(m: Model, batch: int, nodes: int, dtype) -> Case:
    cache = _cache(m, batch, dtype)
    fresh = _struct((batch, nodes, m.kv_heads, m.head_dim), dtype)
    start, count = lengths_of(batch), np.full(batch, nodes, np.int32)
    moved = commit_tpu.plan(cache, nodes, nodes).traffic(*commit_tpu.scalars(cache, nodes, start, count))
    rows = _struct((batch,), jnp.int32)
    args = (cache, fresh, fresh, _struct((batch, nodes), jnp.int32), rows, rows)
    return Case(commit_tpu.commit, args, moved, commit_api.minimum_bytes(cache, count), 0.0, donate=(0,))


def log_probs(m: Model, batch: int, nodes: int, dtype) -> Case:
    """Forward; `batch` and `nodes` do not matter to the learner's op."""
    matrix, hidden = _struct((m.vocab, m.hidden), jnp.float32), _struct((TARGETS, m.hidden), dtype)
    static = Static(True, m.vocab, m.vocab, 1.0, False)

    def run(matrix, hidden, ids):
        return log_probs_tpu.run("forward", static, False, matrix, hidden, ids)

    moved = log_probs_tpu.plan(matrix, hidden, m.vocab, "forward").traffic()
    args = (matrix, hidden, _struct((TARGETS,), jnp.int32))
    return Case(run, args, moved, log_probs_api.minimum_bytes(matrix, hidden, m.vocab), 2.0 * TARGETS * m.hidden * m.vocab)


OPS = {"verify_attention": attention, "sample_head": head, "commit": commit, "log_probs": log_probs}


def round_bytes(m: Model, batch: int, nodes: int, dtype) -> int:
    """Bytes of one decode step (`nodes=1`) or verify round."""
    width = jnp.dtype(dtype).itemsize
    attend, write = (op(m, batch, nodes, dtype).bytes for op in (attention, commit))
    layer = (m.layer_weights + m.activations(batch * nodes)) * width + attend + write
    return m.layers * layer + head(m, batch, nodes, dtype).bytes


def draft_bytes(m: Model, batch: int, depth: int, dtype, draft_vocab: int | None = None) -> int:
    """Bytes of drafting a chain of `depth` with an EAGLE layer: one pass that catches up, then `depth - 1` of one token, and
    `depth` draws, each over the whole vocabulary or over `draft_vocab` ids."""
    width = jnp.dtype(dtype).itemsize
    small = dataclasses.replace(m, layers=1, vocab=draft_vocab or m.vocab)
    weights = m.layer_weights + 2 * m.hidden * m.hidden

    def layer(nodes):
        attend, write = (op(small, batch, nodes, dtype).bytes for op in (attention, commit))
        return (weights + m.activations(batch * nodes)) * width + attend + write

    return layer(depth + 1) + (depth - 1) * layer(1) + depth * head(small, batch, 1, dtype).bytes


def _cache(m: Model, batch: int, dtype) -> Cache:
    keys, values = (m.kv_heads, m.head_dim, CAPACITY), (m.kv_heads, CAPACITY, m.head_dim)
    return Cache(_struct((batch, *keys), dtype), _struct((batch, *values), dtype))
