"""Chat templates: a list of messages to the text that the model was trained to continue."""

import datetime
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox


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
    # Hugging Face renders with these three settings, and templates rely on them.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **(special_tokens or {}),
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template failed: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
