"""Reports what a checkpoint is, how much memory it takes, and whether it can be served.

    jdisagg inspect --model=DIR [--layout=dp=1,tp=2] [--dtype=bfloat16] [--weights=int8]
        [--kv_dtype=fp8] [--draft=DRAFTER]

DIR is the folder of a checkpoint, or a config.json without weights. DRAFTER is the folder of an
EAGLE-3 head or a Gemma 4 assistant, which is checked against the checkpoint. Exit status 0: the
model can be loaded under the layout. Exit status 1: the model cannot be loaded. Each feature that
is not supported is listed."""

from dataclasses import replace
from pathlib import Path

from jdisagg.errors import CheckpointError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KEPT_DTYPES
from jdisagg.ops.quantized_weights import checked_weights
from launch.console import run
from launch.flags import define
from models.checkpoint import load_kv_scales
from models.hub import local_model
from models.inspection import Inspection, bytes_per_device, inspect, kv_by_kind, layers_by_kind

flags = define(
    "model",
    "revision",
    "layout",
    "dtype",
    "weights",
    "kv_dtype",
    "draft",
    required=("model",),
    model=(None, "Checkpoint directory, or a config.json alone."),
    layout="dp=1,tp=1,ep=1",
    dtype="bfloat16",
)


def main() -> int:
    layout = Layout.parse(flags.layout)
    path = Path(flags.model).expanduser()
    if not path.exists():
        path = local_model(flags.model, flags.revision, weights=False)
        path = path / "config.json" if path.exists() else path
    found = inspect(path, flags.draft or "")
    lines = _lines(found)
    if found.config is not None:
        if flags.kv_dtype and path.is_dir() and not found.missing:
            lines.append(("KV scales", _kv_scales(path, found)))
        try:
            lines += _under(found, layout)
        except LayoutError as error:
            found.missing.append(error.message)
    lines.insert(0, ("loads", "no" if found.missing else "yes"))
    lines[1:1] = [("missing", text) for text in found.missing]
    for name, text in lines:
        print(f"{name:<16}{text}")
    return 1 if found.missing else 0


def _lines(found: Inspection) -> list[tuple[str, str]]:
    lines = [("family", found.family), ("quantization", found.quantization)]
    if (config := found.config) is not None:
        kept = kv_by_kind(replace(config, kv_dtype=flags.kv_dtype or ""), flags.dtype)
        for kind, count in layers_by_kind(config):
            each = f": {kept[kind]:,} bytes of KV per token each" if kept[kind] else ""
            lines.append(("layers", f"{count} x {kind}{each}"))
    if (geometry := found.geometry) is not None:
        geometry = replace(geometry, kv_dtype=KEPT_DTYPES.get(flags.kv_dtype or "", ""))
        a_token = geometry.kv_bytes_per_token(flags.dtype)
        state = geometry.state_bytes(flags.dtype)
        context = geometry.context_tokens
        if config is None:
            lines.append(("estimated", "what follows, by the fields that are known"))
            lines.append(("layers", str(geometry.layers)))
        lines += [
            ("parameters", f"{geometry.parameters:,}, {geometry.active_parameters:,} active"),
            ("context", f"{context:,} tokens"),
            (
                "KV per token",
                f"{a_token:,} bytes ({flags.kv_dtype or flags.dtype}){_beside(state)}",
            ),
            ("KV per sequence", f"{a_token * context:,} bytes of full context"),
        ]
        if state:
            lines.append(("sequence state", f"{state:,} bytes, independent of its length"))
    if config is not None and (vision := config.vision) is not None:
        side = vision.patch * vision.merge
        lines.append(
            (
                "images",
                f"one token for {side} x {side} pixels, {vision.layers} encoder layers of"
                f" {vision.width}, {vision.parameters:,} parameters",
            )
        )
    if found.drafter:
        lines.append(("drafter", found.drafter))
    lines.append(("weights", found.stored))
    if found.tokenizer:
        lines.append(("tokenizer", found.tokenizer))
    return lines


def _under(found: Inspection, layout: Layout) -> list[tuple[str, str]]:
    assert found.config is not None
    kept_in = replace(found.config, kv_dtype=flags.kv_dtype or "")
    weights, a_token, state = bytes_per_device(
        kept_in, layout, flags.dtype, checked_weights(flags.weights or "")
    )
    kinds = f"{flags.dtype}, matrices in {flags.weights}" if flags.weights else flags.dtype
    kinds += f", KV in {flags.kv_dtype}" if flags.kv_dtype else ""
    kept = f"{a_token:,} of KV per token" + (f", {state:,} of state per sequence" if state else "")
    return [
        ("layout", f"{layout}, {layout.devices} devices"),
        ("bytes per device", f"{weights:,} of weights, {kept} ({kinds})"),
    ]


def _kv_scales(directory: Path, found: Inspection) -> str:
    try:
        return load_kv_scales(directory)[1] or "none; `jdisagg calibrate_kv` computes them"
    except CheckpointError as error:
        found.missing.append(error.message)
        return "not to be used"


def _beside(state: int) -> str:
    return "" if state else "; no recurrent state"


if __name__ == "__main__":
    run(main, flags)
