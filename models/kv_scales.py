"""KV scales: the numbers by which keys and values are divided before they are stored in fp8
(`jdisagg/ops/scaled_kv.py`).

Scales are fixed for a model. If scales depended on requests, output tokens would depend on earlier
requests and on the worker that serves them. The first source that exists applies: (1)
`kv_scales.json` in the model's folder, which `jdisagg calibrate_kv` writes; (2) the checkpoint's
own tensors, per matrix or kv head, as ModelOpt and llm-compressor write them (stored value = value
/ scale), rounded up to powers of two; (3) a scale of 1 for all keys and values."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from flax import nnx

from jdisagg.errors import CheckpointError, ConfigError
from jdisagg.layout.kv_spec import KV_SCALES_FILE, KVComponent, KVLayer
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantize import FP8_LARGEST
from models.decoder_config import DecoderConfig
from models.safetensors_files import CheckpointTensors

# KV scales: for each layer, by component name ("k" and "v", or "latent"), float32 [kv heads], or
# [1] for a component without heads.
LayerScales = Mapping[str, np.ndarray]
KVScales = Sequence[LayerScales]

_FORMAT = 1
# Factor by which keys and values may exceed the largest magnitudes of the sample.
MARGIN = 2.0
# Bounds of scales. A scale far outside of them would hide the marker of a sequence with non-finite
# values (`jdisagg/ops/quarantine.py`).
_LEAST, _MOST = 2.0**-24, 2.0**24
_TENSORS = (
    "self_attn.{side}_scale",
    "self_attn.{side}_proj.{side}_scale",
    "self_attn.qkv_proj.{side}_scale",
    "self_attn.attn.{side}_scale",
    "mixer.{side}_scale",
    "mixer.{side}_proj.{side}_scale",
)


def scale_parameters(make: Make, config: DecoderConfig, **kv_heads: int) -> nnx.Dict | None:
    """Creates a layer's scale parameters, by component name. Keys and values are components with
    one scale per kv head; a component without heads has one scale. Returns None if KV is stored in
    the model's type."""
    if not config.kv_dtype:
        return None
    return nnx.Dict(
        {
            name: parameter(make((heads or 1,), "norm", 1), ("kv_heads" if heads else "head",))
            for name, heads in kv_heads.items()
        }
    )


def find_kv_scales(
    directory: Path, config: DecoderConfig, files: CheckpointTensors | None
) -> tuple[KVScales, str]:
    """Returns the KV scales of a model and the name of their source, which is "" if all scales are
    one by default. `files`: tensors of the model, or None for the Orbax format, which holds no
    scales. Raises CheckpointError if the number of scales does not fit the model, or a scale is not
    valid."""
    path = directory / KV_SCALES_FILE
    if path.is_file():
        return _of_file(path, config), KV_SCALES_FILE
    shapes, found, names = {} if files is None else files.shapes(), [], []
    for index, parts in enumerate(_kept(config)):
        scales = {part.name: np.ones(max(1, part.heads), np.float32) for part in parts}
        for part in parts:
            for pattern in _TENSORS:
                side = "v" if part.name == "v" else "k"
                name = f"model.layers.{index}.{pattern.format(side=side)}"
                if files is not None and name in shapes:
                    value = files.read(name, (slice(None),) * len(shapes[name]))
                    scales[part.name] = _of_tensor(name, value, part, directory)
                    names.append(name)
        found.append(scales)
    return found, f"{len(names)} tensors such as {names[0]}" if names else ""


def chosen_scales(largest: np.ndarray) -> np.ndarray:
    """Chooses a float32 scale for each measured magnitude: the smallest power of two by which
    magnitude x `MARGIN` must be divided to fit into fp8 (e4m3). A magnitude of zero gives 1."""
    needed = largest.astype(np.float64) * MARGIN / FP8_LARGEST
    return np.where(needed > 0, _power_of_two(np.clip(needed, _LEAST, _MOST)), 1).astype(np.float32)


def write_kv_scales(
    path: Path, config: DecoderConfig, scales: KVScales, of: str, largest: KVScales | None = None
) -> None:
    """The entries `of` and `largest` (the measured magnitudes) are written for human readers only.
    Raises ConfigError if the file cannot be written."""
    layers = [
        {
            name: {"scale": values.tolist()}
            | ({} if largest is None else {"largest": _short(largest[index][name])})
            for name, values in layer.items()
        }
        for index, layer in enumerate(scales)
    ]
    lines = ",\n".join(f"    {json.dumps(layer)}" for layer in layers)
    head = json.dumps({"format": _FORMAT, "family": config.family, "of": of})[1:-1]
    text = f'{{\n  {head},\n  "layers": [\n{lines}\n  ]\n}}\n'
    fresh = path.with_name(f"{path.name}.part")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)  # atomic, so that concurrent loads read the old or the new file
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; give another file"
        ) from error


def _of_file(path: Path, config: DecoderConfig) -> KVScales:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(
            f"{path}: {what}; write it again (jdisagg calibrate_kv --model={path.parent}) or remove"
            " it"
        )

    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise wrong(f"the file cannot be read ({error})") from error
    stated = stated if isinstance(stated, dict) else {}
    for field, ours in (("format", _FORMAT), ("family", config.family)):
        if stated.get(field) != ours:
            raise wrong(f"{field} must be {ours!r}, got {stated.get(field)!r:.80}")
    layers, kept = stated.get("layers"), _kept(config)
    if not isinstance(layers, list) or len(layers) != len(kept):
        count = len(layers) if isinstance(layers, list) else "none"
        raise wrong(f"layers must have {len(kept)} entries, as the model has, got {count}")
    found = []
    for index, (layer, parts) in enumerate(zip(layers, kept, strict=True)):
        names = [part.name for part in parts]
        if not isinstance(layer, dict) or sorted(layer) != sorted(names):
            raise wrong(f"layers[{index}] must have {', '.join(names) or 'no entries'}")
        scales = {}
        for part in parts:
            where, heads = f"layers[{index}].{part.name}.scale", max(1, part.heads)
            of_part = layer[part.name]
            values = of_part.get("scale") if isinstance(of_part, dict) else None
            if not isinstance(values, list) or len(values) != heads or not all(map(_fits, values)):
                raise wrong(
                    f"{where} must be {heads} powers of two from 2^-24 to 2^24, got {values!r:.80}"
                )
            scales[part.name] = np.array(values, np.float32)
        found.append(scales)
    return found


def scaled_components(layer: KVLayer) -> tuple[KVComponent, ...]:
    return tuple(part for part in layer.components if part.name != "index")


def _kept(config: DecoderConfig) -> list[tuple[KVComponent, ...]]:
    stored = config.kv_spec("float32").layers[: len(config.layers)]
    return [scaled_components(layer) for layer in stored]


def _fits(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return _LEAST <= value <= _MOST and float(_power_of_two(np.array(value, np.float64))) == value


def _of_tensor(name: str, value: np.ndarray, part: KVComponent, directory: Path) -> np.ndarray:
    values, heads = value.astype(np.float64).reshape(-1), max(1, part.heads)
    if values.size not in (1, heads) or not np.all((values >= _LEAST) & (values <= _MOST)):
        some = f"1 or {heads}" if heads > 1 else "1"
        raise CheckpointError(
            f"{directory}: {name} must be {some} numbers from 2^-24 to 2^24, got {values.size}:"
            f" {values[:4].tolist()}; override it with the {KV_SCALES_FILE} of jdisagg calibrate_kv"
        )
    return np.broadcast_to(_power_of_two(values), (heads,)).astype(np.float32)


def _power_of_two(values: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
