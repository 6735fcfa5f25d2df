"""Computes scaling factors for an fp8 KV cache and writes them to kv_scales.json.

    jdisagg calibrate_kv --model=DIR [--text=FILE] [--tokens=2048] [--layout=dp=1,tp=2]
        [--dtype=auto] [--weights=int8] [--output=FILE]

The model runs over a text. Each layer and kv head gets one scaling factor for keys and one for
values. A scaling factor is the smallest power of two with which twice the largest key or value is
in the range of e4m3. Workers with --kv_dtype=fp8 read kv_scales.json at start. All workers need the
same file. The text in FILE should be similar to the expected traffic. The default text has prose in
several languages, code and numbers."""

from pathlib import Path

import jax
import numpy as np

from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KV_SCALES_FILE
from jdisagg.node.deployment import prepare_runtime
from jdisagg.ops.quantize import FP8_LARGEST
from jdisagg.ops.quantized_weights import checked_weights
from jdisagg.settings.folders import made_folder
from launch.console import run
from launch.flags import define
from models.checkpoint import load_model
from models.hub import local_model
from models.kv_calibration import largest_kept
from models.kv_scales import KVScales, chosen_scales, write_kv_scales
from models.model_folder import stored_dtype
from models.tokenizer import Tokenizer

flags = define(
    "model",
    "text",
    "tokens",
    "layout",
    "dtype",
    "weights",
    "output",
    required=("model",),
    model=(None, "Checkpoint directory, Hugging Face or Orbax form."),
    layout="dp=1,tp=1,ep=1",
    dtype=("auto", "Type of the weights; auto: the checkpoint's own."),
    weights=(None, "Quantize the matrices of layers to it as they are read, to save memory."),
    output=("", f"File to write; default: {KV_SCALES_FILE} in the model's directory."),
)

DEFAULT_TEXT = Path(__file__).with_name("calibration_text.txt")
# Attention is dense: its scores take tokens x tokens x 4 bytes per head.
SEQUENCE_TOKENS = 512
_ELSEWHERE = f"name another file, and put it into the model's directory as {KV_SCALES_FILE}"


def sequences(tokenizer: Tokenizer, text: str, tokens: int) -> list[list[int]]:
    """Cuts the first `tokens` tokens of a text into sequences of equal length. Each sequence starts
    with the tokenizer's opening tokens (BOS). Raises ConfigError for a text without tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)[:tokens]
    opening = tokenizer.encode("")
    opening = [token for token in opening if token not in tokenizer.eos_ids]
    if not ids:
        raise ConfigError("the text has no tokens; give another with --text")
    length = min(len(ids), SEQUENCE_TOKENS)
    return [opening + ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]


def main() -> int:
    layout = Layout.parse(flags.layout)
    if layout.pp > 1:
        raise ConfigError(f"--layout={layout}: calibration uses one mesh; use pp=1")
    directory = local_model(flags.model)
    tokenizer = Tokenizer.from_directory(directory)
    inputs = sequences(tokenizer, _text(), flags.tokens)
    output = Path(flags.output).expanduser() if flags.output else directory / KV_SCALES_FILE
    made_folder("--output", output.parent, _ELSEWHERE)
    prepare_runtime(layout.devices, "")
    loaded = load_model(
        directory,
        layout,
        jax.local_devices()[: layout.devices],
        dtype=stored_dtype(directory) if flags.dtype == "auto" else flags.dtype,
        weights=checked_weights(flags.weights or ""),
    )
    largest = largest_kept(loaded, inputs)
    scales = [{name: chosen_scales(values) for name, values in layer.items()} for layer in largest]
    tokens = sum(map(len, inputs))
    of = f"{tokens} tokens of {Path(flags.text).name if flags.text else 'the default text'}"
    write_kv_scales(output, loaded.model.config, scales, of, largest)
    print("\n".join(table(largest, scales)))
    print(f"{output}: {of}")
    return 0


def table(largest: KVScales, scales: KVScales) -> list[str]:
    rows, names = [], sorted({name for layer in largest for name in layer})
    for index, layer in enumerate(scales):
        text = [_range(layer[name]) if name in layer else "-" for name in names]
        sizes = [largest[index][name].max() if name in layer else 0.0 for name in names]
        if rows and rows[-1][1] == text:
            rows[-1][2][:] = map(max, rows[-1][2], sizes)
        else:
            rows.append((index, text, sizes))
    ends = [first for first, _, _ in rows[1:]] + [len(scales)]
    lines = [
        f"{'layers':<12}" + "".join(f"{f'largest {name}':>16}{'scales':>16}" for name in names)
    ]
    for (first, text, sizes), end in zip(rows, ends, strict=True):
        which = f"{first}" if end == first + 1 else f"{first}-{end - 1}"
        columns = zip(sizes, text, strict=True)
        lines.append(f"{which:<12}" + "".join(f"{size:>16.4g}{of:>16}" for size, of in columns))
    over = sum(int(np.sum(size > FP8_LARGEST)) for layer in largest for size in layer.values())
    lines.append(
        f"{over} heads go beyond {FP8_LARGEST:g}, where e4m3 ends; without scales they are cut off"
        if over
        else f"none goes beyond {FP8_LARGEST:g}, where e4m3 ends"
    )
    return lines


def _range(scales: np.ndarray) -> str:
    least, most = (f"2^{int(np.log2(value))}" for value in (scales.min(), scales.max()))
    return least if least == most else f"{least}..{most}"


def _text() -> str:
    path = Path(flags.text).expanduser() if flags.text else DEFAULT_TEXT
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--text={flags.text} cannot be read as UTF-8: {error}; name another"
        ) from error


if __name__ == "__main__":
    run(main, flags)
