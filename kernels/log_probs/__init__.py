"""Log-probs and entropies of given tokens, and their derivatives, without logits in memory."""

from adrl_kernels.log_probs.api import token_log_probs as token_log_probs
