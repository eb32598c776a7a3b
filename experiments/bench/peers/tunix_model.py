"""What both Tunix peers share: the llama model from a Hugging Face folder, and prompts passed as token ids."""

import json
import pathlib
from importlib import metadata

import jax
import jax.numpy as jnp
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params


class IdTokenizer:
    """Stands in for a tokenizer where prompts are token ids already: the "text" of a prompt is its ids, space-separated."""

    def __init__(self, pad: int, eos: int):
        self._pad, self._eos = pad, eos

    def encode(self, text: str, **_) -> list[int]:
        return [int(part) for part in text.split()]

    def decode(self, ids: list[int], **_) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # the sampler prepends a true id only

    def eos_id(self) -> int:
        return self._eos

    def pad_id(self) -> int:
        return self._pad


def text(ids: list[int]) -> str:
    """The "text" that `IdTokenizer` reads as these ids."""
    return " ".join(map(str, ids))


def load(folder: str):
    """The model in float32 on one device.

    Returns:
        (model, mesh, sizes of the model, facts for the benchmark's JSON).
    """
    raw = json.loads((pathlib.Path(folder) / "config.json").read_text())
    sizes = llama.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        rope_theta=int(raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]),
        norm_eps=raw["rms_norm_eps"],
        weight_tying=raw["tie_word_embeddings"],
    )
    # Tunix 0.1.7 does not hand the configured theta to its rotary embedding, whose default is another model's.
    llama.apply_rope.__defaults__ = (sizes.rope_theta,)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = llama_params.create_model_from_safe_tensors(folder, sizes, mesh, dtype=jnp.float32)
    return model, mesh, sizes, {"tunix": metadata.version("google-tunix"), "jax": jax.__version__}


def round_up(length: int, multiple: int = 16) -> int:
    """A compiled prompt width that hugs the longest prompt."""
    return -(-length // multiple) * multiple
