"""How long the responses to a prompt have been, for serving those expected to take longest first.

It decides the order of requests and with it the speed, never a token, so it is not part of a run's saved state.
"""

from collections.abc import Sequence

from adrl_jax.types import Request, Rollout

_KEEP = 0.5  # weight of what was known before a new response


class LengthHistory:
    """Running means of response lengths by prompt, in tokens; a prompt never seen is expected to use its whole budget."""

    def __init__(self):
        self._mean: dict[int, float] = {}

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        for r in rollouts:
            before = self._mean.get(r.prompt_id, float(r.response_length))
            self._mean[r.prompt_id] = _KEEP * before + (1 - _KEEP) * r.response_length

    def expected(self, requests: Sequence[Request]) -> list[float]:
        """Response tokens expected of each request."""
        return [self._mean.get(r.prompt.prompt_id, float(r.max_new_tokens)) for r in requests]
