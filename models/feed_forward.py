"""Feed-forward blocks of all families: a gated MLP, an MLP without a gate, routed experts, and
experts in parallel with a dense block."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.model_api import MakeStack, Shards
from jdisagg.ops.activations import UNGATED, Activation, SquaredRelu
from jdisagg.ops.adapters import ExpertFactors
from jdisagg.ops.linear import project
from jdisagg.ops.mlp import gated, gated_expert, squared_relu, xielu
from jdisagg.ops.moe import ExpertWeights, Routing, route, routed_experts
from jdisagg.ops.norm import rms_norm
from jdisagg.ops.parameters import Axes, Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.routing import route_by_scores
from models.decoder_config import DecoderConfig, ExpertConfig, LayerConfig
from models.linear import AdapterStack, Linear, Norm


class GatedMLP(nnx.Module):
    """Computes down(act(gate(x)) * up(x)), or applies another gate function to gate(x) and up(x)
    before down. The hidden width is sharded over the tensor-parallel axes."""

    def __init__(
        self, make: Make, config: DecoderConfig, form: KernelForm, ffn: int | None = None
    ) -> None:
        """`ffn` is the hidden width, or None for the model's `config.ffn`."""
        ffn = config.ffn if ffn is None else ffn
        into, out = (config.width, ffn), (ffn, config.width)
        bias = config.mlp_bias
        self.gate = Linear(make, into, ("embed", "ffn"), bias=bias, form=form)
        self.up = Linear(make, into, ("embed", "ffn"), bias=bias, form=form)
        self.down = Linear(make, out, ("ffn", "embed"), bias=bias, form=form)
        self.activation: Activation = config.activation
        self.function = config.gate

    def __call__(self, x_TD: jax.Array, shards: Shards, valid_T: jax.Array | None) -> jax.Array:
        gate_TF, up_TF = self.gate(x_TD, shards), self.up(x_TD, shards)
        if self.function is None:
            inner_TF = gated(gate_TF, up_TF, self.activation)
        else:
            inner_TF = gated_expert(gate_TF, up_TF, self.function)
        return self.down.summed(inner_TF, shards)


class Xielu(nnx.Module):
    """The activation xIELU. Each layer has its own parameters."""

    def __init__(self, make: Make) -> None:
        self.alpha_p = parameter(make((1,), "float32", 1), ("head",))
        self.alpha_n = parameter(make((1,), "float32", 1), ("head",))
        self.beta, self.eps = (parameter(make((), "float32", 1), ()) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        alphas = self.alpha_p[...][0], self.alpha_n[...][0]
        return xielu(x, *alphas, self.beta[...], self.eps[...])


class PlainMLP(nnx.Module):
    """Computes down(act(up(x))), where act is relu(x)^2 or xIELU. The hidden width is sharded over
    the tensor-parallel axes."""

    def __init__(
        self, make: Make, config: DecoderConfig, form: KernelForm, ffn: int | None = None
    ) -> None:
        """`ffn` is the hidden width, or None for the model's `config.ffn`."""
        ffn, bias = config.ffn if ffn is None else ffn, config.mlp_bias
        self.up = Linear(make, (config.width, ffn), ("embed", "ffn"), bias=bias, form=form)
        self.down = Linear(make, (ffn, config.width), ("ffn", "embed"), bias=bias, form=form)
        self.act = Xielu(make) if config.activation == "xielu" else None

    def __call__(self, x_TD: jax.Array, shards: Shards, valid_T: jax.Array | None) -> jax.Array:
        return self.down.summed((self.act or squared_relu)(self.up(x_TD, shards)), shards)


def _dense(
    make: Make, config: DecoderConfig, form: KernelForm, ffn: int | None = None
) -> GatedMLP | PlainMLP:
    kind = PlainMLP if config.activation in UNGATED else GatedMLP
    return kind(make, config, form, ffn)


_INTO_EXPERTS: Axes = ("expert", "embed", "expert_ffn")
_OUT_OF_EXPERTS: Axes = ("expert", "expert_ffn", "embed")


def _experts(
    make: Make, shape: tuple[int, int, int], axes: Axes, form: KernelForm
) -> tuple[nnx.Param[jax.Array], nnx.Param[jax.Array] | None]:
    experts, into, out = shape
    kept = (experts, into // 2, out) if form.packed(experts=True) else shape
    stack = parameter(make(kept, form.role(experts=True), into), axes)
    if not form.weights:
        return stack, None
    return stack, parameter(make((experts, out), "float32", into), (axes[0], axes[2]))


class SparseMLP(nnx.Module):
    """A router and experts, optionally with biases and with a shared expert for every token. Each
    expert is a gated MLP. It is stored whole on one device if ep > 1, and is otherwise split over
    tp."""

    gate_adapter: AdapterStack | None = None
    up_adapter: AdapterStack | None = None
    down_adapter: AdapterStack | None = None

    def __init__(
        self, make: Make, config: DecoderConfig, routed: ExpertConfig, form: KernelForm
    ) -> None:
        width, experts, ffn = config.width, routed.experts, routed.ffn
        role = "float32" if routed.wide_router else "matrix"
        self.router = parameter(make((width, experts), role, width), ("embed", "router"))
        self.correction = (
            parameter(make((experts,), "float32", width), ("router",))
            if routed.correction
            else None
        )
        into = (experts, routed.latent or width, ffn)
        out = (experts, ffn, routed.latent or width)
        self.gate, self.gate_scale = (
            (None, None)
            if isinstance(routed.clamp, SquaredRelu)
            else _experts(make, into, _INTO_EXPERTS, form)
        )
        self.up, self.up_scale = _experts(make, into, _INTO_EXPERTS, form)
        self.down, self.down_scale = _experts(make, out, _OUT_OF_EXPERTS, form)
        self.narrow, self.widen = _latent(make, config, routed, form)

        def bias(shape: tuple[int, ...], axes: Axes) -> nnx.Param[jax.Array] | None:
            return parameter(make(shape, "bias", width), axes) if routed.biased else None

        self.router_bias = bias((experts,), ("router",))
        self.gate_bias = bias((experts, ffn), ("expert", "expert_ffn"))
        self.up_bias = bias((experts, ffn), ("expert", "expert_ffn"))
        self.down_bias = bias((experts, width), ("expert", "embed"))
        own = routed.shared_ffn and not routed.beside
        self.shared = _dense(make, config, form, routed.shared_ffn) if own else None
        # Gemma 4's router normalises its input and scales each expert.
        beside = routed.beside
        self.router_scale = parameter(make((width,), "norm", width), ("embed",)) if beside else None
        self.expert_scale = (
            parameter(make((experts,), "norm", width), ("router",)) if beside else None
        )
        self.epsilon = config.norm_epsilon
        self.shared_gate = (
            parameter(make((width, 1), "matrix", width), ("embed", "router"))
            if routed.shared_gate
            else None
        )
        self.config = routed
        self.sizes = (experts, into[1], ffn)

    def __call__(
        self,
        x_TD: jax.Array,
        shards: Shards,
        valid_T: jax.Array | None,
        chosen_by_TD: jax.Array | None = None,
    ) -> jax.Array:
        """`chosen_by_TD` is the router's input, or None if the router also reads `x_TD`."""
        # For experts without a gate, `up` takes the place of the gate matrix.
        gate = self.up if self.gate is None else self.gate
        gate_scale = self.up_scale if self.gate is None else self.gate_scale
        scales = gate_scale, self.up_scale, self.down_scale
        biases = self.gate_bias, self.up_bias, self.down_bias
        more = (None if part is None else part[...] for part in (*scales, *biases))
        weights = ExpertWeights(gate[...], self.up[...], self.down[...], *more)
        routing = self._route(x_TD if chosen_by_TD is None else chosen_by_TD, shards)
        if shards.record is not None:
            shards.record(routing.experts_TJ)
        into_TD = x_TD if self.narrow is None else self.narrow(x_TD, shards)
        if self.config.scaled_inputs:
            into_TD = into_TD * routing.weights_TJ[:, :1].astype(into_TD.dtype)
            routing = routing._replace(weights_TJ=jnp.ones_like(routing.weights_TJ))
        y_TD = routed_experts(
            into_TD,
            routing,
            weights,
            shards,
            experts=self.config.experts,
            valid_T=valid_T,
            clamp=self.config.clamp,
            factors=self._factors(),
        )
        if self.widen is not None:
            y_TD = self.widen(y_TD, shards)
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD, shards, valid_T)
        if self.shared_gate is not None:
            gate_T1 = project(x_TD, self.shared_gate[...], platform=shards.platform)
            shared_TD = jax.nn.sigmoid(gate_T1) * shared_TD
        return (y_TD + shared_TD) / 2 if self.config.halved else y_TD + shared_TD

    def adapt(self, slots: int, rank: int, make: MakeStack) -> None:
        experts, into, out = self.sizes
        stack = partial(AdapterStack, make, slots, rank, experts=("expert", experts))
        if self.gate is not None:
            self.gate_adapter = stack(("embed", into), ("expert_ffn", out))
        self.up_adapter = stack(("embed", into), ("expert_ffn", out))
        self.down_adapter = stack(("expert_ffn", out), ("embed", into))

    def _factors(self) -> ExpertFactors | None:
        if self.up_adapter is None or self.down_adapter is None:
            return None
        gate = self.gate_adapter or self.up_adapter
        return ExpertFactors(gate.factors, self.up_adapter.factors, self.down_adapter.factors)

    def _route(self, x_TD: jax.Array, shards: Shards) -> Routing:
        config, router_DE = self.config, self.router[...]
        if config.scores == "softmax" and not config.wide:
            bias_E = None if self.router_bias is None else self.router_bias[...]
            logits_TE = project(x_TD, router_DE, bias_E, platform=shards.platform)
            return route(logits_TE, config.experts_per_token, normalised=config.normalised)
        # Router logits are computed in float32, as in the training of these models, because the
        # choice of experts depends on small score differences.
        wide_TD, wide_DE = x_TD.astype(jnp.float32), router_DE.astype(jnp.float32)
        if self.router_scale is not None:
            scale_D = self.router_scale[...].astype(jnp.float32) * wide_DE.shape[0] ** -0.5
            wide_TD = rms_norm(wide_TD, scale_D, self.epsilon)
        routing = route_by_scores(
            project(wide_TD, wide_DE, platform=shards.platform),
            None if self.correction is None else self.correction[...],
            config.experts_per_token,
            scores=config.scores,
            groups=config.groups,
            groups_per_token=config.groups_per_token,
            normalised=config.normalised,
            scaling=config.scaling,
            not_zero=config.not_zero,
        )
        if self.expert_scale is None:
            return routing
        scale_TJ = self.expert_scale[...].astype(jnp.float32)[routing.experts_TJ]
        return routing._replace(weights_TJ=routing.weights_TJ * scale_TJ)


def _latent(
    make: Make, config: DecoderConfig, routed: ExpertConfig, form: KernelForm
) -> tuple[Linear, Linear] | tuple[None, None]:
    if not routed.latent:
        return None, None
    into, out = (config.width, routed.latent), (routed.latent, config.width)
    return (
        Linear(make, into, ("embed", "latent"), bias=config.mlp_bias, form=form),
        Linear(make, out, ("latent", "embed"), bias=config.mlp_bias, form=form),
    )


class ParallelMLP(nnx.Module):
    """A dense block in parallel with experts, each with its own norms. The dense block's input is
    the layer's normalised input. Experts and router receive the residual stream and normalise it
    themselves."""

    def __init__(
        self, make: Make, config: DecoderConfig, routed: ExpertConfig, form: KernelForm
    ) -> None:
        def norm() -> Norm:
            above_one = config.norms_above_one
            return Norm(make, config.width, ("embed",), config.norm_epsilon, above_one=above_one)

        self.dense = _dense(make, config, form, routed.shared_ffn)
        self.dense_norm = norm()
        self.routed = SparseMLP(make, config, routed, form)
        self.routed_norm, self.routed_post_norm = norm(), norm()

    def __call__(
        self, into_TD: jax.Array, x_TD: jax.Array, shards: Shards, valid_T: jax.Array | None
    ) -> jax.Array:
        """`x_TD` is the residual stream, and `into_TD` is `x_TD` after the layer's norm."""
        dense_TD = self.dense_norm(self.dense(into_TD, shards, valid_T))
        routed_TD = self.routed(self.routed_norm(x_TD), shards, valid_T, chosen_by_TD=x_TD)
        return dense_TD + self.routed_post_norm(routed_TD)


def feed_forward(
    make: Make, config: DecoderConfig, layer: LayerConfig, form: KernelForm
) -> SparseMLP | ParallelMLP | GatedMLP | PlainMLP:
    config = config if layer.gate is None else replace(config, gate=layer.gate)
    if layer.experts:
        kind = ParallelMLP if layer.experts.beside else SparseMLP
        return kind(make, config, layer.experts, form)
    return _dense(make, config, form, layer.ffn or None)
