"""Attention of N fresh nodes a row, a chain or a tree, over a ragged cache and over each other."""

from adrl_kernels.verify_attention.api import verify_attention as verify_attention
