"""How an instance's programs work, where engines differ: what they fuse and capture, in what
arithmetic they multiply, how devices exchange. The defaults are this project's own programs. Pure
data."""

import math
from dataclasses import dataclass
from typing import Literal

# What one multiprocessor makes of a product's result at a time, and what of its best speed it
# reaches: libraries choose among such tiles.
# (tokens, columns, speed)
TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.6))


@dataclass(frozen=True, slots=True)
class Kernels:
    """`exchange`: how tokens reach experts of other ranks: "gather" as our programs do,
    "all_to_all" as specialised kernels do. `multiprocessors` of a device, where the staircase of
    its dense products matters: they make tiles in waves, and a last wave takes as long as a full
    one. 0: time grows evenly.

    matrix_speed: of products with the layers' matrices, by the peak of bfloat16: 2 where both
    factors are fp8, 4 where they are fp4. expert_speed, expert_bits: the same and the bits of a
    value for routed experts alone, where these are quantized otherwise; 0: as the matrices.
    fused: norms with residuals, the activation with its gate, and rope with the writing of KV are
    one operation each. quantizes: what a product is given is quantized by an operation of its own.
    expert_operations: of a layer's routing, products and sums. expert_memory: what reading routed
    experts' weights reaches, by what dense products do. expert_serial: that reading and their
    arithmetic follow each other, as they do where each expert has few rows. direct: within a domain
    every device reads from all others at once, so that a collective's latency does not grow with
    their number. gathers: rows of routed tokens are copied to their experts and back.
    captured_tokens: steps that carry prompts and no more tokens than this are issued as decode
    steps are, larger ones eagerly. whole_contexts: decode attention has one block of threads a head
    and sequence, which reads the whole context (vLLM's first kernels, DistServe's), so that a step
    waits for the multiprocessor with the most of them; wants `multiprocessors`."""

    exchange: Literal["gather", "all_to_all"] = "gather"
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

    def tiled(self, tokens: float, columns: float) -> float:
        """As many tokens as would take as long if every multiprocessor had work all the time, with
        the best of the tiles."""
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
        """Tokens of context that could be read, by all multiprocessors at once, while decode
        attention runs: `context_tokens` where it is cut evenly.

        Whole contexts end by Graham's bound for lists of jobs ("Bounds on multiprocessing timing
        anomalies", 1969): an even share, and the longest. Jobs that are equally long run in waves,
        which the other bound says.

        Args:
            sequences: Of the step.
            context_tokens: Theirs together.
            longest: The longest of their contexts; 0: all are as long.
            heads: Of queries, on one device.
        """
        if not (self.whole_contexts and self.multiprocessors and sequences):
            return context_tokens
        share = self.multiprocessors / heads  # of a sequence's heads that one of them has
        alone = share * (longest or context_tokens / sequences)
        return min(
            context_tokens + (1 - 1 / self.multiprocessors) * alone,
            math.ceil(sequences / share) * alone,
        )


OURS = Kernels()
