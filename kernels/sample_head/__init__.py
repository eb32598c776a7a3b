"""Final norm, vocabulary projection, noise, argmax and log-prob in one pass over the weight: logits never reach memory."""

from adrl_kernels.sample_head.api import sample_head as sample_head
