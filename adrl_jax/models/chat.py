"""Chat templates: a list of messages to the text that the model was trained to continue."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
) -> str:
    """Fills in a Hugging Face chat template, in jinja's immutable sandbox: templates come out of downloaded files.

    Args:
        template: jinja source.
        messages: `{"role": …, "content": …}` each.
        add_generation_prompt: end with the opening of an assistant turn.
        special_tokens: names such as `bos_token` -> text.

    Raises:
        ValueError: the template is malformed, refuses the messages, or reaches for what the sandbox forbids.
    """
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise ValueError(f"messages[{i}]={message!r} must have 'role' and 'content'")
    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **(special_tokens or {}),
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template failed: {error}") from error


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    # Hugging Face renders with these three settings, and templates rely on them.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def supervised_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> tuple[np.ndarray, np.ndarray]:
    """A conversation that ends with an assistant's turn, as token ids to train on.

    What counts as the reply is found by lengths: the prompt is what generation would start from, the reply is the rest up
    to its end token. Marks in the template are not needed.

    Args:
        tokenizer: a `Tokenizer` with a chat template.
        messages: the last one has the role `assistant`.

    Returns:
        prompt ids int32 `[P]` and reply ids int32 `[R]`, the end token included.

    Raises:
        ValueError: the last turn is not the assistant's, the template does not continue its own generation prompt, or the
            reply is empty or without an end token.
    """
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError("the last message must have the role 'assistant'")
    prompt = tokenizer.chat(messages[:-1], add_generation_prompt=True)
    text = tokenizer.chat(messages, add_generation_prompt=False)
    if not text.startswith(prompt):
        raise ValueError(f"the chat template of {tokenizer.name!r} does not continue its own generation prompt")
    reply = tokenizer.encode(text[len(prompt) :])
    ends = np.flatnonzero(np.isin(reply, tokenizer.eos_ids))
    if not ends.size or not ends[0]:
        raise ValueError(f"the reply {messages[-1]['content']!r} is empty or the chat template gives it no end token")
    return tokenizer.encode(prompt), reply[: ends[0] + 1]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
