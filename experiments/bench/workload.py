"""The work that every benchmark of a real model does, ours and the peers': the same prompts, the same weights."""

import hashlib
import itertools
import os
import pathlib

from adrl_jax.models import weights
from adrl_jax.models.tokenizer import Tokenizer
from adrl_jax.types import Prompt

PEOPLE = ("Nora", "Emil", "Aiko", "Luis", "Zara", "Owen", "Mina", "Jonas")
THINGS = ("pencils", "apples", "marbles", "postcards", "oranges", "stickers", "buttons", "shells")
PADDING = (
    "Take your time, write down every step on a line of its own, and check the sum before you give the answer as one number."
)


def prompts(tokenizer: Tokenizer, count: int, max_tokens: int = 128) -> list[Prompt]:
    """Word problems as chat prompts, each within a few tokens of `max_tokens` and never above.

    Args:
        tokenizer: with a chat template the problem is the user's message; without one it is the prompt itself.
        count: how many; problem i is the same whatever the count.
        max_tokens: the length they are written up to.

    Raises:
        ValueError: `max_tokens` is too small for one problem.
    """
    made = []
    for index in range(count):
        text, ids = _problem(tokenizer, index, max_tokens)
        made.append(Prompt(prompt_id=index, token_ids=ids, text=text))
    return made


def _problem(tokenizer: Tokenizer, index: int, max_tokens: int):
    def rendered(body: str):
        if tokenizer.chat_template:
            body = tokenizer.chat([{"role": "user", "content": body}])
        return body, tokenizer.encode(body)

    person, thing = PEOPLE[index % len(PEOPLE)], THINGS[(index // len(PEOPLE) + index) % len(THINGS)]
    body = f"{person} has {12 + 7 * index % 31} {thing}. How many {thing} does {person} have in the end?"
    text, ids = rendered(body)
    if len(ids) > max_tokens:
        raise ValueError(f"max_tokens={max_tokens} is too small: the shortest problem has {len(ids)} tokens")
    # Whole sentences as long as they fit, then words: every prompt ends up close to the limit.
    events = (
        f"On day {day}, {person} {'buys' if (day + index) % 2 else 'gives away'} {2 + (3 * day + index) % 9} of them."
        for day in itertools.count(1)
    )
    for pieces in (events, itertools.cycle(PADDING.split())):
        for piece in pieces:
            longer_text, longer_ids = rendered(f"{body} {piece}")
            if len(longer_ids) > max_tokens:
                break
            body, text, ids = f"{body} {piece}", longer_text, longer_ids
    return text, ids


def hf_folder(model: weights.Model, cache: str | os.PathLike | None = None) -> pathlib.Path:
    """A Hugging Face folder of the model for peers to load, written once and kept.

    Args:
        model: as loaded by `weights.load`.
        cache: where such folders are kept; default `~/.cache/adrl_jax/peers`.
    """
    source = pathlib.Path(model.source)
    stat = source.stat()
    key = f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{model.config}"
    name = f"{model.config.family}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    folder = pathlib.Path(cache or pathlib.Path.home() / ".cache" / "adrl_jax" / "peers") / name
    if not (folder / "config.json").exists():  # written last: a folder that has it is complete
        weights.save_hf(folder, model.config, model.params, model.tokenizer)
    return folder
