"""Estimates the seconds that an instance takes for a prefill, a decode step or a KV transfer, split
by cause so that a placement decision can state its reason.

Every operation follows a roofline: max(FLOP / achieved FLOP/s, bytes / achieved bandwidth) plus
launch latency, on one device of the dp rank with the most work. A mixture of experts reads only the
expected number of experts that the batch uses: E (1 - (1 - active / E)^tokens).

Pure; must not import requests, queues or clocks."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from jdisagg.costs.attention_work import attended_pairs
from jdisagg.costs.collectives import all_reduce_seconds, exchange_seconds, link_among
from jdisagg.costs.cost import Cost
from jdisagg.costs.dense_products import dense_products, most_kv_shards, most_state_shards
from jdisagg.costs.hardware import Accelerator, Link
from jdisagg.costs.kernels import Kernels
from jdisagg.costs.layout_fit import check_layout, expert_slots
from jdisagg.costs.linear_attention import RUN_TOKENS
from jdisagg.costs.model_geometry import (
    CostGeometry,
    GroupedAttention,
    LatentAttention,
    dtype_bytes,
)
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import CODEC_BITS

SCALE_BYTES = 4  # one float32 scale for each head and token of a component
MOST_REMEMBERED = 1 << 14  # numbers of tokens whose dense products are cached


class CostModel:
    """Estimates the duration of one instance's prefills, decode steps and KV transfers.

    Callers pass the batch of the dp rank with the most work. If experts are spread over all ranks,
    the other ranks are assumed to have as much work.

    Args:
      kv_dtype: Data type of KV. If empty, the KV type of `geometry`, or `dtype` if `geometry` has
        no KV type.
      kernels: Properties of the engine's kernels; None means `accelerator.kernels`.
    """

    def __init__(
        self,
        geometry: CostGeometry,
        accelerator: Accelerator,
        layout: Layout | None = None,
        *,
        dtype: str = "bfloat16",
        kv_dtype: str = "",
        kernels: Kernels | None = None,
    ) -> None:
        self.geometry, self.accelerator = geometry, accelerator
        self._kernels = kernels = kernels or accelerator.kernels
        self.layout = layout or Layout()
        self.stages = self.layout.pp
        self.value_bytes = dtype_bytes(dtype)
        self.kv_value_bytes = dtype_bytes(kv_dtype or geometry.kv_dtype or dtype)
        self._matrix_bytes = geometry.matrix_bits / 8 or self.value_bytes
        self._expert_bytes = kernels.expert_bits / 8 or self._matrix_bytes
        redundant = kernels.redundant_experts
        check_layout(geometry, self.layout, redundant_experts=redundant)
        self._expert_slots = expert_slots(geometry, self.layout, redundant_experts=redundant)
        # Mean head size over all layers with attention.
        layers = max(1, geometry.attention_layers)
        self._mean_values = geometry.kv_values / layers
        self._mean_head = geometry.head_sizes / layers
        self._products = dense_products(
            geometry, self.layout, self._state_shards(), self.value_bytes, self._matrix_bytes
        )
        self._late_part = geometry.late_part
        self._layers_known: dict[int, Cost] = {}  # by number of sequences
        self._dense_of = lru_cache(MOST_REMEMBERED)(self._dense)
        reached = accelerator.efficiency
        # Peaks hold for bfloat16; float32 runs on the same units at half the rate at best.
        peak = accelerator.peak_flops * (2 / max(2, self.value_bytes))
        self._seconds_per_flop = 1 / (peak * reached.gemm_compute)
        self._op_seconds = reached.op_seconds
        self._seconds_per_byte = 1 / (accelerator.memory_bytes_per_second * reached.gemm_memory)
        self._attention_per_flop = 1 / (peak * reached.attention_compute)
        bandwidth = accelerator.memory_bytes_per_second
        self._attention_per_byte = 1 / (bandwidth * reached.attention_memory)
        # By number of sequences: a decode step's compute, memory, communication, exchange, launch
        # latency and host seconds, without attention.
        self._step_terms: dict[int, tuple[float, float, float, float, float, float]] = {}
        attention = geometry.attention
        windowed = not isinstance(attention, LatentAttention) and attention.window is not None
        out = link_among(accelerator, self.layout.stage_devices) is accelerator.scale_out
        self._overlaps = kernels.overlaps and out and self.layout.ep > self.layout.tp
        self._linear = not (
            windowed
            or attention.index_top
            or geometry.linear
            or kernels.whole_contexts
            or kernels.draft_tokens
            or self._overlaps
        )
        self._step_launch_seconds = reached.launch_seconds * geometry.layers
        self._token_flops, self._token_bytes, self._over_layers = self._attention_of_token()

    # ---- steps and transfers

    def prefill(self, rows: Iterable[tuple[int, int]]) -> Cost:
        """Estimates one prefill of several prompts until their tokens are sampled. `rows`: for each
        prompt, (number of tokens to compute, number of cached tokens before them)."""
        tokens = count = 0
        pairs = context = 0.0
        for new, cached in rows:
            tokens, count = tokens + new, count + 1
            pairs += self.pairs(new, cached)
            context += cached + new
        return self.prefill_of(tokens, pairs, context, count)

    def prefill_of(self, tokens: int, pairs: float, context_tokens: float, rows: int) -> Cost:
        """Estimates a prefill from sums over its prompts. `tokens`: number of tokens to compute.
        `pairs`: number of (query, key) pairs. `context_tokens`: number of tokens to read from the
        cache. `rows`: number of tokens to sample."""
        reached = self.accelerator.efficiency
        attention = self._prefill_attention(tokens, pairs, context_tokens)
        device = self._device(tokens, rows, attention)
        if late := self._late_part:
            device += (self._layers(rows, rows) + self._layers(tokens, rows) * -1) * late
        return self._issued(
            device,
            self._prefill_launch(tokens),
            reached.prefill_seconds + reached.sequence_seconds * rows,
        )

    def decode(self, contexts: Iterable[int]) -> Cost:
        counted = list(contexts)
        return self.decode_of(len(counted), float(sum(counted)), max(counted, default=0))

    def decode_of(self, sequences: int, context_tokens: float, longest: float = 0.0) -> Cost:
        """With sliding windows, all contexts are taken to have the mean length. With speculation,
        the result is the time of one token of each sequence: a step's time divided by the expected
        number of tokens. `longest`: longest context, used only with `Kernels.whole_contexts`; 0
        means that all contexts are equally long."""
        if not sequences:
            return Cost()
        kernels, launch = self._kernels, self.accelerator.efficiency.launch_seconds
        tokens = kernels.waited_for(
            sequences, context_tokens, longest, self.geometry.attention.query_heads / self.layout.tp
        )
        if not kernels.draft_tokens:
            cost = self._decode_device(sequences, self._decode_attention(sequences, tokens))
            return self._issued(cost, launch, self.host_seconds(sequences))
        rows = sequences * (1 + kernels.draft_tokens)
        attention = self._decode_attention(sequences, tokens, 1 + kernels.draft_tokens)
        device = self._device(rows, rows, attention)
        device += self._draft(sequences, tokens) * kernels.draft_tokens
        cost = self._issued(device, launch, self.host_seconds(sequences))
        return cost * (1 / kernels.tokens_per_step)

    def _draft(self, sequences: int, context_tokens: float) -> Cost:
        """One more layer with attention and the output projection, or an assistant, whose layers
        attend to the model's KV."""
        attention = self._decode_attention(sequences, context_tokens)
        if (assistant := self.geometry.assistant) is not None:
            share = assistant.layers / self.geometry.attention_layers
            return self._read(assistant.parameters / self.layout.tp, sequences) + attention * share
        head = self._head(sequences)
        body = self._layers(sequences, sequences) + head * -1 + attention
        return body * (1 / self.geometry.layers) + head

    def decode_seconds(self, sequences: int, context_tokens: float, longest: float = 0.0) -> float:
        """Returns exactly `decode_of(...).seconds`, but faster, because it builds no `Cost`."""
        if not self._linear or not sequences:
            return self.decode_of(sequences, context_tokens, longest).seconds
        known = self._step_terms.get(sequences)
        if known is None:
            cost, reached = self._decode_layers(sequences), self.accelerator.efficiency
            starts = cost.overhead + self._over_layers * reached.attention_seconds
            known = self._step_terms[sequences] = (
                cost.compute, cost.memory, cost.communication, cost.exchange, starts,
                self.host_seconds(sequences),
            )  # fmt: skip
        # Sums are in the order of `decode_of`, so that results are equal to the bit.
        compute, memory, communication, exchange, overhead, host = known
        arithmetic = self._token_flops * context_tokens * self._attention_per_flop
        traffic = context_tokens * self._token_bytes * self._attention_per_byte
        if arithmetic > traffic:
            compute += arithmetic * self._over_layers
        else:
            memory += traffic * self._over_layers
        device = compute + memory + communication + exchange
        waited = self._step_launch_seconds - (device + overhead)
        return device + (overhead + ((waited if waited > 0.0 else 0.0) + host))

    def _device(
        self, tokens: float, sampled: float, attention: Cost, elsewhere: float | None = None
    ) -> Cost:
        cost = self._layers(tokens, sampled, elsewhere) + attention
        return self._overlapped(cost, tokens, sampled, attention, elsewhere)

    def _decode_device(self, sequences: int, attention: Cost) -> Cost:
        cost = self._decode_layers(sequences) + attention
        return self._overlapped(cost, sequences, sequences, attention, None)

    def _overlapped(
        self, cost: Cost, tokens: float, sampled: float, attention: Cost, elsewhere: float | None
    ) -> Cost:
        if not (self._overlaps and tokens >= 2 and cost.exchange):
            return cost
        half = self._layers(tokens / 2, sampled / 2, elsewhere and elsewhere / 2)
        both = half * 2 + attention
        device = both.seconds - both.exchange
        hidden = replace(both, exchange=max(0.0, both.exchange - device))
        return min(cost, hidden, key=lambda item: item.seconds)

    def _decode_layers(self, sequences: int) -> Cost:
        layers = self._layers_known.get(sequences)
        if layers is None:
            layers = self._layers_known[sequences] = self._layers(sequences, sequences)
        return layers

    def host_seconds(self, sequences: int) -> float:
        reached = self.accelerator.efficiency
        return reached.step_seconds + reached.sequence_seconds * sequences

    def mixed_of(
        self,
        tokens: int,
        pairs: float,
        context_tokens: float,
        rows: int,
        sequences: int,
        decode_context_tokens: float,
        elsewhere: int | None = None,
    ) -> Cost:
        """Estimates one step that runs a prefill chunk together with decoding sequences; see
        `prefill_of` and `decode_of`. `elsewhere`: number of tokens in the step on all other dp
        ranks; None assumes that each other rank has as many tokens as this rank."""
        if not rows:
            return self.decode_of(sequences, decode_context_tokens)
        reached = self.accelerator.efficiency
        attention = self._prefill_attention(tokens, pairs, context_tokens)
        if sequences:
            attention += self._decode_attention(sequences, decode_context_tokens)
        cost = self._device(tokens + sequences, rows + sequences, attention, elsewhere)
        host = reached.prefill_seconds + reached.sequence_seconds * (rows + sequences)
        launch = max(self._prefill_launch(tokens + sequences), reached.launch_seconds)
        return self._issued(cost, launch, host)

    def transfer(self, tokens: int, link: Link, codec: str = "none", links: int = 1) -> Cost:
        values = self.geometry.kv_values * tokens
        wire = tokens * wire_bytes_per_token(self.geometry, self.kv_value_bytes, codec)
        state = self.state_bytes  # a codec does not change recurrent state
        memory = 0.0
        if codec != "none":
            # Packing and unpacking each read and write the KV once, spread over tp and stages.
            memory = (
                2
                * (values * self.kv_value_bytes + wire)
                * self._seconds_per_byte
                / (self.layout.tp * self.stages)
            )
        return Cost(
            memory=memory,
            communication=link.latency_seconds
            + (link.seconds(wire + state) - link.latency_seconds) / links,
        )

    def interval_seconds(self, cost: Cost) -> float:
        """Returns the seconds from the start of a batch until the first pipeline stage is free for
        the next batch. `cost`: cost of a batch through all stages."""
        return cost.seconds / self.stages

    # ---- memory

    @property
    def weight_bytes_per_device(self) -> float:
        """Experts are spread over ep, or sharded by tp; other matrices and the embedding are
        sharded by tp. Each device has the whole MoE router, the whole projections of an MLA latent,
        and at least one kv head. Each dp rank has a copy of all but experts. Layers are spread over
        pipeline stages, and speculation adds one to the last, or a whole assistant to each
        device."""
        matrices, experts, embedded = self._weight_bytes
        drafts = self.stage_weight_bytes(1) - embedded if self._kernels.draft_tokens else 0.0
        if drafts and (assistant := self.geometry.assistant) is not None:
            drafts = assistant.parameters * self.value_bytes
        return (matrices + experts + embedded) / self.stages + drafts

    def update_seconds(self, link: Link) -> float:
        return link.seconds(self.weight_bytes_per_device)

    def stage_weight_bytes(self, layers: int) -> float:
        """The stage is assumed to have layers with experts, and both embedding and head."""
        matrices, experts, embedded = self._weight_bytes
        shape = self.geometry
        part = min(1.0, layers / shape.expert_layers) if shape.expert_layers else 0.0
        return matrices * layers / shape.layers + experts * part + embedded

    @property
    def _weight_bytes(self) -> tuple[float, float, float]:
        shape, layout = self.geometry, self.layout
        spread = layout.ep if layout.ep > 1 else layout.tp
        embedded = shape.embedding_parameters / layout.tp
        experts = self._expert_parameters() / spread
        return (
            sum(product.weight_bytes * product.layers for product in self._products),
            self._expert_bytes * experts,
            self.value_bytes * embedded,
        )

    def kv_tokens_per_rank(self, reserve: float = 0.1) -> int:
        """Returns the number of tokens whose KV fits on one dp rank in addition to the weights, or
        0 if the weights do not fit. `reserve`: fraction of memory that is kept free for
        activations."""
        free = self.accelerator.memory_bytes * (1 - reserve) - self.weight_bytes_per_device
        return max(0, int(free / self.kv_bytes_per_device))

    @property
    def kv_bytes_per_device(self) -> float:
        layers = self.geometry.attention_layers / self.stages
        drafts = self._kernels.draft_tokens > 0 and self.geometry.assistant is None
        return (layers + drafts) * self._kv_bytes()

    @property
    def state_bytes(self) -> int:
        linear = self.geometry.linear
        return linear.layers * linear.state_bytes(self.kv_value_bytes) if linear else 0

    @property
    def state_bytes_per_device(self) -> float:
        """The state is sharded like kv heads."""
        return self.state_bytes / self._state_shards() / self.stages

    # ---- parts

    def _layers(self, tokens: float, sampled: float, elsewhere: float | None = None) -> Cost:
        compute, memory, passes, communication, overhead = self._dense_of(tokens)
        head = self._head(sampled)
        both = compute + head.compute, memory + head.memory + passes
        base = Cost(*both, communication, 0.0, overhead)
        return base + self._experts(tokens, elsewhere) if self.geometry.experts else base

    def _dense(self, tokens: float) -> tuple[float, float, float, float, float]:
        shape = self.geometry
        compute = memory = 0.0
        operations = 0
        kernels, per_flop, per_byte = self._kernels, self._seconds_per_flop, self._seconds_per_byte
        for product in self._products:
            tiled = kernels.tiled(tokens, product.columns)
            arithmetic = product.flops * tiled * per_flop / kernels.matrix_speed
            traffic = (product.weight_bytes + product.activation_bytes * tokens) * per_byte
            operations += product.layers * (1 + kernels.quantizes)
            if arithmetic > traffic:
                compute += arithmetic * product.layers
            else:
                memory += traffic * product.layers
        blocks = shape.blocks / (2 * shape.layers)  # blocks per layer, as a fraction of two
        # Norms, residuals, rope and the gate read and write activations in about eight passes over
        # the width and three over the ffn.
        passes = (
            shape.layers
            * tokens
            * self.value_bytes
            * (8 * blocks * shape.width + 3 * self._ffn_of_token() / self.layout.tp)
            * per_byte
        )
        # Two norms, two residuals and the activation; families with a gated ffn also have rope.
        operations += (3 if kernels.fused else 6 if shape.gated else 5) * shape.blocks / 2 + 2
        communication = shape.blocks * all_reduce_seconds(
            self.accelerator, kernels, tokens * shape.width * self.value_bytes, self.layout.tp
        )
        communication += self._hand_ons(tokens * shape.width * self.value_bytes)
        return compute, memory, passes, communication, operations * self._op_seconds

    def _head(self, sampled: float) -> Cost:
        return self._read(self.geometry.vocabulary * self.geometry.width / self.layout.tp, sampled)

    def _read(self, values: float, tokens: float) -> Cost:
        arithmetic = 2 * values * tokens * self._seconds_per_flop
        traffic = values * self.value_bytes * self._seconds_per_byte
        return Cost(compute=arithmetic) if arithmetic > traffic else Cost(memory=traffic)

    def _issued(self, device: Cost, launch_seconds: float, host_seconds: float) -> Cost:
        """The host issues layers ahead of the device, so only the part of `launch_seconds` (per
        layer) that exceeds the device's time counts."""
        waited = max(0.0, launch_seconds * self.geometry.blocks / 2 - device.seconds)
        return device + Cost(overhead=waited + host_seconds)

    def _prefill_launch(self, tokens: int) -> float:
        reached = self.accelerator.efficiency
        captured = tokens <= self._kernels.captured_tokens
        return reached.launch_seconds if captured else reached.prefill_launch_seconds

    def _ffn_of_token(self) -> float:
        shape, experts = self.geometry, self.geometry.experts
        routed = experts.active * experts.ffn + experts.shared_ffn if experts else 0
        dense = (shape.dense_layers + shape.doubled_ffn) * shape.ffn
        return (dense + shape.expert_layers * routed) / shape.layers

    def _experts(self, tokens: float, elsewhere: float | None = None) -> Cost:
        shape, layout, experts = self.geometry, self.layout, self.geometry.experts
        assert experts is not None
        across = layout.ep > layout.tp
        others = tokens * (layout.dp - 1) if elsewhere is None else elsewhere
        everyone = tokens + (others if across else 0)
        # ep distributes whole experts; otherwise tp cuts each expert.
        spread = layout.ep if layout.ep > 1 else layout.tp
        each = shape.matrices * experts.routed_width(shape.width) * experts.ffn
        kernels, per_flop = self._kernels, self._seconds_per_flop
        speed = kernels.expert_speed or kernels.matrix_speed
        arithmetic = 2 * each * everyone * experts.active / spread * per_flop / speed
        traffic = (
            experts.touched(everyone)
            * (self._expert_slots / experts.count)
            * each
            * self._expert_bytes
            / spread
            * self._seconds_per_byte
        ) / kernels.expert_memory
        layers = shape.expert_layers
        compute = memory = exchange = 0.0
        if kernels.gathers:
            # Token rows are copied to their experts (read, write), go through the activation, and
            # are read again to be summed.
            rows = everyone * experts.active / max(1, layout.ep)
            inner = experts.ffn / (1 if layout.ep > 1 else layout.tp)
            copied = rows * 3 * (experts.routed_width(shape.width) + inner) * self.value_bytes
            memory += copied * self._seconds_per_byte * layers
        if kernels.expert_serial or arithmetic > traffic:
            compute += arithmetic * layers
        if kernels.expert_serial or arithmetic <= traffic:
            memory += traffic * layers
        if across:
            row = shape.width * self.value_bytes
            sent = shape.width * kernels.dispatch_bits / 8 or row
            exchange = layers * exchange_seconds(
                self.accelerator, kernels, layout, experts, tokens, everyone, (sent, row)
            )
        overhead = kernels.expert_operations * layers * self._op_seconds
        return Cost(compute, memory, 0.0, exchange, overhead)

    def _prefill_attention(self, tokens: float, pairs: float, context_tokens: float) -> Cost:
        shape, attention = self.geometry, self.geometry.attention
        index_flops = 0.0
        if isinstance(attention, LatentAttention):
            width = attention.nope_dim + attention.rope_dim + attention.value_dim
            index_flops = 2.0 * pairs * attention.index_heads * attention.index_dim
            index_flops *= 1 - attention.shared_layers / shape.attention_layers
        else:
            width = 2 * self._mean_head
            index_flops = 2.0 * pairs * attention.kv_heads / self._kv_shards()
            index_flops *= attention.index_dim * attention.indexed_layers / shape.attention_layers
        heads = attention.query_heads / self.layout.tp
        cost = self._attention(
            2 * pairs * heads * width + index_flops,
            (context_tokens + tokens) * self._token_bytes,
            shape.attention_layers - shape.shared_layers,
        )
        if shape.linear:
            cost += self._recurrence(tokens, tokens / RUN_TOKENS, chunked=True)
        return cost

    def _decode_attention(self, sequences: float, context_tokens: float, queries: int = 1) -> Cost:
        cost = self._attended(sequences, context_tokens, queries)
        if self.geometry.linear:
            # A step with drafts reads each state twice and writes it once.
            passes = sequences * (1.5 if queries > 1 else 1.0)
            cost += self._recurrence(sequences * queries, passes, chunked=False)
        return cost

    def _attended(self, sequences: float, context_tokens: float, queries: int) -> Cost:
        shape, attention = self.geometry, self.geometry.attention
        flops, size_bytes = self._token_flops * queries, self._token_bytes
        layers = self._over_layers
        if isinstance(attention, LatentAttention) and attention.index_top:
            # The indexer reads its keys of all positions, attention the latents of the selected.
            seen, part = min(context_tokens, attention.index_top * sequences), attention.index_dim
            each = self.kv_value_bytes / self._kv_shards()
            own = (attention.kv_values - part) * each
            index_flops = 2.0 * queries * attention.index_heads * part
            return self._attention(
                index_flops * context_tokens,
                context_tokens * part * each,
                layers - attention.shared_layers,
            ) + self._attention(flops * seen, queries * seen * own, layers)
        if not isinstance(attention, LatentAttention) and attention.index_top:
            # As above, in some of the layers, with a query of the indexer for each kv head.
            seen, part = min(context_tokens, attention.index_top * sequences), attention.index_dim
            own, indexed = self._kv_bytes(attention), attention.indexed_layers
            read = context_tokens * part * self.value_bytes
            index_flops = 2.0 * queries * context_tokens * part * attention.kv_heads
            return (
                self._attention(flops * context_tokens, context_tokens * own, layers - indexed)
                + self._attention(index_flops / self._kv_shards(), read, indexed)
                + self._attention(flops * seen, queries * seen * own, indexed)
            )
        if isinstance(attention, LatentAttention) or attention.window is None:
            return self._attention(flops * context_tokens, context_tokens * size_bytes, layers)
        seen = min(context_tokens, attention.window * sequences)
        whole = shape.attention_layers - attention.windowed_layers
        other = attention.full or attention
        full, windowed = (self._kv_bytes(kind) for kind in (other, attention))
        flops /= self._mean_head
        return self._attention(
            flops * other.mean_size * context_tokens, context_tokens * full, whole
        ) + self._attention(
            flops * attention.mean_size * seen, seen * windowed, attention.windowed_layers
        )

    def _attention_of_token(self) -> tuple[float, float, int]:
        shape, attention = self.geometry, self.geometry.attention
        heads = attention.query_heads / self.layout.tp
        if isinstance(attention, LatentAttention):
            flops = 2 * heads * (2 * attention.kv_rank + attention.rope_dim)
            return flops, self._kv_bytes(), shape.attention_layers
        return 4 * heads * self._mean_head, self._kv_bytes(), shape.attention_layers

    def _recurrence(self, tokens: float, passes: float, *, chunked: bool) -> Cost:
        linear = self.geometry.linear
        assert linear is not None
        each = linear.chunk_flops() if chunked else linear.step_flops()
        moved = 2 * passes * linear.state_bytes(self.kv_value_bytes)
        shards = self._state_shards()
        return self._attention(tokens * each / shards, moved / shards, linear.layers)

    def _attention(self, flops: float, size_bytes: float, layers: int) -> Cost:
        arithmetic = flops * self._attention_per_flop
        traffic = size_bytes * self._attention_per_byte
        overhead = layers * self.accelerator.efficiency.attention_seconds
        if arithmetic > traffic:
            return Cost(compute=arithmetic * layers, overhead=overhead)
        return Cost(memory=traffic * layers, overhead=overhead)

    def _kv_bytes(self, kind: GroupedAttention | None = None) -> float:
        values = kind.kv_values if kind else self._mean_values
        return values * self.kv_value_bytes / self._kv_shards()

    def _kv_shards(self) -> int:
        return min(self.layout.tp, most_kv_shards(self.geometry))

    def _state_shards(self) -> int:
        return min(self.layout.tp, most_state_shards(self.geometry))

    def pairs(self, new: int, cached: int = 0) -> float:
        return attended_pairs(self.geometry, new, cached)

    def _hand_ons(self, size_bytes: float) -> float:
        accelerator = self.accelerator
        in_domain = max(1, accelerator.domain_devices // self.layout.stage_devices)
        out = math.ceil(self.stages / in_domain) - 1
        return (self.stages - 1 - out) * accelerator.scale_up.seconds(
            size_bytes
        ) + out * accelerator.scale_out.seconds(size_bytes)

    def _expert_parameters(self) -> int:
        shape, experts = self.geometry, self.geometry.experts
        if experts is None:
            return 0
        each = shape.matrices * experts.routed_width(shape.width) * experts.ffn
        return shape.expert_layers * each * self._expert_slots


def wire_bytes_per_token(geometry: CostGeometry, value_bytes: int, codec: str = "none") -> float:
    if codec not in CODEC_BITS:
        raise ConfigError(f"no codec named {codec!r}; there are {', '.join(CODEC_BITS)}")
    bits = CODEC_BITS[codec]
    return sum(
        rows * (width * value_bytes if bits is None else -(-width * bits // 8) + SCALE_BYTES)
        for rows, width in geometry.kv_rows()
    )
