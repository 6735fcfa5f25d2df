"""Builds configurations from flags. Flags override the recipe, and --set overrides both."""

import importlib
import logging
import operator
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from jdisagg.config import EngineConfig, ObserveConfig
from jdisagg.node.accelerators import accelerators_of_host
from jdisagg.node.gpus import parse_gpus
from jdisagg.node.recipes import (
    BOTH_SIDES,
    for_accelerators,
    load_recipe,
    of_both_sides,
    recipe_sets,
)
from jdisagg.router.elastic import ElasticConfig
from jdisagg.service.client.administration import Administration
from jdisagg.service.internal.connection import Credentials
from jdisagg.settings.address import parse_host_port
from jdisagg.settings.declared import assignment, changed
from launch.flags import FLAGS, OBSERVE, Given
from launch.shipped import DEFAULT_RECIPE, SHIPPED_MODEL
from models.hub import local_model
from models.model_folder import stored_dtype

OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:")  # gRPC's other forms of a target
_log = logging.getLogger(__name__)

_SET_LAYOUTS = {"config", "prefill", "decode", "layout", "gpus_per_worker"}


def engine_config(
    given: Given, weights: bool = True, meshes: int = 2, elastic: bool = False
) -> EngineConfig:
    """Returns the configuration: the recipe of --config, changed by --set and by the other flags
    that were given.

    If --model is given without --dtype, or if --dtype=auto is given, the data type is that of the
    checkpoint. A data type that --dtype or --set gives takes precedence.

    Args:
        meshes: Number of meshes that share the host's accelerators if no flag gives a recipe or
            layouts. 0 keeps the recipe's layouts.
        elastic: Whether the command reads the `elastic.` fields of --set by `elastic_config`. They
            are then ignored here.

    Raises:
        ConfigError, LayoutError, CheckpointError: A value cannot work; the message names the value.
    """
    recipe = _recipe(given, meshes)
    changes: list[tuple[str, object]] = []
    said = given.given()
    if said.get("http_port") == -1:
        said["http_port"] = None
    elif (
        "http_port" in given.names
        and recipe.service.http_port is None
        and ("http_port" in said or not recipe_sets(given.config, "service.http_port"))
    ):
        said["http_port"] = given.http_port
    if "model" in said:
        said["model"] = str(local_model(str(said["model"]), given.revision, weights))
    if said.get("chunk_tokens"):
        for side, now in zip(BOTH_SIDES, (recipe.prefill, recipe.decode), strict=True):
            least = min(given.chunk_tokens, now.min_chunk_tokens)
            changes.append((f"{side}.min_chunk_tokens", least))
    asked = "dtype" in given.names and ("model" in said or "dtype" in said)
    if asked and said.get("dtype", "auto") == "auto":
        directory = str(said.get("model") or recipe.model.directory or SHIPPED_MODEL)
        changes.append(("model.dtype", stored_dtype(Path(directory).expanduser())))
        said.pop("dtype", None)
    changes += [(path, value) for name, value in said.items() for path in FLAGS[name].paths]
    sets = [text for text in given.set if not (elastic and text.startswith("elastic."))]
    return changed(recipe, [*changes, *of_both_sides(map(assignment, sets))])


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
        values = [operator.attrgetter(path)(recipe) for path in FLAGS[name].paths]
        if values:
            shown = [value.value if isinstance(value, Enum) else value for value in values]
            same = shown.count(shown[0]) == len(shown)
            found[name] = shown[0] if same else " and ".join(map(str, shown))
    return found


def elastic_config(given: Given) -> ElasticConfig:
    texts = [text for text in given.set if text.startswith("elastic.")]
    sets = [assignment(text.removeprefix("elastic.")) for text in texts]
    return changed(ElasticConfig(), sets)


def observe_config(given: Given) -> ObserveConfig:
    """Returns the settings of metrics, logging and tracing from the flags. Raises ConfigError for a
    value that cannot work."""
    values: dict[str, Any] = {name: getattr(given, name) for name in OBSERVE}
    values["otlp_endpoint"] = _otlp_endpoint(given)
    return ObserveConfig(**values)


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


def administration(given: Given) -> Administration:
    """Returns a client of the HTTP API at --target, which is host:port or a URL."""
    return Administration(given.target, credentials=credentials_of(given, given.token_file))


def credentials(given: Given, token_file: str) -> Credentials:
    """Loads the TLS files and the token with which a client calls --target.

    Raises:
        ConfigError: A file cannot be used, or --target is not host:port.
    """
    check_target(given.target)
    return credentials_of(given, token_file)


def credentials_of(given: Given, token_file: str) -> Credentials:
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
