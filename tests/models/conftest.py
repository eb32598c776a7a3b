"""Shared by the model tests: fixtures on disk, a plain forward pass, and a small trained tokenizer."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from adrl_jax.models import kv_cache, transformer

DATA = pathlib.Path(__file__).parent.parent / "data"
FAMILY_CASES = ("llama", "llama3_rope", "qwen2", "qwen3", "gemma3", "gpt_neox", "gpt_neox_sequential")


@pytest.fixture(scope="session")
def families_folder() -> pathlib.Path:
    return DATA / "families"


@pytest.fixture(params=FAMILY_CASES)
def family_folder(request) -> pathlib.Path:
    return DATA / "families" / request.param


@pytest.fixture(scope="session")
def forward():
    """`forward(config, params, tokens [B, T]) -> float32 logits [B, T, V]`, causal over a cache of T.

    `jit=False` runs operation by operation: cheaper where many configs differ in constants only.
    """

    def run(config, params, tokens, jit=True):
        tokens = jnp.asarray(tokens, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

        def program(params, tokens):
            hidden, _ = transformer.Transformer(config).apply(
                {"params": params},
                tokens,
                positions,
                attend=kv_cache.cached_attention(positions),
                cache=kv_cache.init_cache(config, *tokens.shape),
            )
            return transformer.logits(params, hidden)

        return np.asarray((jax.jit(program) if jit else program)(params, tokens))

    return run


CORPUS = (
    "The quick brown fox jumps over the lazy dog. Don't we'll they're it's.",
    "def f(x):\n    return x ** 2 + 1  # naïve café\n\n\tx = 1234567",
    "日本語 🙂 “quotes” the the there then them",
)


@pytest.fixture(scope="session")
def trained_bpe() -> tokenizers.Tokenizer:
    """A byte-level BPE of 340 tokens with `<|end|>` and `<|turn|>` as special tokens 0 and 1."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer
