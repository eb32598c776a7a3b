"""Algorithms by the name of their paper: each sets the fields of `learner` (and a few of `train`) that make it what it is.

In a config file `presets.apply(c, "dapo")`; the files in experiments/configs that take an argument hand it here:

    python -m experiments.train --config=experiments/configs/quickstart.py:dapo --workdir=runs/dapo

Fields and flags set afterwards win. What a preset does not name (learning rate, sizes, schedule) stays as it is. The `paper_*` presets follow
Asynchronous RLHF (arXiv 2410.18252) and its reference code in their conventions: its KL, penalties, schedule and
episodes; `schedule_unit`, `episode_unit`, `ties`, `eos_rule` and `old_log_probs` are the switches between that code's ways and sound ones.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from experiments.schema import ConfigError

_GROUP = {"surrogate": "ppo_clip", "advantage": "grpo", "aggregation": "token"}
_PAIR = {"advantage": "none", "aggregation": "group", "row_length": 0}  # rows that hold a group
_PAPER = {
    "schedule": "linear",
    "schedule_unit": "batch",
    "max_grad_norm": 0.0,
    "eos_rule": "replace",
    "eos_penalty": 1.0,
}
_PAPER_KL = {"kl_in": "reward", "kl_estimator": "k1", "kl_coef": 0.05, "old_log_probs": "recompute"}

_EPISODES = {"episodes": 16, "minibatches": 1}

# name -> (what it is, fields of `learner`, other fields)
PRESETS: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "grpo": ("GRPO, arXiv 2402.03300: group-normalised advantages, clipped ratio", _GROUP, {}),
    "dapo": (
        "DAPO, arXiv 2503.14476: clip-higher, token mean, dynamic sampling, soft overlong punishment, no KL",
        {
            **_GROUP,
            "clip_high": 0.28,
            "drop_zero_variance": True,
            "max_refills": 8,
            "overlong_penalty": 0.5,
            "overlong_margin": 16,
        },
        {},
    ),
    "dr_grpo": (
        "Dr. GRPO, arXiv 2503.20783: no division by deviation or length",
        {**_GROUP, "advantage": "dr_grpo", "aggregation": "constant"},
        {},
    ),
    "ppo": (
        "PPO, arXiv 1707.06347: a value model, GAE, KL in the reward",
        {**_GROUP, "advantage": "gae", "kl_in": "reward", "kl_estimator": "k1", "kl_coef": 0.05},
        {},
    ),
    "rloo": (
        "RLOO, arXiv 2402.14740: REINFORCE on whole responses, leave-one-out baseline, KL in the reward",
        {
            "surrogate": "reinforce",
            "advantage": "rloo",
            "aggregation": "sequence_sum",
            "kl_in": "reward",
            "kl_estimator": "k1",
            "kl_coef": 0.05,
        },
        {},
    ),
    "prox_rloo": (
        "Proximal RLOO, arXiv 2410.18252: RLOO with a clipped ratio of the response",
        {
            "surrogate": "prox_rloo",
            "advantage": "rloo",
            "aggregation": "sequence",
            "kl_in": "reward",
            "kl_estimator": "k1",
            "kl_coef": 0.05,
        },
        {},
    ),
    "copg": (
        "Contrastive policy gradient, arXiv 2406.19185: off-policy as it stands",
        {"surrogate": "copg", **_PAIR, "beta": 0.05},
        {},
    ),
    "online_dpo": ("Online DPO, arXiv 2402.04792: best against worst of a group", {"surrogate": "online_dpo", **_PAIR}, {}),
    "online_ipo": ("Online IPO, arXiv 2310.12036 on best against worst of a group", {"surrogate": "ipo", **_PAIR}, {}),
    "bon_sft": (
        "Best-of-N SFT: supervised learning on the best of each group",
        {"surrogate": "best_of_n", "advantage": "none", "aggregation": "sequence_sum"},
        {},
    ),
    "gspo": (
        "GSPO, arXiv 2507.18071: clipped geometric-mean ratio of the response",
        {**_GROUP, "surrogate": "gspo", "aggregation": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        {},
    ),
    "cispo": (
        "CISPO, arXiv 2506.13585: the clipped ratio weighs log-probs, every token keeps a gradient",
        {**_GROUP, "surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        {},
    ),
    "topr": (
        "TOPR, arXiv 2503.14286: tapered weights for bad responses",
        {"surrogate": "topr", "advantage": "dr_grpo", "aggregation": "sequence_sum"},
        {},
    ),
    "decoupled_ppo": (
        "Decoupled PPO, arXiv 2110.00641, as in AReaL, arXiv 2505.24298: steps bounded against recomputed log-probs, weighted back",
        {**_GROUP, "old_log_probs": "recompute", "weight": "token", "weight_high": 5.0},
        {},
    ),
    "a3po": (
        "A-3PO: decoupled PPO with the proximal policy interpolated by age",
        {**_GROUP, "old_log_probs": "interpolate", "weight": "token", "weight_high": 5.0},
        {},
    ),
    "tis_grpo": (
        "GRPO with truncated importance sampling between engine and learner",
        {**_GROUP, "old_log_probs": "recompute", "weight": "token", "weight_high": 2.0},
        {},
    ),
    "mis_grpo": (
        "GRPO with masked importance sampling of whole responses",
        {
            **_GROUP,
            "old_log_probs": "recompute",
            "weight": "sequence",
            "weight_high": 0.0,
            "mask": "sequence",
            "mask_low": 0.5,
            "mask_high": 2.0,
        },
        {},
    ),
    "icepop": (
        "IcePop: token weights inside a band, tokens outside it left out",
        {
            **_GROUP,
            "old_log_probs": "recompute",
            "weight": "token",
            "weight_high": 0.0,
            "mask": "token",
            "mask_low": 0.5,
            "mask_high": 5.0,
        },
        {},
    ),
    "opsm_grpo": ("GRPO with off-policy sequence masking (DeepSeek-V3.2)", {**_GROUP, "mask": "opsm"}, {}),
    "aipo": (
        "AIPO, LlamaRL, arXiv 2505.24034: REINFORCE with a truncated weight, no clip",
        {"surrogate": "reinforce", "advantage": "grpo", "aggregation": "token", "weight": "token", "weight_high": 4.0},
        {},
    ),
    "dppo": (
        "PRIME-RL's loss: the plain ratio, tokens left out whose probability moved far",
        {"surrogate": "ratio", "advantage": "dr_grpo", "aggregation": "token", "mask": "probability"},
        {},
    ),
    "m2po": (
        "M2PO, arXiv 2510.01161: the largest log-ratios of a batch are left out",
        {**_GROUP, "old_log_probs": "recompute", "mask": "m2po", "weight": "token"},
        {},
    ),
    "vespo": (
        "VESPO, arXiv 2602.10693: a smooth weight of the response's ratio",
        {"surrogate": "reinforce", "advantage": "grpo", "aggregation": "token", "weight": "vespo"},
        {},
    ),
    "vcpo": (
        "VCPO, arXiv 2602.17616: learning rate by effective sample size, off-policy optimal baseline, truncated weights, no clip",
        {
            "surrogate": "reinforce",
            "advantage": "optimal",
            "aggregation": "token",
            "weight": "sequence",
            "weight_high": 8.0,
            "ess_base": 1.0,
        },
        {},
    ),
    "paper_ppo": (
        "Asynchronous RLHF's PPO: one completion a prompt",
        {**_GROUP, **_PAPER, **_PAPER_KL, "advantage": "gae", "bootstrap_truncated": False, **_EPISODES},
        {"train.group_size": 1, "sampling.temperature": 0.7},
    ),
    "paper_prox_rloo": (
        "Asynchronous RLHF's proximal RLOO: two completions a prompt, each an episode",
        {
            **_PAPER,
            **_PAPER_KL,
            **_EPISODES,
            "surrogate": "prox_rloo",
            "advantage": "rloo",
            "aggregation": "sequence",
            "episode_unit": "completion",
        },
        {"train.group_size": 2, "sampling.temperature": 0.7},
    ),
    "paper_online_dpo": (
        "Asynchronous RLHF's Online DPO: two completions a prompt, a prompt an episode, ties to the first",
        {**_PAPER, **_PAIR, **_EPISODES, "surrogate": "online_dpo", "ties": "first"},
        {"train.group_size": 2, "sampling.temperature": 0.7},
    ),
    "paper_bon_sft": (
        "Asynchronous RLHF's Best-of-2 SFT: two completions a prompt, a prompt an episode",
        {**_PAPER, **_EPISODES, "surrogate": "best_of_n", "advantage": "none", "aggregation": "sequence_sum", "ties": "first"},
        {"train.group_size": 2, "sampling.temperature": 0.7},
    ),
}


def apply(c: config_dict.ConfigDict, name: str) -> config_dict.ConfigDict:
    """Sets the preset's fields in `c` and returns it.

    Raises:
        ConfigError: no such preset.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"preset={name!r} is unknown; {hint}Choose one of {', '.join(PRESETS)}")
    _, learner, others = PRESETS[name]
    c.update_from_flattened_dict({**{f"learner.{field}": value for field, value in learner.items()}, **others})
    return c
