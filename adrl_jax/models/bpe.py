"""Byte-pair encoders rebuilt from bare vocabularies, as GGUF files hold them."""

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

# GGUF token types.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# How text is cut before merging: the published patterns of each tokenizer, applied one after the other.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CUTS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


def byte_level(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], cut: str) -> tokenizers.Tokenizer:
    """A byte-level BPE (GPT-2's kind).

    Args:
        tokens: spelling of each id, bytes in GPT-2's printable alphabet.
        types: GGUF token type of each id.
        merges: `"left right"`, best first.
        cut: how text is cut before merging, one of `gpt-2`, `smollm`, `qwen2`, `llama-bpe`.

    Raises:
        ValueError: unknown `cut`.
    """
    if cut not in _CUTS:
        raise ValueError(f"pre-tokenizer {cut!r} is not supported; choose one of {', '.join(_CUTS)}")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 takes a word that is itself a token without merging; the others always merge.
    model = BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=cut == "llama-bpe")
    tokenizer = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _CUTS[cut]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer, tokens, types)


def from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, add_space_prefix: bool = True
) -> tokenizers.Tokenizer:
    """A SentencePiece BPE: of all neighbouring pairs that form a token, merge the one with the best score, repeatedly.

    The merge list is rebuilt: every split of a token into two others, best score first. Characters without a token
    become byte tokens.

    Args:
        tokens: spelling of each id, spaces as `▁`.
        scores: of each id, higher merges first.
        types: GGUF token type of each id.
        add_space_prefix: text begins with a space that is not in it.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    skipped = (_UNKNOWN, _CONTROL, _BYTE)
    splits = []
    for i, token in enumerate(tokens):
        if types[i] in skipped:
            continue
        for at in range(1, len(token)):
            left, right = ids.get(token[:at]), ids.get(token[at:])
            if left is not None and right is not None and types[left] not in skipped and types[right] not in skipped:
                splits.append((-scores[i], i, at, (token[:at], token[at:])))
    splits.sort(key=lambda split: split[:3])
    unknown = next((token for token, kind in zip(tokens, types) if kind == _UNKNOWN), None)
    model = BPE(ids, [split[3] for split in splits], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return _with_special(tokenizer, tokens, types)


def _with_special(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """Marks control tokens as special (found in text, left out when decoding) and user-defined ones as whole words."""

    def added(kind: int, special: bool) -> list[AddedToken]:
        return [AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, types) if k == kind]

    if control := added(_CONTROL, True):
        tokenizer.add_special_tokens(control)
    if whole := added(_USER_DEFINED, False):
        tokenizer.add_tokens(whole)
    return tokenizer
