"""How rollouts are run: sizes that are compiled and strategies that may be chosen."""

import dataclasses
from collections.abc import Sequence

from adrl_kernels import choice

from adrl_jax.speculation import verify
from adrl_jax.speculation.strategy import OFF, Strategy

ORDERS = ("arrival", "longest_first")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The engine's settings. Results do not depend on any size here, only speed and memory do.

    Attributes:
        seed: the run's seed; with prompt, visit, sample and position it names all noise.
        eos_ids: tokens that end a response (and belong to it).
        valid_vocab: ids at or past it are never drawn; None allows the whole table.
        strategies: the arms, `OFF` among them: plain decoding is always a choice.
        max_batch: rows that run together.
        batch_buckets: compiled batch sizes; None means powers of two up to `max_batch`, and `max_batch`.
        cache_bucket: cache capacities are multiples of this (of coarser units when long), in tokens.
        rounds_per_launch: verify passes between two looks of the host.
        verification: `coupled` or `rejection`.
        prefill_bucket: prompts are padded to multiples of this (of coarser units when long), in tokens.
        prefill_batch: most prompts prefilled together.
        prefill_chunk: longest piece of a prompt, in tokens, that goes through the target between two launches; None means
            the whole prompt at once. A multiple of `prefill_bucket`.
        admission: order in which requests get a row: `arrival`, or `longest_first` by what is expected of them.
        max_length: longest prompt + response in tokens; None means what the model allows.
        simulate_acceptance: benchmark aid, None outside of benchmarks: drafts stand with this probability, whatever they are,
            so that the engine can be measured apart from a drafter's luck. Rollouts made this way are no samples.
        kernels: who computes the target's attention and draws: `xla`, `pallas_tpu`, `pallas_gpu`, `interpret` (slow, for
            tests), or `auto`, which chooses for this machine and says so in the log. See `adrl_kernels.choice`.
    """

    seed: int
    eos_ids: tuple[int, ...]
    valid_vocab: int | None = None
    strategies: tuple[Strategy, ...] = (OFF,)
    max_batch: int = 64
    batch_buckets: tuple[int, ...] | None = None
    cache_bucket: int = 64
    rounds_per_launch: int = 16
    verification: str = "coupled"
    prefill_bucket: int = 32
    prefill_batch: int = 8
    prefill_chunk: int | None = None
    admission: str = "arrival"
    max_length: int | None = None
    simulate_acceptance: float | None = None
    kernels: str = "xla"

    def __post_init__(self):
        optional = ("prefill_chunk", "max_length")
        for name in ("max_batch", "cache_bucket", "rounds_per_launch", "prefill_bucket", "prefill_batch", *optional):
            value = getattr(self, name)
            if name in optional and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"EngineConfig.{name}={value!r} must be a positive integer")
        verify.check_method(self.verification)
        choice.check_name(self.kernels, "EngineConfig.kernels")
        if self.prefill_chunk is not None and self.prefill_chunk % self.prefill_bucket:
            raise ValueError(
                f"EngineConfig.prefill_chunk={self.prefill_chunk} must be a multiple of prefill_bucket={self.prefill_bucket}"
            )
        if self.admission not in ORDERS:
            raise ValueError(f"EngineConfig.admission={self.admission!r} is unknown; choose one of {', '.join(ORDERS)}")
        if self.simulate_acceptance is not None and not 0 <= self.simulate_acceptance <= 1:
            raise ValueError(f"EngineConfig.simulate_acceptance={self.simulate_acceptance!r} must be in [0, 1], or None")
        if OFF not in self.strategies:
            raise ValueError("EngineConfig.strategies must contain OFF: plain decoding is always a choice")
        if len(set(self.strategies)) != len(self.strategies):
            raise ValueError(f"EngineConfig.strategies has duplicates: {', '.join(s.name for s in self.strategies)}")
        if self.batch_buckets is not None:
            if any(not isinstance(b, int) or b < 1 for b in self.batch_buckets):
                raise ValueError(f"EngineConfig.batch_buckets={self.batch_buckets!r} must be positive integers")
            if not self.batch_buckets or max(self.batch_buckets) < self.max_batch:
                raise ValueError(f"EngineConfig.batch_buckets={self.batch_buckets!r} must reach max_batch={self.max_batch}")
        if any(not isinstance(e, int) or e < 0 for e in self.eos_ids):
            raise ValueError(f"EngineConfig.eos_ids={self.eos_ids!r} must be token ids >= 0")

    @property
    def batches(self) -> tuple[int, ...]:
        """Compiled batch sizes, ascending."""
        if self.batch_buckets is not None:
            return tuple(sorted(set(self.batch_buckets)))
        powers = [1 << i for i in range(self.max_batch.bit_length()) if 1 << i < self.max_batch]
        return (*powers, self.max_batch)

    def capacity(self, needed: int) -> int:
        """The cache capacity that holds `needed` tokens."""
        return round_up(needed, self.cache_bucket)


def round_up(value: int, unit: int) -> int:
    """The next multiple of `unit`, or of 2, 4, … times it for long values: at most eight sizes to each doubling."""
    while value > 8 * unit:
        unit *= 2
    return -(-value // unit) * unit


def bucket(value: int, buckets: Sequence[int]) -> int:
    """The smallest of `buckets` that is at least `value`.

    Raises:
        ValueError: every bucket is smaller.
    """
    fitting = [b for b in buckets if b >= value]
    if not fitting:
        raise ValueError(f"{value} exceeds the largest bucket of {tuple(buckets)}")
    return min(fitting)
