"""GGUF files: header, metadata, and tensors under the names that Hugging Face checkpoints use.

The header is read here, in one pass over the mapped file, with every length checked; block formats are decoded by the
`gguf` package. GGUF lists sizes innermost first, so a shape field of `[in, out]` is a matrix of `out` rows.
"""

import os
import re
import struct
from typing import Any, NamedTuple

import gguf
import numpy as np

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# Value type code -> struct format, as the GGUF specification numbers them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is in row-major order: `(out, in)` for a matrix."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """A mapped GGUF file.

    Attributes:
        path: the file.
        metadata: key -> number, string, bool, or list of them.
        tensors: name in the file -> `TensorInfo`.

    Raises:
        ValueError: not a GGUF file, an unsupported version or tensor type, or shorter than its header says.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        size = os.path.getsize(self.path)
        if size < 24:
            raise ValueError(f"{self.path}: {size} bytes is too short for a GGUF file")
        # A plain view of the map: slicing a `memmap` object costs more than decoding a block.
        self._data = np.asarray(np.memmap(self.path, np.uint8, "r"))
        self._cursor = 0
        if bytes(self._data[:4]) != _MAGIC:
            raise ValueError(f"{self.path}: not a GGUF file (it begins with {bytes(self._data[:4])!r}, not {_MAGIC!r})")
        self._buffer = memoryview(self._data)
        self._cursor = 4
        try:
            self._read_header()
        except (struct.error, IndexError) as error:
            raise ValueError(f"{self.path}: truncated inside the header at byte {self._cursor} of {size}") from error

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._buffer, self._cursor)
        self._cursor += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = bytes(self._buffer[self._cursor : self._cursor + length])
        if len(raw) != length:
            raise IndexError(length)
        self._cursor += length
        return raw.decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._scalar("I"), self._scalar("Q")
            if inner in _SCALARS:
                code = f"<{count}{_SCALARS[inner]}"
                values = list(struct.unpack_from(code, self._buffer, self._cursor))
                self._cursor += struct.calcsize(code)
                return values
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: metadata value type {kind} is unknown (a damaged or foreign file)")
        return self._scalar(_SCALARS[kind])

    def _read_header(self) -> None:
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version} is not supported; choose a file of version 2 or 3")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        raw = []
        for _ in range(num_tensors):
            name = self._string()
            dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
            raw.append((name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")))
        align = self.metadata.get("general.alignment", 32)
        start = -(-self._cursor // align) * align
        for name, shape, kind, offset in raw:
            try:
                kind = gguf.GGMLQuantizationType(kind)
            except ValueError as error:
                raise ValueError(f"{self.path}: tensor {name!r} has the unknown type {kind}") from error
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block:
                raise ValueError(
                    f"{self.path}: tensor {name!r} of shape {shape} does not divide into {kind.name} blocks of {block}"
                )
            num_bytes = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
            info = TensorInfo(shape, kind, start + offset, num_bytes)
            if info.offset + num_bytes > len(self._data):
                raise ValueError(
                    f"{self.path}: truncated: tensor {name!r} ends at byte {info.offset + num_bytes}, "
                    f"the file has {len(self._data)}"
                )
            self.tensors[name] = info

    def read(self, name: str) -> np.ndarray:
        """The tensor decoded to float32, in row-major shape.

        Raises:
            ValueError: its block format cannot be decoded; the message names it.
        """
        info = self.tensors[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[info.kind]
        rows = self._data[info.offset : info.offset + info.num_bytes]
        rows = rows.reshape(*info.shape[:-1], info.shape[-1] // block * block_bytes)
        try:
            return gguf.dequantize(rows, info.kind)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name!r} has type {info.kind.name}, which cannot be decoded") from error


# Names after `blk.<i>.` -> Hugging Face names inside a layer, without the final `.weight` or `.bias`.
_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **_LLAMA_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NEOX_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NEOX_TOP = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"}
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3", "gptneox": "gpt_neox"}


def family(file: GgufFile) -> str:
    """The model family of a file.

    Raises:
        ValueError: an architecture that is not supported.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in _FAMILIES:
        raise ValueError(f"{file.path}: general.architecture={arch!r} is not supported; choose one of {', '.join(_FAMILIES)}")
    return _FAMILIES[arch]


def hf_name(name: str, family: str) -> str | None:
    """What Hugging Face calls the tensor `name` of a GGUF file; None where it has no counterpart."""
    top, prefix = (_NEOX_TOP, "gpt_neox.layers") if family == "gpt_neox" else (_LLAMA_TOP, "model.layers")
    layer = {"gpt_neox": _NEOX_LAYER, "gemma3": _GEMMA_LAYER}.get(family, _LLAMA_LAYER)
    stem, _, part = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{part}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in layer:
        return f"{prefix}.{match[1]}.{layer[match[2]]}.{part}"
    return None


class GgufTensors:
    """The tensors of a GGUF file as a Hugging Face checkpoint would hold them: `names()` and `read(name)`."""

    def __init__(self, file: GgufFile, num_heads: int, num_kv_heads: int):
        self._file = file
        self._family = family(file)
        self._heads = {"q": num_heads, "k": num_kv_heads}
        self._num_heads = num_heads
        self._names = {hf_name(n, self._family) or n: n for n in file.tensors if n != "rope_freqs.weight"}

    def names(self) -> set[str]:
        return set(self._names)

    def read(self, name: str) -> np.ndarray:
        value = self._file.read(self._names[name])
        if self._family == "llama" and (match := re.search(r"\.self_attn\.([qk])_proj\.weight$", name)):
            return unpermute(value, self._heads[match[1]])
        if self._family == "gemma3" and name.endswith("norm.weight"):
            return value - 1.0  # GGUF stores the factor itself, Hugging Face its distance from one
        if self._family == "gpt_neox" and ".query_key_value." in name:
            # GGUF holds all queries, all keys, all values; Hugging Face q, k, v head by head.
            split = value.reshape(3, self._num_heads, -1, *value.shape[1:])
            return np.moveaxis(split, 0, 1).reshape(value.shape)
        return value


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order that `llama` GGUF files use for q and k `[heads * D, in]`.

    There the two halves of each head are interleaved (row 2i is channel i, row 2i + 1 is channel i + D/2), as the
    interleaved form of rotary embedding wants them; ours rotates halves.
    """
    rows, inner = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, inner).swapaxes(1, 2).reshape(rows, inner)


def config(file: GgufFile) -> dict[str, Any]:
    """What a Hugging Face `config.json` of the model in `file` would say.

    Raises:
        ValueError: an unsupported architecture, or a field is missing (named).
    """
    kind = family(file)
    arch = file.metadata["general.architecture"]

    def field(name: str, *default: Any) -> Any:
        key = f"{arch}.{name}"
        if key not in file.metadata and not default:
            raise ValueError(f"{file.path}: metadata field {key!r} is missing")
        return file.metadata.get(key, *default)

    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: tensor 'token_embd.weight' is missing")
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // heads)
    eps = "attention.layer_norm_epsilon" if kind == "gpt_neox" else "attention.layer_norm_rms_epsilon"
    raw: dict[str, Any] = dict(
        model_type=kind,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=field("context_length"),
        rope_theta=field("rope.freq_base", 1_000_000.0 if kind == "gemma3" else 10_000.0),
        rms_norm_eps=field(eps),
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_scaling=_rope_scaling(file, field, head_dim),
    )
    if kind != "gpt_neox" and field("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            f"{file.path}: {arch}.rope.dimension_count={field('rope.dimension_count')} differs from the head size {head_dim}; "
            f"{kind} models with partly rotated heads are not supported"
        )
    if kind == "gemma3":
        # The query scale is not stored; only the 27B model (62 layers) departs from the head size.
        scalar = hidden // heads if raw["num_hidden_layers"] == 62 else head_dim
        raw.update(
            query_pre_attn_scalar=scalar,
            sliding_window=field("attention.sliding_window"),
            sliding_window_pattern=field("attention.sliding_window_pattern", 6),
            final_logit_softcapping=field("final_logit_softcapping", None),
            rope_local_base_freq=field("rope.freq_base_swa", 10_000.0),
        )
    if kind == "gpt_neox":
        raw.update(
            layer_norm_eps=raw.pop("rms_norm_eps"),
            rotary_pct=field("rope.dimension_count") / head_dim,
            use_parallel_residual=field("use_parallel_residual", True),
        )
    return raw


def _rope_scaling(file: GgufFile, field: Any, head_dim: int) -> dict[str, Any] | None:
    kind = field("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"{file.path}: rope.scaling.type={kind!r} is not supported; choose none or linear")
    factor = field("rope.scaling.factor") if kind == "linear" else field("rope.scale_linear", 1.0)
    if "rope_freqs.weight" not in file.tensors:
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    # Llama 3.x files store the divisor of each frequency instead of the rule; find the rule and hold it against them.
    divisors = file.read("rope_freqs.weight")
    rule = dict(rope_type="llama3", factor=float(divisors.max()), low_freq_factor=1.0, high_freq_factor=4.0)
    rule["original_max_position_embeddings"] = 8192
    wavelengths = 2 * np.pi * field("rope.freq_base") ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / rule["factor"] + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"{file.path}: tensor 'rope_freqs.weight' follows no known rule (only llama3's is supported)")
    return rule
