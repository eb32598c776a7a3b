"""A real 260k-parameter llama, read from the folder that `ADRL_DATA` names."""

import json
import os
import pathlib
import struct

import numpy as np
import pytest

from adrl_jax.models import bpe, tokenizer, weights

FOLDER = pathlib.Path(os.environ["ADRL_DATA"]) / "stories260k" if "ADRL_DATA" in os.environ else None

pytestmark = pytest.mark.skipif(FOLDER is None, reason="ADRL_DATA is unset: it names the folder that holds stories260k/")


def pieces() -> tuple[list[str], list[float]]:
    """tok512.bin: int32 longest piece, then for each piece float32 score, int32 length, bytes."""
    data = (FOLDER / "tok512.bin").read_bytes()
    tokens, scores, at = [], [], 4
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        tokens.append(data[at : at + length].decode())
        scores.append(score)
        at += length
    return tokens, scores


@pytest.fixture(scope="module")
def stories_tokenizer():
    tokens, scores = pieces()
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    spelled = [token.strip() if i < 3 else token.replace(" ", "▁") for i, token in enumerate(tokens)]
    return tokenizer.FastTokenizer(bpe.from_scores(spelled, scores, types), name="tok512", eos_ids=[2], bos_id=1)


@pytest.fixture(scope="module")
def reference():
    return json.loads((FOLDER / "reference.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def model():
    return weights.load(FOLDER)


def merge_by_score(text: str) -> list[int]:
    """The format's own rule, spelled out: characters (or bytes), then the best-scoring neighbours until none fit."""
    tokens, scores = pieces()
    ids_of = {token: i for i, token in reversed(list(enumerate(tokens)))}
    ids = []
    for c in (" " + text) if text else "":
        ids += [ids_of[c]] if c in ids_of else [byte + 3 for byte in c.encode()]
    while True:
        fits = [
            (scores[m], -i) for i in range(len(ids) - 1) if (m := ids_of.get(tokens[ids[i]] + tokens[ids[i + 1]])) is not None
        ]
        if not fits:
            return ids
        i = -max(fits)[1]
        ids[i : i + 2] = [ids_of[tokens[ids[i]] + tokens[ids[i + 1]]]]


def test_prompt_ids(stories_tokenizer, reference):
    for text, expected in reference.items():
        assert stories_tokenizer.encode(text, add_bos=True).tolist() == expected["ids"]


def test_the_rebuilt_merges_follow_the_scores(stories_tokenizer, reference):
    texts = [entry["greedy_text"] for entry in reference.values()] + ["naïve — 7 cats!", "  aa  bb", "mississippi hahahaha"]
    for text in texts:
        ids = stories_tokenizer.encode(text)
        assert ids.tolist() == merge_by_score(text)
        assert stories_tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def logits(model, reference, forward):
    """Logits at every place of each prompt and its 64 greedy ids. One padded batch, so one program."""
    rows = [expected["ids"] + expected["greedy64_ids"] for expected in reference.values()]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(tokens, rows):
        row[: len(ids)] = ids
    out = forward(model.config, model.params, tokens)
    return {name: out[i, : len(rows[i])] for i, name in enumerate(reference)}


def test_last_logits(logits, reference):
    for name, expected in reference.items():
        last = logits[name][len(expected["ids"]) - 1]
        assert np.argsort(-last)[:20].tolist() == expected["last_top20_ids"]
        np.testing.assert_allclose(last[expected["last_top20_ids"]], expected["last_top20_logits"], atol=1e-4, rtol=0)


def test_greedy_continuations(logits, stories_tokenizer, reference):
    """Every one of the 64 ids is the argmax after its predecessors, so greedy decoding gives exactly them."""
    for name, expected in reference.items():
        start = len(expected["ids"]) - 1
        assert logits[name][start:-1].argmax(-1).tolist() == expected["greedy64_ids"]
        assert stories_tokenizer.decode(expected["ids"] + expected["greedy64_ids"]) == expected["greedy_text"]
