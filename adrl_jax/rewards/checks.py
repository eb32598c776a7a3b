"""Signs that a batch of rewards means nothing."""

import warnings
from collections.abc import Sequence

from adrl_jax.types import Score


def warn_if_unparsed(scores: Sequence[Score], responses: Sequence[str]) -> None:
    """Warns where no response of a batch could be read: usually prompt and extraction mode ask for different forms."""
    if scores and all(s.reason == "unparsed_response" for s in scores):
        warnings.warn(
            f"none of {len(scores)} responses has an answer in the expected form; check the prompt and the extraction mode. "
            f"The first response ends with {responses[0][-200:]!r}",
            stacklevel=2,
        )
