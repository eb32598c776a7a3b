"""The records that travel between rooms. Host records hold numpy arrays; `PackedBatch` is a pytree for the device.

Lengths are the only truth: end, pad and truncation facts are derived from them, never from token values (pad may equal
the end token).
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


class FinishReason(enum.IntEnum):
    """Why a response ended. `RUNNING` never appears in a finished `Rollout`."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORTED = 3


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        prompt_id: identity within its data set; randomness and history are keyed by it.
        token_ids: int32 `[P]`, `P >= 1`.
        text: what `token_ids` encode, for logs.
        reference: whatever the task's scorer compares a response with.
        metadata: free facts about the record (source line, difficulty, …).
    """

    prompt_id: int
    token_ids: np.ndarray
    text: str = ""
    reference: Any = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        ids = np.asarray(self.token_ids, np.int32)
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(f"Prompt.token_ids must be a non-empty vector, got shape {ids.shape} (prompt_id={self.prompt_id})")
        object.__setattr__(self, "token_ids", ids)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The law tokens are drawn from: softmax(logits / temperature), then top-k, top-p, min-p, in that order.

    Attributes:
        temperature: 0 means argmax (log-prob 0 under the limit law).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches this; 1 keeps all.
        min_p: drop tokens less likely than `min_p` times the most likely one; 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature!r} must be finite and >= 0")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k!r} must be >= 0 (0 keeps all)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} must be in (0, 1] (1 keeps all)")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p={self.min_p!r} must be in [0, 1) (0 keeps all)")

    @property
    def filtered(self) -> bool:
        """Whether any of top-k, top-p, min-p cuts the law."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to be generated; (prompt_id, visit, sample) and the run's seed name its randomness.

    Attributes:
        prompt: the question.
        visit: how often this prompt was drawn before in the run.
        sample: index within the prompt's group.
        group_id: requests with the same group id share a prompt and are compared with each other.
        max_new_tokens: response budget in tokens, >= 1.
        forced_length: benchmark aid: end tokens are ignored and the response has exactly `max_new_tokens` tokens.
        noise_visit: names the noise in place of `visit`, for research into noise that is reused across epochs: the law of such
            a response leans to what was reinforced since, see the option `reuse_noise_across_epochs`. None: `visit`.
        draft: int32 `[D]`, `1 <= D <= max_new_tokens`: what another policy answered to this very request, with the same
            noise. It is verified in one pass and continued where the serving policy first differs (`rollout.refresh`); what
            comes out is what a request without it gets. None: there is none.
    """

    prompt: Prompt
    visit: int
    sample: int
    group_id: int
    max_new_tokens: int
    forced_length: bool = False
    noise_visit: int | None = None
    draft: np.ndarray | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One finished response, exactly as sampled.

    Attributes:
        prompt_id, visit, sample, group_id: as in `Request`.
        token_ids: int32 `[P + R]`, prompt then response, never re-tokenised.
        prompt_length, response_length: P and R in tokens; the end token counts.
        log_probs: float32 `[R]`, natural log, of each response token under the law it was really drawn from
            (temperature and filters included).
        policy_versions: int32 `[R]`, the policy version that drew each token.
        finish_reason: `STOP`, `LENGTH` or `ABORTED`.
        sampling: the law's parameters.
        accept_passes: speculative verify passes this row took part in.
        accept_tokens: tokens those passes committed; `accept_length` is their ratio.
        noise_visit: as in `Request`: where it is not None and not `visit`, this is no independent sample of the policy.
    """

    prompt_id: int
    visit: int
    sample: int
    group_id: int
    token_ids: np.ndarray
    prompt_length: int
    response_length: int
    log_probs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason
    sampling: SamplingParams
    accept_passes: int = 0
    accept_tokens: int = 0
    noise_visit: int | None = None

    def __post_init__(self):
        n, r = self.prompt_length + self.response_length, self.response_length
        for name, length in (("token_ids", n), ("log_probs", r), ("policy_versions", r)):
            got = len(getattr(self, name))
            if got != length:
                raise ValueError(
                    f"Rollout.{name} has length {got}, expected {length} "
                    f"(prompt_length={self.prompt_length}, response_length={self.response_length})"
                )
        if self.prompt_length < 1 or self.response_length < 1:
            raise ValueError(
                f"Rollout needs a prompt and a response; prompt_length={self.prompt_length}, response_length={self.response_length}"
            )
        if self.finish_reason == FinishReason.RUNNING:
            raise ValueError("Rollout.finish_reason is RUNNING; only finished responses become rollouts")

    @property
    def response_ids(self) -> np.ndarray:
        return self.token_ids[self.prompt_length :]

    @property
    def noise_reused(self) -> bool:
        """Whether an earlier visit had the same noise."""
        return self.noise_visit is not None and self.noise_visit != self.visit

    @property
    def truncated(self) -> bool:
        return self.finish_reason != FinishReason.STOP

    @property
    def accept_length(self) -> float:
        """Tokens committed per speculative pass, the target's own included; NaN where no pass speculated."""
        return self.accept_tokens / self.accept_passes if self.accept_passes else float("nan")


@dataclasses.dataclass(frozen=True)
class Score:
    """A reward with its reason; "unparsed" is a fact of its own, never silently a number.

    Attributes:
        value: the reward.
        extracted: the answer text found in the response, None where none was.
        reason: `match`, `mismatch`, `unparsed_response`, `unparsed_reference`, `timeout` or `error`.
        parts: named components that add up to `value`, for logs.
        detail: the error's text, where there was one.
    """

    value: float
    extracted: str | None
    reason: str
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    detail: str = ""

    REASONS = ("match", "mismatch", "unparsed_response", "unparsed_reference", "timeout", "error")

    def __post_init__(self):
        if self.reason not in self.REASONS:
            raise ValueError(f"Score.reason={self.reason!r} is unknown; choose one of {', '.join(self.REASONS)}")


class PackedBatch(NamedTuple):
    """Sequences packed into rows. `M` rows, `T` tokens a row, `U` targets a row.

    A row holds segments one after the other. In the plain layout a segment is prompt + response of one rollout. In the
    prefix-shared layout it is one prompt followed by several responses to it, each of which attends to the prompt and
    itself only. Pads are at the end of a row.

    Query i may attend to key j of the same row when `segment_ids` agree and are not 0, j <= i, and `branch_ids[j]` is 0
    (prompt) or equals `branch_ids[i]`.

    Attributes:
        token_ids: int32 `[M, T]`.
        positions: int32 `[M, T]`, rotary position within the token's own sequence (siblings all start at P).
        segment_ids: int32 `[M, T]`, 1, 2, … within a row; 0 is padding.
        branch_ids: int32 `[M, T]`, 0 for prompt tokens, 1, 2, … for the responses of a segment.
        source_index: int32 `[M, U]`, the place in the row whose hidden state predicts this target. First response tokens
            of siblings share the place of the last prompt token.
        target_index: int32 `[M, U]`, the place in the row of the target token itself.
        target_ids: int32 `[M, U]`, the response tokens.
        target_mask: bool `[M, U]`, False for padding.
        log_probs: float32 `[M, U]`, behaviour log-probs.
        advantages: float32 `[M, U]`.
        rollout_index: int32 `[M, U]`, which rollout of the batch the target belongs to (0 for padding; see mask).
        staleness: int32 `[M, U]`, learner version minus the version that drew the token.
        group_index: int32 `[M, U]`, which group of the batch the target belongs to (0 for padding).
        proximal: float32 `[M, U]`, log-probs of the learner's weights when the batch arrived; None where not recomputed.
        proximal_lag: int32 `[M, U]`, updates since those weights; None where nothing needs it.
        reference: float32 `[M, U]`, log-probs of the reference model; None without one.
        keep: bool `[M, U]`, a rejection mask decided over the whole optimizer batch; None without one.
        returns, values: float32 `[M, U]`, what a value model should predict and what it predicted when the batch arrived;
            None without one.
    """

    token_ids: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    branch_ids: jax.Array
    source_index: jax.Array
    target_index: jax.Array
    target_ids: jax.Array
    target_mask: jax.Array
    log_probs: jax.Array
    advantages: jax.Array
    rollout_index: jax.Array
    staleness: jax.Array
    group_index: jax.Array
    proximal: jax.Array | None = None
    proximal_lag: jax.Array | None = None
    reference: jax.Array | None = None
    keep: jax.Array | None = None
    returns: jax.Array | None = None
    values: jax.Array | None = None
