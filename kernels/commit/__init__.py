"""The accepted path of each row's fresh nodes, written into the cache in place."""

from adrl_kernels.commit.api import commit as commit
