"""What distinguishes the supported model families, as one frozen description each.

`ModelConfig` holds sizes and traits; `from_hf` reads a Hugging Face `config.json`. The same `Transformer` runs all of them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "gpt_neox")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency rescaling for long contexts.

    Attributes:
        kind: `linear` (divide all frequencies by `factor`) or `llama3` (smooth between two wavelengths).
        factor: how much longer than `original_positions` the context may be.
        low_freq_factor, high_freq_factor, original_positions: only for `llama3`.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and traits of a decoder-only transformer. Hashable, so usable as a static jit argument.

    Attributes:
        family: one of `FAMILIES`; names the checkpoint's tensor map, the traits below name the arithmetic.
        vocab_size: rows of the embedding table (may exceed the tokenizer's size).
        rotary_fraction: share of each head that is rotated (GPT-NeoX rotates a quarter).
        norm_offset: added to RMSNorm weights before use (1.0 in Gemma, whose weights are stored around zero).
        post_norms: Gemma 3 also normalises what attention and MLP return.
        query_scale: multiplies queries; `head_dim ** -0.5` when None.
        sliding_window: keys visible in local layers; None when every layer is global.
        sliding_pattern: every n-th layer is global, all others local.
        dtype: of activations and matrix products. Weights keep the dtype they are given in.
        taps: after how many layers the hidden states are kept too, ascending, for drafters that read several (`eagle3`). No
            trait of the model: whoever runs it for such a drafter asks for them.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 8192
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    qkv_bias: bool = False
    dense_bias: bool = False
    qk_norm: bool = False
    norm: str = "rms"
    norm_offset: float = 0.0
    activation: str = "silu"
    gated_mlp: bool = True
    parallel_residual: bool = False
    rotary_fraction: float = 1.0
    embed_scale: float = 1.0
    post_norms: bool = False
    query_scale: float | None = None
    sliding_window: int | None = None
    sliding_pattern: int = 6
    local_rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    dtype: str = "float32"
    taps: tuple[int, ...] = ()

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r} is unknown; choose one of {', '.join(FAMILIES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise ValueError(f"dtype={self.dtype!r} is unknown; choose float32 or bfloat16 (float64 only to check others)")

        if list(self.taps) != sorted(set(self.taps)) or any(not 1 <= n < self.num_layers for n in self.taps):
            raise ValueError(f"taps={self.taps!r} must be distinct numbers of layers in [1, {self.num_layers}), ascending")

    @property
    def hidden_channels(self) -> int:
        """Of the hidden states that a pass returns: those of the taps stand behind the final-norm ones."""
        return self.hidden_size * (1 + len(self.taps))

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def compute_dtype(self):
        return jnp.dtype(self.dtype)

    def is_local(self, layer: int) -> bool:
        """Whether `layer` sees only the last `sliding_window` keys."""
        return self.sliding_window is not None and (layer + 1) % self.sliding_pattern != 0


# What Hugging Face takes where a `config.json` leaves a field out (Gemma 3's published ones leave out most).
_LLAMA_DEFAULTS = dict(rope_theta=10_000.0, rms_norm_eps=1e-6, tie_word_embeddings=False, hidden_act="silu")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_DEFAULTS | dict(max_position_embeddings=2048),
    "qwen2": _LLAMA_DEFAULTS | dict(max_position_embeddings=32_768),
    "qwen3": _LLAMA_DEFAULTS | dict(max_position_embeddings=32_768, head_dim=128),
    "gemma3": dict(
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
    ),
    "gpt_neox": dict(
        max_position_embeddings=2048,
        rope_theta=10_000.0,
        rotary_pct=0.25,
        layer_norm_eps=1e-5,
        tie_word_embeddings=False,
        hidden_act="gelu",
        use_parallel_residual=True,
        attention_bias=True,
    ),
}

# Fields that would change the arithmetic, with the values whose arithmetic is implemented.
_IMPLEMENTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": dict(hidden_act=("silu",), attention_bias=(False, None), mlp_bias=(False, None)),
    "qwen2": dict(hidden_act=("silu",), use_sliding_window=(False, None)),
    "qwen3": dict(hidden_act=("silu",), use_sliding_window=(False, None), attention_bias=(False, None)),
    "gemma3": dict(
        hidden_activation=("gelu_pytorch_tanh", None),
        attention_bias=(False, None),
        final_logit_softcapping=(None,),
        attn_logit_softcapping=(None,),
        use_bidirectional_attention=(False, None),
    ),
    "gpt_neox": dict(hidden_act=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), attention_bias=(True,)),
}


def _rope_scaling(raw: Mapping[str, Any]) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type", "default"))
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling("linear", float(raw["factor"]))
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                float(raw["factor"]),
                float(raw["low_freq_factor"]),
                float(raw["high_freq_factor"]),
                int(raw["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ValueError(f"rope_scaling of type {kind!r} lacks the field {error.args[0]!r}") from None
    raise ValueError(f"rope_scaling type {kind!r} is not supported; choose default, linear or llama3")


def from_hf(raw: Mapping[str, Any], dtype: str = "float32") -> ModelConfig:
    """Builds a `ModelConfig` from the contents of a Hugging Face `config.json`, of the old form (`rope_theta`,
    `rope_scaling`) or the new one (`rope_parameters`).

    Raises:
        ValueError: the `model_type` is not one of `FAMILIES` (or `gemma3_text`), a size is missing, or a field asks for
            arithmetic that is not implemented (the message names field, value and legal choices).
    """
    if "text_config" in raw and raw.get("model_type") == "gemma3":
        raw = {**raw["text_config"], "model_type": "gemma3"}
    kind = raw.get("model_type")
    family = {"gemma3_text": "gemma3"}.get(kind, kind)
    if family not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is not supported; choose one of {', '.join(FAMILIES)}")
    raw = {**_DEFAULTS[family], **raw}
    for name, legal in _IMPLEMENTED[family].items():
        if name in raw and raw[name] not in legal:
            raise ValueError(f"{name}={raw[name]!r} is not implemented for {family}; choose {' or '.join(map(repr, legal))}")
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if name not in raw:
            raise ValueError(f"config.json of this {family} model lacks the field {name!r}")
    rope = dict(raw.get("rope_parameters") or {})
    global_rope = dict(rope.get("full_attention", rope))
    heads = raw["num_attention_heads"]
    common: dict[str, Any] = dict(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_positions=raw["max_position_embeddings"],
        rope_theta=float(global_rope.get("rope_theta", raw.get("rotary_emb_base", raw["rope_theta"]))),
        norm_eps=float(raw["layer_norm_eps" if family == "gpt_neox" else "rms_norm_eps"]),
        tie_embeddings=bool(raw["tie_word_embeddings"]),
        rope_scaling=_rope_scaling(raw.get("rope_scaling") or global_rope),
        dtype=dtype,
    )
    if family == "qwen2":
        common.update(qkv_bias=True)
    elif family == "qwen3":
        common.update(qk_norm=True)
    elif family == "gemma3":
        local = rope.get("sliding_attention", {})
        if _rope_scaling(local) is not None:
            raise ValueError(f"rope_parameters.sliding_attention={local!r} is not implemented; its rope_type must be default")
        common.update(
            qk_norm=True,
            norm_offset=1.0,
            activation="gelu_tanh",
            embed_scale=float(raw["hidden_size"]) ** 0.5,
            post_norms=True,
            query_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
            sliding_window=raw["sliding_window"],
            sliding_pattern=_sliding_pattern(raw),
            local_rope_theta=float(local.get("rope_theta", raw["rope_local_base_freq"])),
        )
    elif family == "gpt_neox":
        common.update(
            num_kv_heads=heads,
            qkv_bias=True,
            dense_bias=True,
            norm="layer",
            activation="gelu" if raw["hidden_act"] == "gelu" else "gelu_tanh",
            gated_mlp=False,
            parallel_residual=bool(raw["use_parallel_residual"]),
            rotary_fraction=float(global_rope.get("partial_rotary_factor", raw["rotary_pct"])),
        )
    return ModelConfig(**common)


def _sliding_pattern(raw: Mapping[str, Any]) -> int:
    kinds = raw.get("layer_types")
    if not kinds:
        return int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
    if "full_attention" not in kinds:
        return len(kinds) + 1
    pattern = kinds.index("full_attention") + 1
    expected = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(len(kinds))]
    if list(kinds) != expected:
        raise ValueError(f"layer_types={kinds!r} is not a regular pattern of local and global layers")
    return pattern


_HF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
}


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The contents of a Hugging Face `config.json` for `config`: the inverse of `from_hf` (the dtype aside)."""
    c = config
    raw: dict[str, Any] = dict(
        architectures=[_HF_CLASSES[c.family]],
        model_type="gemma3_text" if c.family == "gemma3" else c.family,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        max_position_embeddings=c.max_positions,
        rope_theta=c.rope_theta,
        tie_word_embeddings=c.tie_embeddings,
    )
    if c.rope_scaling is not None:
        raw["rope_scaling"] = {"rope_type": c.rope_scaling.kind, "factor": c.rope_scaling.factor}
        if c.rope_scaling.kind == "llama3":
            raw["rope_scaling"].update(
                low_freq_factor=c.rope_scaling.low_freq_factor,
                high_freq_factor=c.rope_scaling.high_freq_factor,
                original_max_position_embeddings=c.rope_scaling.original_positions,
            )
    if c.family == "gpt_neox":
        return raw | dict(
            layer_norm_eps=c.norm_eps,
            hidden_act="gelu" if c.activation == "gelu" else "gelu_new",
            rotary_pct=c.rotary_fraction,
            rotary_emb_base=c.rope_theta,
            use_parallel_residual=c.parallel_residual,
        )
    raw |= dict(num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps)
    if c.family == "gemma3":
        kinds = ["sliding_attention" if c.is_local(i) else "full_attention" for i in range(c.num_layers)]
        scalar = round(c.scale**-2, 9)
        raw |= dict(
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=int(scalar) if scalar == int(scalar) else scalar,
            sliding_window=c.sliding_window,
            sliding_window_pattern=c.sliding_pattern,
            layer_types=kinds,
            rope_local_base_freq=c.local_rope_theta,
        )
    else:
        raw |= dict(hidden_act="silu")
    return raw
