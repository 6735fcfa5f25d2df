"""Builds configurations from flags. Flags override --set, and --set overrides the recipe."""

import importlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from jdisagg.address import parse_host_port
from jdisagg.config import EngineConfig, Mode, override
from jdisagg.node.accelerators import accelerators_of_host
from jdisagg.node.gpus import parse_gpus
from jdisagg.node.recipes import BOTH_SIDES, for_accelerators, load_recipe, of_both_sides
from jdisagg.observe.process import ObserveConfig
from jdisagg.router.elastic import ElasticConfig
from jdisagg.service.internal.connection import Credentials
from launch.flags import HTTP, SERVICE, Given
from launch.shipped import DEFAULT_RECIPE, SHIPPED_MODEL
from models.hub import local_model
from models.model_folder import stored_dtype

OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:")  # gRPC's other forms of a target
_log = logging.getLogger(__name__)

_BOTH = (
    "slots_per_rank", "chunk_tokens", "page_size", "pages_per_rank", "codec", "hardware",
    "memory_fraction", "speculate", "adapters", "adapter_rank", "adapter_experts",
)  # fmt: skip
_FIELDS = {
    "model": "model.directory",
    "dtype": "model.dtype",
    "weights": "model.weights",
    "kv_dtype": "model.kv_dtype",
    "draft": "model.draft",
    "context_tokens": "model.context_tokens",
    "mode": "mode",
    "prefill": "prefill.layout",
    "decode": "decode.layout",
    "compilation_cache": "compilation_cache",
    "kernels": "kernels",
    "prefix_cache": "prefix.reuse",
    "host_cache_gib": "prefix.host_gib",
    "disk_cache_dir": "prefix.disk_dir",
    "disk_cache_gib": "prefix.disk_gib",
    "disk_cache_ttl_hours": "prefix.disk_ttl_hours",
    "peer_fetch": "prefix.peer_fetch",
    "append_tokens": "prefix.append_tokens",
    "kv_channel": "service.kv_channel",
    "kv_host": "service.kv_host",
    "advertise_host": "service.advertise_host",
    **{name: f"service.{name}" for name in (*SERVICE, *HTTP)},
}
_SET_LAYOUTS = {"config", "prefill", "decode", "layout", "gpus_per_worker"}
_FILES = ("tls_certificate", "tls_key", "tls_client_ca", "token_file", "cluster_token_file")


def engine_config(given: Given, weights: bool = True, meshes: int = 2) -> EngineConfig:
    """Returns the configuration: the recipe of --config, changed by --set and by the other flags
    that were given.

    Ignores `elastic.` fields of --set, which `elastic_config` reads. If --model is given without
    --dtype, or if --dtype=auto is given, the data type is that of the checkpoint. A data type that
    --dtype or --set gives takes precedence.

    Args:
        meshes: Number of meshes that share the host's accelerators if no flag gives a recipe or
            layouts. 0 keeps the recipe's layouts.

    Raises:
        ConfigError, LayoutError, CheckpointError: A value cannot work; the message names the value.
    """
    recipe = _recipe(given, meshes)
    changes: list[str] = []
    said = given.given()
    if said.get("http_port") == -1:
        said["http_port"] = "none"
    elif "http_port" in given.names and recipe.service.http_port is None:
        changes.append(f"service.http_port={given.http_port}")
    if "model" in said:
        said["model"] = str(local_model(str(said["model"]), given.revision, weights))
    if said.get("peer_fetch") is not None:
        changes.append(f"routing.peer_fetch={said['peer_fetch']}")
    asked = "dtype" in given.names and ("model" in said or "dtype" in said)
    if asked and said.get("dtype", "auto") == "auto":
        directory = str(said.get("model") or recipe.model.directory or SHIPPED_MODEL)
        changes.append(f"model.dtype={stored_dtype(Path(directory).expanduser())}")
    for name, value in said.items():
        text = str(Path(str(value)).expanduser()) if value and name in _FILES else value
        if name in _FIELDS and value != "auto":
            changes.append(f"{_FIELDS[name]}={text}")
        elif name in _BOTH:
            changes += [f"{side}.{name}={value}" for side in BOTH_SIDES]
    if given.present("chunk_tokens") if "chunk_tokens" in given.names else False:
        least = min(given.chunk_tokens, recipe.prefill.min_chunk_tokens)
        changes += [f"{side}.min_chunk_tokens={least}" for side in BOTH_SIDES]
    fields = [text for text in given.set if not text.startswith("elastic.")]
    return override(recipe, [*changes, *of_both_sides(fields)])


def accelerators_of(given: Given) -> tuple[int | str, ...]:
    if "gpus" in given.names and given.gpus is not None:
        return parse_gpus("gpus", given.gpus)
    return accelerators_of_host().devices


def _recipe(given: Given, meshes: int) -> EngineConfig:
    recipe = load_recipe(given.config)
    if not meshes or given.given().keys() & _SET_LAYOUTS:
        return recipe
    devices = len(accelerators_of(given))
    return for_accelerators(recipe, devices, meshes) if devices else recipe


def recipe_defaults(names: Sequence[str]) -> dict[str, object]:
    if "config" not in names:
        return {}
    recipe = load_recipe(DEFAULT_RECIPE)
    found: dict[str, object] = {}
    for name in names:
        if path := _FIELDS.get(name):
            value: object = recipe
            for part in path.split("."):
                value = getattr(value, part)
            found[name] = value.value if isinstance(value, Mode) else value
        elif name in _BOTH:
            prefill, decode = (getattr(side, name) for side in (recipe.prefill, recipe.decode))
            found[name] = prefill if prefill == decode else f"{prefill} and {decode}"
    return found


def elastic_config(given: Given) -> ElasticConfig:
    texts = [text for text in given.set if text.startswith("elastic.")]
    return override(ElasticConfig(), [text.removeprefix("elastic.") for text in texts])


def observe_config(given: Given) -> ObserveConfig:
    """Returns the settings of metrics, logging and tracing from the flags. Raises ConfigError for a
    value that cannot work."""
    return ObserveConfig(
        metrics_port=given.metrics_port,
        metrics_host=given.metrics_host,
        log_format=given.log_format,
        log_requests=given.log_requests,
        otlp_endpoint=_otlp_endpoint(given),
    )


def _otlp_endpoint(given: Given) -> str:
    endpoint = os.environ.get(OTLP_VARIABLE, "")
    if given.present("otlp_endpoint") or not endpoint:
        return given.otlp_endpoint
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    except ImportError:
        _log.warning("%s is ignored: no exporter; install jdisagg[otel]", OTLP_VARIABLE)
        return ""
    return endpoint


def credentials(given: Given, token_file: str) -> Credentials:
    """Loads the TLS files and the token with which a client calls --target.

    Raises:
        ConfigError: A file cannot be used, or --target is not host:port.
    """
    check_target(given.target)
    return Credentials.load(
        authority=given.authority,
        certificate=given.certificate,
        key=given.key,
        token=token_file,
        server_name=given.server_name,
    )


def check_target(target: str, flag: str = "--target") -> None:
    """Checks that the target of a flag has the form host:port. Raises ConfigError if not, because a
    client with a wrong target would wait until its timeout."""
    if not target.startswith(SCHEMES):
        parse_host_port(target, flag)
