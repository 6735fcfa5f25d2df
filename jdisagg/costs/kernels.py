"""Properties of an engine's kernels that affect the duration of steps: fusion, graph capture,
precision of matrix products, exchange of tokens among experts. The defaults describe this project's
programs. Plain data."""

import math
from dataclasses import dataclass
from typing import Literal

from jdisagg.errors import ConfigError

# Tiles of a product's result that one multiprocessor computes at a time, among which libraries
# choose: (tokens, columns, fraction of the best speed).
TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.6))


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernel properties of one engine.

    Attributes:
      exchange: How tokens reach experts of other ranks: "gather" (this project's programs) or
        "all_to_all" (specialised kernels, such as DeepEP's).
      dispatch_bits: Bits per value of tokens that are sent to experts; 0 means the bits of
        activations. Results are always sent back in the type of activations.
      exchange_bandwidth: Fraction of a scale-out link's peak that "all_to_all" achieves; 0 means
        the same fraction as for other collectives.
      direct_tokens: Largest number of tokens of a rank that "all_to_all" sends to each expert
        separately. For more tokens, one copy is sent to each host, which distributes the copy over
        its scale-up link.
      overlaps: Whether an exchange over scale-out links runs while the other half of the batch
        computes (two-batch overlap). Weights are then read once for each half.
      redundant_experts: Whether experts are replicated until ep divides their number (EPLB).
      multiprocessors: Number of multiprocessors of a device. Dense products run in waves of tiles,
        and a partial last wave takes as long as a full wave. With 0, time is proportional to work.
      matrix_speed: Speed of layers' matrix products relative to bfloat16: 2 for fp8, 4 for fp4.
      expert_speed, expert_bits: Speed, in units of `matrix_speed`, and bits per value of routed
        experts; 0 means the same as the other matrices.
      fused: Whether norms with residuals, the activation with its gate, and rope with the KV write
        are fused into one operation each.
      direct: Whether each device in a collective reads from all others at once, so that latency
        does not grow with the number of devices.
      captured_tokens: Largest number of tokens of a step with prompts that is launched as a
        captured graph; larger steps are launched eagerly.
      whole_contexts: Whether one thread block reads the whole context of a head and sequence in
        decode attention (early vLLM, DistServe). A step then waits for the busiest multiprocessor.
        Needs `multiprocessors`.
      draft_tokens: Number of draft tokens per sequence in each decode step, each predicted by one
        extra layer (multi-token prediction); 0 without speculation.
    """

    exchange: Literal["gather", "all_to_all"] = "gather"
    dispatch_bits: int = 0
    exchange_bandwidth: float = 0.0
    direct_tokens: int = 0
    overlaps: bool = False
    redundant_experts: bool = False
    multiprocessors: int = 0
    matrix_speed: float = 1.0
    expert_speed: float = 0.0
    expert_bits: int = 0
    fused: bool = False
    quantizes: bool = False
    expert_operations: int = 3
    expert_memory: float = 1.0
    expert_serial: bool = False
    direct: bool = False
    gathers: bool = False
    captured_tokens: int = 0
    whole_contexts: bool = False
    draft_tokens: int = 0
    acceptance: float = 0.0

    def __post_init__(self) -> None:
        if self.draft_tokens < 0 or not 0 <= self.acceptance <= 1:
            raise ConfigError(
                f"speculation: {self.draft_tokens} draft tokens with acceptance"
                f" {self.acceptance!r}; give 0 or more tokens and an acceptance from 0 to 1"
            )

    @property
    def tokens_per_step(self) -> float:
        """Expected number of tokens that a decode step yields for each sequence: the target's own
        token and the accepted drafts (Leviathan et al., "Fast inference from transformers via
        speculative decoding", 2023, equation 1)."""
        return sum(self.acceptance**draft for draft in range(self.draft_tokens + 1))

    def tiled(self, tokens: float, columns: float) -> float:
        """Returns the number of tokens that fully used multiprocessors could compute in the time of
        a product of `tokens` tokens. The result is at least `tokens`."""
        if not self.multiprocessors:
            return tokens
        at_once, best = self.multiprocessors, math.inf
        for rows, wide, speed in TILES:
            waves = math.ceil(math.ceil(tokens / rows) * math.ceil(columns / wide) / at_once)
            best = min(best, waves * at_once * rows * wide / columns / speed)
        return best

    def waited_for(
        self, sequences: float, context_tokens: float, longest: float, heads: float
    ) -> float:
        """Returns the number of context tokens that fully used multiprocessors could read in the
        time of decode attention. The result is `context_tokens` if the work is split evenly.

        With `whole_contexts` the result is the lesser of two upper bounds. Graham's bound for list
        scheduling ("Bounds on multiprocessing timing anomalies", 1969) is an even share plus the
        longest job. The other bound assumes that all jobs are as long as the longest and run in
        waves."""
        if not (self.whole_contexts and self.multiprocessors and sequences):
            return context_tokens
        share = self.multiprocessors / heads  # of a sequence's heads on one multiprocessor
        alone = share * (longest or context_tokens / sequences)
        return min(
            context_tokens + (1 - 1 / self.multiprocessors) * alone,
            math.ceil(sequences / share) * alone,
        )


OURS = Kernels()
