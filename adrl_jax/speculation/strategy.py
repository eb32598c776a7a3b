"""The arms a controller chooses from: which drafter, and how many tokens it may propose."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to decode a round.

    Attributes:
        drafter: the drafter's name, or `none`.
        depth: drafted tokens along one path, 0 exactly when there is no drafter.
        width: candidates kept a level, and children of each; 1 is a chain.
        verify_tokens: tokens of one verify pass a row, the last committed token included; None means `depth + 1`. A chain
            with fewer shares them: that many a row on average, given to the likeliest drafts (`rollout.shared_slots`). A tree has `width` nodes at its first level and `width ** 2` candidates at each further one to choose from.
    """

    drafter: str
    depth: int
    width: int = 1
    verify_tokens: int | None = None

    def __post_init__(self):
        if not isinstance(self.drafter, str) or not self.drafter:
            raise ValueError(f"Strategy.drafter={self.drafter!r} must be a drafter's name or 'none'")
        for name, least in (("depth", 0), ("width", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Strategy.{name}={value!r} must be an integer >= {least} (drafter={self.drafter!r})")
        if (self.drafter == "none") != (self.depth == 0):
            raise ValueError(
                f"Strategy.depth={self.depth} with drafter={self.drafter!r}: depth is 0 exactly for drafter 'none'"
            )
        least = most = self.depth + 1
        if self.speculates:
            most = 1 + self.width + (self.depth - 1) * self.width**2
            least = least if self.width > 1 else 2
        tokens = self.verify_tokens
        if tokens is None:
            object.__setattr__(self, "verify_tokens", self.depth + 1)
        elif not isinstance(tokens, int) or isinstance(tokens, bool) or not least <= tokens <= most:
            legal = f"an integer in [{least}, {most}]"
            raise ValueError(f"Strategy.verify_tokens={tokens!r} must be {legal} (depth={self.depth}, width={self.width})")

    @property
    def speculates(self) -> bool:
        return self.depth > 0

    @property
    def shares_slots(self) -> bool:
        """Whether rows compete for the slots of a verify pass."""
        return self.width == 1 and self.verify_tokens < self.depth + 1

    @property
    def name(self) -> str:
        """Short label, such as `off`, `eagle-d4`, `eagle-d6-v3` (shared slots) or `eagle-d8-w4-v32` (a tree)."""
        if not self.speculates:
            return "off"
        width = "" if self.width == 1 else f"-w{self.width}"
        verify = f"-v{self.verify_tokens}" if self.width > 1 or self.shares_slots else ""
        return f"{self.drafter}-d{self.depth}{width}{verify}"


OFF = Strategy("none", 0)
