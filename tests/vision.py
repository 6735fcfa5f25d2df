"""Images, a tokenizer and chat templates for tests of prompts with images. Needs no checkpoint, and
no torch."""

import base64
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers

from models.image_processor import ImageProcessor, read_image_processor
from models.tokenizer import Tokenizer

SPECIAL = (
    *("<end>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"),
)
IDS = {text: 256 + at for at, text in enumerate(SPECIAL)}
VOCABULARY = 256 + len(SPECIAL)
GOLDEN = Path(__file__).parent / "golden"
FIRST_LETTER = 10
LETTERS = [chr(code) for code in (*range(33, 127), *range(192, 219))]
TEMPLATES = {
    "qwen": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "pixtral": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        "{% else %}[IMG]{% endif %}{% endfor %}{% endif %}[/INST]{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    ),
}
# config.json, preprocessor_config.json and processor_config.json of each kind of processor.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen": {
        "config.json": {
            "model_type": "qwen3_5",
            "image_token_id": IDS["<|image_pad|>"],
            "vision_config": {"patch_size": 16},
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 4096, "longest_edge": 200_000},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    },
    "qwen14": {
        "config.json": {
            "model_type": "qwen3_5",
            "image_token_id": IDS["<|image_pad|>"],
            "vision_config": {"patch_size": 14},
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 100_352,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    },
    "pixtral": {
        "config.json": {
            "model_type": "mistral3",
            "image_token_index": IDS["[IMG]"],
            "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "patch_size": 14},
        },
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 420},
            "patch_size": 14,
        },
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
    },
}


def backend() -> tokenizers.Tokenizer:
    """One token per byte, and the tokens of `SPECIAL`."""
    order = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        models.BPE(vocab={letter: at for at, letter in enumerate(order)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    assert made.token_to_id(SPECIAL[-1]) == IDS[SPECIAL[-1]]
    return made


def write_settings(folder: Path, kind: str) -> None:
    for name, fields in SETTINGS[kind].items():
        (folder / name).write_text(json.dumps(fields))


def processor(folder: Path, kind: str) -> ImageProcessor:
    write_settings(folder, kind)
    made = backend()
    found = read_image_processor(folder, made.id_to_token, made.token_to_id)
    assert found is not None
    return found


def vision_tokenizer(folder: Path, kind: str = "qwen") -> Tokenizer:
    """Tokenizer with the image processor of a vision-language model."""
    template = TEMPLATES["pixtral" if kind == "pixtral" else "qwen"]
    return Tokenizer(
        backend(),
        eos_ids=(IDS["<end>"],),
        special_tokens={},
        chat_templates={"default": template},
        images=processor(folder, kind),
    )


def pattern(height: int, width: int, seed: int = 0) -> np.ndarray:
    """An image with edges, gradients and noise: uint8 [height, width, 3]."""
    y, x, c = np.meshgrid(
        *(np.arange(size, dtype=np.int64) for size in (height, width, 3)), indexing="ij"
    )
    noise = (x * 7919 + y * 104729 + c * 1299709 + seed * 15485863) % 9973 % 256
    wave = x * 3 + y * 5 * (c + 1) + seed
    edges = np.where((x // 11 + y // 7) % 2 == 0, 255, 0)
    return np.where((x + y) % 5 == 0, edges, (noise + wave) // 2 % 256).astype(np.uint8)


def file_of(pixels: np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, form, **options)
    return written.getvalue()


def data_url(file: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(file).decode()}"


def seeing_checkpoint(name: str, folder: Path) -> Path:
    """A copy of a golden fixture that reads images, with a tokenizer and a processor. Each token
    from 10 on is one character, so that any prompt can be written as text."""
    directory = Path(shutil.copytree(GOLDEN / name, folder / name))
    pixtral = name.startswith("mistral3")
    marks = ("<|vision_start|>", "<|vision_end|>", "[IMG]" if pixtral else "<|image_pad|>")
    special = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *marks)
    special += ("[IMG_BREAK]", "[IMG_END]")
    made = tokenizers.Tokenizer(
        models.BPE(vocab={text: at for at, text in enumerate((*special, *LETTERS))}, merges=[])
    )
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(special))
    made.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        f"{{% else %}}{marks[2]}{{% endif %}}{{% endfor %}}{{% endfor %}}"
    )
    kind = "pixtral" if pixtral else "qwen"
    settings: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {"chat_template": template, "eos_token": "</s>"},
        "preprocessor_config.json": {
            **SETTINGS[kind]["preprocessor_config.json"],
            "patch_size": 2,
            "size": {"shortest_edge": 4, "longest_edge": 1024},
        },
        "processor_config.json": {"patch_size": 2, "spatial_merge_size": 2},
    }
    for file, fields in settings.items():
        (directory / file).write_text(json.dumps(fields))
    return directory


def written(token_ids: Sequence[int]) -> str:
    """The text of tokens of `seeing_checkpoint`."""
    return "".join(LETTERS[token - FIRST_LETTER] for token in token_ids)
