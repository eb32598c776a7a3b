"""`sample_head`: from hidden states to drawn ids and their log-probs."""

import jax
from adrl_kernels import choice
from adrl_kernels.sample_head import pallas_tpu, reference
from adrl_kernels.sample_head.arguments import Draws, Norm, check


def sample_head(
    hidden: jax.Array,
    weight: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    *,
    by_row: bool = True,
    valid_vocab: int | None = None,
    draws: int = 1,
    norm: Norm | None = None,
    implementation: str = "auto",
) -> Draws:
    """The ids of the largest logits / temperature + Gumbel noise: with one draw an exact sample of the law (Gumbel-max).

    With coupled verification the first id of each position is the target's own token, and that and its log-prob are all that
    acceptance needs. More than one draw are the children of a node in a draft tree.

    Top-k, top-p and min-p need all logits at once: such laws are drawn by `adrl_jax.sampling.law`, not here.

    Args:
        hidden: `[M, H]`.
        weight: `[V, H]`, or `[H, V]` with `by_row=False`, in the dtype of `hidden`.
        keys: uint32 `[M, 2]`, name the noise, see `adrl_jax.sampling.noise.position_keys`.
        temperature: float32 `[M]`, >= 0; positions at 0 take the largest logit, the lowest id among equals.
        valid_vocab: ids at or past it are never drawn and have no mass; None allows all.
        draws: how many ids, best first.
        norm: applied to `hidden` before; None where that has been done.
        implementation: one of `choice.IMPLEMENTATIONS`. All use the same random bits; scores differ in the last bits.

    Returns:
        see `Draws`.

    Raises:
        ValueError: shapes or dtypes that do not fit together, `valid_vocab`, `draws` or a known temperature out of range.
        choice.UnsupportedError: a dtype, hidden size or number of draws that the implementation does not do.
    """
    valid = weight.shape[0 if by_row else 1] if valid_vocab is None else valid_vocab
    check(hidden, weight, keys, temperature, by_row, valid, draws, norm)
    problems = {
        "pallas_tpu": lambda: pallas_tpu.problem(hidden, weight, draws),
        "interpret": lambda: pallas_tpu.problem(hidden, weight, draws),
        "pallas_gpu": lambda: choice.gpu_module("sample_head").problem(hidden, weight, draws),
    }
    chosen = choice.resolve("sample_head", implementation, lambda name: problems.get(name, lambda: None)())
    options = dict(by_row=by_row, valid_vocab=valid, draws=draws, norm=norm)
    if chosen == "xla":
        precision = None if hidden.dtype != "float32" else "highest"
        return reference.sample_head(hidden, weight, keys, temperature, **options, precision=precision)
    if chosen == "pallas_gpu":
        return choice.gpu_module("sample_head").sample_head(hidden, weight, keys, temperature, **options)
    return pallas_tpu.sample_head(hidden, weight, keys, temperature, **options, interpret=chosen == "interpret")
