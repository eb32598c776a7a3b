"""One batch of experience: prompts to requests, requests to rollouts, rollouts to scores and advantages.

`N` rollouts.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adrl_jax.rewards.checks import warn_if_unparsed
from adrl_jax.types import FinishReason, Prompt, Request, Rollout, Score

Scorer = Callable[[Sequence[tuple[Prompt, str, bool]]], list[Score]]
"""`score([(prompt, response text, truncated), …]) -> [Score, …]`, in order."""


class RewardError(ValueError):
    """A reward that cannot be learnt from; the message names the response and what was wrong with its score."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """Rollouts with what was made of them; all lists have length N and the order of the rollouts.

    Attributes:
        rollouts: as generated.
        prompts: the question of each.
        texts: the decoded responses, special tokens left out.
        scores: one each.
        advantages: float32 `[N]`; zeros until computed.
        frac_zero_std: share of groups whose rewards are all equal; they teach nothing.
    """

    rollouts: list[Rollout]
    prompts: list[Prompt]
    texts: list[str]
    scores: list[Score]
    advantages: np.ndarray
    frac_zero_std: float = 0.0

    @property
    def rewards(self) -> np.ndarray:
        """float64 `[N]`; not finite where a score was no number."""
        return np.array([s.value for s in self.scores], np.float64)

    @property
    def usable(self) -> np.ndarray:
        """bool `[N]`: the reward is a finite number and the reference could be read. Others take no part in learning."""
        return np.isfinite(self.rewards) & np.array([s.reason != "unparsed_reference" for s in self.scores], bool)


def requests_for(
    prompts: Sequence[Prompt],
    visits: Sequence[int],
    samples: int,
    max_new_tokens: int,
    first_sample: int = 0,
    noise_visits: Sequence[int] | None = None,
) -> list[Request]:
    """`samples` requests for each prompt; siblings stand together and share a group id, the prompt's place in the list.

    Args:
        noise_visits: the visit whose noise each prompt's samples get, see `Request.noise_visit`; None: their own.
    """
    noise_visits = visits if noise_visits is None else noise_visits
    return [
        Request(prompt, int(visit), first_sample + k, group, max_new_tokens, noise_visit=int(noise_visit))
        for group, (prompt, visit, noise_visit) in enumerate(zip(prompts, visits, noise_visits, strict=True))
        for k in range(samples)
    ]


def score(rollouts: Sequence[Rollout], prompts: Sequence[Prompt], tokenizer: Any, scorer: Scorer) -> Scored:
    """Decodes and scores finished rollouts. `prompts` has one entry a rollout.

    A score that is not a finite number is kept and counted; its rollout takes no part in learning, its siblings do.

    Raises:
        RewardError: the scorer failed on a response, or no score of the batch is a finite number.
    """
    texts = [tokenizer.decode(r.response_ids, skip_special=True) for r in rollouts]
    scores = scorer([(p, t, r.truncated) for p, t, r in zip(prompts, texts, rollouts, strict=True)])
    if len(scores) != len(rollouts):
        raise RewardError(f"the scorer returned {len(scores)} scores for {len(rollouts)} responses")
    for prompt, text, s in zip(prompts, texts, scores):
        if s.reason == "error":
            raise RewardError(f"the reward of prompt {prompt.prompt_id} failed: {s.detail} (response {text[:80]!r})")
    if scores and not any(np.isfinite(s.value) for s in scores):
        raise RewardError(
            f"no reward of {len(scores)} is a finite number; the first, of prompt {prompts[0].prompt_id}, is "
            f"{scores[0].value!r} (response {texts[0][:80]!r})"
        )
    warn_if_unparsed(scores, texts)
    return Scored(list(rollouts), list(prompts), texts, list(scores), np.zeros(len(scores), np.float32))


def metrics(scored: Scored) -> dict[str, float]:
    """Numbers of a batch: `reward/*`, `len/*` in tokens, `frac_truncated`, and counts of reasons as shares of N."""
    rewards = scored.rewards[np.isfinite(scored.rewards)]
    lengths = np.array([r.response_length for r in scored.rollouts])
    out = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/max": rewards.max(),
        "reward/min": rewards.min(),
        "reward/nonfinite": np.mean(~np.isfinite(scored.rewards)),
        "len/mean": lengths.mean(),
        "len/median": np.median(lengths),
        "len/p95": np.percentile(lengths, 95),
        "len/max": lengths.max(),
        "frac_truncated": np.mean([r.finish_reason != FinishReason.STOP for r in scored.rollouts]),
    }
    names = sorted({name for s in scored.scores for name in s.parts})
    out |= {f"reward/{name}": np.mean([s.parts.get(name, 0.0) for s in scored.scores]) for name in names}
    reasons = Counter(s.reason for s in scored.scores)
    out |= {f"score/{reason}": reasons[reason] / len(scored.scores) for reason in Score.REASONS}
    return {name: float(value) for name, value in out.items()}


def sample_records(scored: Scored, phase: str, step: int, count: int) -> list[dict[str, Any]]:
    """Up to `count` lines for `samples.jsonl`, spread evenly over the batch."""
    n = len(scored.rollouts)
    chosen = np.unique(np.linspace(0, n - 1, min(count, n)).astype(int)) if count else []
    return [_record(scored, phase, step, int(i)) for i in chosen]


def _record(scored: Scored, phase: str, step: int, i: int) -> dict[str, Any]:
    rollout, s, prompt = scored.rollouts[i], scored.scores[i], scored.prompts[i]
    return {
        "phase": phase,
        "step": step,
        "prompt_id": rollout.prompt_id,
        "visit": rollout.visit,
        "noise_reused": rollout.noise_reused,
        "sample": rollout.sample,
        "prompt": prompt.text,
        "response": scored.texts[i],
        "reference": str(prompt.reference),
        "extracted": s.extracted,
        "reward": s.value,
        "reason": s.reason,
        "reward_parts": dict(s.parts),
        "advantage": float(scored.advantages[i]),
        "response_length": rollout.response_length,
        "finish_reason": rollout.finish_reason.name.lower(),
        "version": int(rollout.policy_versions[-1]),
        "accept_length": rollout.accept_length,
    }
