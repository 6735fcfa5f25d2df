"""Trains one of the shipped tiny models on generated stories and writes it in Hugging Face form.

    python -m launch.train_tiny --family=llama --destination=models/tiny/llama
    python -m launch.train_tiny --family=qwen3_moe --destination=models/tiny/qwen3_moe

Needs the `train` extra (Optax). The shipped weights: seed 0, Python 3.12, JAX 0.12.0.1, Flax 0.12.12, Optax 0.2.8, on one or two
AMD Zen 5 cores shared with other work, so that the CPU times are rough; no run was repeated at full length. The MoE was stopped
after step 1600 and taken up again with --keep. Held-out loss:

| family | steps | CPU time | nats a token | bigram counts | unigram counts |
| --- | --- | --- | --- | --- | --- |
| llama | 4000 (4 million tokens) | about 12 minutes | 0.332 | 2.381 | 5.584 |
| qwen3_moe | 3000 (3 million tokens) | about 14 minutes | 0.279 | 2.381 | 5.584 |
"""

import json
import sys
from pathlib import Path

import jax
from absl import app, flags
from tokenizers import Tokenizer

from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.folders import made_folder
from launch.console import refuse_words
from models.tiny.corpus import document
from models.tiny.export import write_checkpoint
from models.tiny.network import SHAPES, TinyNetwork
from models.tiny.tokenizer import train_tokenizer
from models.tiny.training import Progress, Schedule, held_out_losses, train

_TOKENIZER_DOCUMENTS = 6000
_STEPS_OF_FAMILY = {"llama": 4000, "qwen3_moe": 3000}

_FAMILY = flags.DEFINE_enum("family", "llama", sorted(SHAPES), "Which of the two models.")
_STEPS = flags.DEFINE_integer("steps", None, f"Steps of about a thousand tokens; else {_STEPS_OF_FAMILY}.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the text and of the first weights.", lower_bound=0)
_MINUTES = flags.DEFINE_float("minutes", 60.0, "Stop early after so many minutes, and write what there is.", lower_bound=0.0)
_KEEP = flags.DEFINE_string("keep", None, "File that keeps the state of training, to go on from (perhaps to more --steps).")
_DESTINATION = flags.DEFINE_string("destination", None, "Folder to write.", required=True)


def tokenizer_of(seed: int) -> Tokenizer:
    """Both families have the same tokenizer."""
    return train_tokenizer((document(seed, index) for index in range(_TOKENIZER_DOCUMENTS)), SHAPES["llama"].vocabulary)


def main(argv: list[str]) -> None:
    try:
        refuse_words(argv)
        destination, keep = places_to_write(_DESTINATION.value, _KEEP.value)
        train_and_write(destination, keep)
    except JdisaggError as error:
        sys.exit(f"error: {error.message}")


def places_to_write(destination: str, keep: str | None) -> tuple[Path, Path | None]:
    """The folder and the file, before minutes are spent on what they are to hold. Raises ConfigError."""
    folder = made_folder("--destination", destination)
    if keep is None:
        return folder, None
    file = made_folder("--keep", Path(keep).parent) / Path(keep).name
    if file.is_dir():
        raise ConfigError(f"--keep={keep} is a folder; name a file in it")
    return folder, file


def train_and_write(destination: Path, keep: Path | None) -> None:
    tokenizer = tokenizer_of(_SEED.value)
    steps = _STEPS.value or _STEPS_OF_FAMILY[_FAMILY.value]
    schedule = Schedule(steps, _SEED.value, seconds_at_most=60 * _MINUTES.value)

    def report(progress: Progress, network: TinyNetwork) -> None:
        told = f"loss {progress.loss:.4f}  imbalance {progress.imbalance:.3f}  {progress.seconds:.0f} s"
        print(f"step {progress.step}/{schedule.steps}  {told}", flush=True)
        write_checkpoint(network, tokenizer, destination)

    network = train(SHAPES[_FAMILY.value], tokenizer, schedule, report, keep=keep)
    losses = {name: round(loss, 4) for name, loss in held_out_losses(network, tokenizer, _SEED.value).items()}
    print(f"held-out loss, nats a token: {json.dumps(losses)}; JAX {jax.__version__}; written to {destination}")


if __name__ == "__main__":
    app.run(main)
