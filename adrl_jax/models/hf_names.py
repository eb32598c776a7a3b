"""How each family's Hugging Face tensors become our parameters, in both directions, from one list a family.

A `Leaf` says which checkpoint tensors make up one array of the parameter tree. `assemble` reads it left to right,
`disassemble` right to left, so what is saved is by construction what is loaded.

Hugging Face linear weights are `[out, in]`; ours are `[in, out]` with q|k|v and gate|up side by side.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from adrl_jax.models.families import ModelConfig


class Leaf(NamedTuple):
    """One array of the parameter tree.

    Attributes:
        path: keys from the root of the parameter tree.
        names: the checkpoint tensors it is made of, in order.
        shapes: the shape of each of `names` in the checkpoint.
        layout: `plain` (one tensor, as it is), `linear` (transposed, then side by side), `vector` (end to end) or
            `interleaved` (GPT-NeoX stores q, k, v of head 0, then of head 1, …; transposed where two-dimensional).
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: str


# Buffers that old exports carry beside the weights; they hold nothing that the config does not say.
_BUFFERS = re.compile(r"(\.rotary_emb\.inv_freq|\.attention\.bias|\.attention\.masked_bias)$")


def is_buffer(name: str) -> bool:
    """Whether a checkpoint tensor is a derived buffer that no model needs."""
    return bool(_BUFFERS.search(name))


def head_name(config: ModelConfig) -> str:
    """The name of the output projection's tensor."""
    return "embed_out.weight" if config.family == "gpt_neox" else "lm_head.weight"


def leaves(config: ModelConfig) -> list[Leaf]:
    """Every array of the parameter tree of `config`, with the checkpoint tensors it is made of."""
    return list(_neox_leaves(config) if config.family == "gpt_neox" else _llama_leaves(config))


def _shared_leaves(c: ModelConfig, embedding: str) -> Iterator[Leaf]:
    table = (c.vocab_size, c.hidden_size)
    yield Leaf(("embedding",), (embedding,), (table,), "plain")
    if not c.tie_embeddings:
        yield Leaf(("head",), (head_name(c),), (table,), "linear")


def _llama_leaves(c: ModelConfig) -> Iterator[Leaf]:
    """llama, qwen2, qwen3 and gemma3 share names; traits of the config add biases and norms."""
    yield from _shared_leaves(c, "model.embed_tokens.weight")
    hidden, inner = c.hidden_size, c.intermediate_size
    outs = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim)
    norms = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if c.post_norms:
        norms = {
            "input_norm": "input_layernorm",
            "post_attn_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "post_mlp_norm": "post_feedforward_layernorm",
        }
    for i in range(c.num_layers):
        ours, theirs = f"layer_{i}", f"model.layers.{i}."
        for key, name in norms.items():
            yield Leaf((ours, key, "weight"), (f"{theirs}{name}.weight",), ((hidden,),), "plain")
        attn = theirs + "self_attn."
        qkv = tuple(f"{attn}{x}_proj." for x in "qkv")
        yield Leaf(
            (ours, "attn", "qkv", "kernel"), tuple(n + "weight" for n in qkv), tuple((o, hidden) for o in outs), "linear"
        )
        if c.qkv_bias:
            yield Leaf((ours, "attn", "qkv", "bias"), tuple(n + "bias" for n in qkv), tuple((o,) for o in outs), "vector")
        if c.qk_norm:
            for x in "qk":
                yield Leaf((ours, "attn", f"{x}_norm", "weight"), (f"{attn}{x}_norm.weight",), ((c.head_dim,),), "plain")
        yield Leaf((ours, "attn", "o", "kernel"), (f"{attn}o_proj.weight",), ((hidden, outs[0]),), "linear")
        mlp = theirs + "mlp."
        yield Leaf(
            (ours, "mlp", "gate_up", "kernel"),
            (f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
            ((inner, hidden), (inner, hidden)),
            "linear",
        )
        yield Leaf((ours, "mlp", "down", "kernel"), (f"{mlp}down_proj.weight",), ((hidden, inner),), "linear")
    yield Leaf(("final_norm", "weight"), ("model.norm.weight",), ((hidden,),), "plain")


def _neox_leaves(c: ModelConfig) -> Iterator[Leaf]:
    yield from _shared_leaves(c, "gpt_neox.embed_in.weight")
    hidden, inner = c.hidden_size, c.intermediate_size
    for i in range(c.num_layers):
        ours, theirs = f"layer_{i}", f"gpt_neox.layers.{i}."
        for key, name in (("input_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            for part in ("weight", "bias"):
                yield Leaf((ours, key, part), (f"{theirs}{name}.{part}",), ((hidden,),), "plain")
        denses = (
            ("attn", "qkv", "attention.query_key_value", 3 * c.num_heads * c.head_dim, hidden, "interleaved"),
            ("attn", "o", "attention.dense", hidden, c.num_heads * c.head_dim, "linear"),
            ("mlp", "up", "mlp.dense_h_to_4h", inner, hidden, "linear"),
            ("mlp", "down", "mlp.dense_4h_to_h", hidden, inner, "linear"),
        )
        for room, key, name, size_out, size_in, layout in denses:
            yield Leaf((ours, room, key, "kernel"), (f"{theirs}{name}.weight",), ((size_out, size_in),), layout)
            kind = layout if layout == "interleaved" else "plain"
            if c.qkv_bias if key == "qkv" else c.dense_bias:
                yield Leaf((ours, room, key, "bias"), (f"{theirs}{name}.bias",), ((size_out,),), kind)
    for part in ("weight", "bias"):
        yield Leaf(("final_norm", part), (f"gpt_neox.final_layer_norm.{part}",), ((hidden,),), "plain")


def assemble(leaf: Leaf, read: Callable[[str], np.ndarray], config: ModelConfig, dtype: Any) -> np.ndarray:
    """Builds one array of the parameter tree, C-contiguous in `dtype`.

    Args:
        read: returns a checkpoint tensor by name; its shape is compared with what the config asks for.

    Raises:
        ValueError: a tensor has another shape than the config says; the message names it and both shapes.
    """
    parts = []
    for name, shape in zip(leaf.names, leaf.shapes):
        part = read(name)
        if part.shape != shape:
            raise ValueError(f"tensor {name!r} has shape {part.shape}, the config says {shape}")
        parts.append(part)
    if leaf.layout == "plain":
        return np.ascontiguousarray(parts[0], dtype)
    if leaf.layout == "interleaved":
        part = parts[0].reshape(config.num_heads, 3, config.head_dim, *parts[0].shape[1:])
        parts = [np.moveaxis(part, 1, 0).reshape(parts[0].shape)]
    if parts[0].ndim == 2 and leaf.layout in ("linear", "interleaved"):
        parts = [part.T for part in parts]
    sizes = [part.shape[-1] for part in parts]
    out = np.empty((*parts[0].shape[:-1], sum(sizes)), dtype)
    start = 0
    for part, size in zip(parts, sizes):
        out[..., start : start + size] = part
        start += size
    return out


def disassemble(leaf: Leaf, value: np.ndarray, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """The checkpoint tensors one array of the parameter tree is saved as, C-contiguous: the inverse of `assemble`.

    Raises:
        ValueError: the array's shape is not the one that the config says.
    """
    linear = leaf.layout in ("linear", "interleaved") and len(leaf.shapes[0]) == 2
    sizes = [shape[0] if linear else shape[-1] for shape in leaf.shapes]
    expected = (*(leaf.shapes[0][1:] if linear else leaf.shapes[0][:-1]), sum(sizes))
    if value.shape != expected:
        raise ValueError(f"parameter {'/'.join(leaf.path)!r} has shape {value.shape}, the config says {expected}")
    start = 0
    for name, shape, size in zip(leaf.names, leaf.shapes, sizes):
        part = value[..., start : start + size]
        start += size
        part = part.T if linear else part
        if leaf.layout == "interleaved":
            part = part.reshape(3, config.num_heads, config.head_dim, *shape[1:])
            part = np.moveaxis(part, 0, 1).reshape(shape)
        yield name, np.ascontiguousarray(part)


def get(params: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The array at `path`.

    Raises:
        ValueError: there is none.
    """
    node = params
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            raise ValueError(f"the parameter tree has no {'/'.join(path)!r}")
        node = node[key]
    return node


def put(params: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Sets the array at `path`, making inner dicts as needed."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = value
