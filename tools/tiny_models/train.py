"""Trains one of the shipped tiny models on generated stories and writes it in Hugging Face form.

    python -m tools.tiny_models.train --family=llama --destination=models/tiny/llama python -m
    tools.tiny_models.train --family=qwen3_moe --destination=models/tiny/qwen3_moe

Needs the `train` extra (Optax). The shipped weights were trained with seed 0, Python 3.12, JAX
0.12.0.1, Flax 0.12.12 and Optax 0.2.8. The machine had one or two AMD Zen 5 cores shared with other
work, so CPU times are rough. No run was repeated at full length. The MoE run was stopped after step
1600 and resumed with --keep. Loss on held-out text, next to unigram and bigram baselines:

| family | steps | CPU time | nats per token | bigram counts | unigram counts | | --- | --- | --- |
--- | --- | --- | | llama | 4000 (4 million tokens) | about 12 minutes | 0.332 | 2.381 | 5.584 | |
qwen3_moe | 3000 (3 million tokens) | about 14 minutes | 0.279 | 2.381 | 5.584 |

--family=hybrid trains a model that is not shipped (`hybrid.py`)."""

import json
from pathlib import Path

import jax
from tokenizers import Tokenizer

from jdisagg.errors import ConfigError
from jdisagg.settings.folders import made_folder
from launch.console import run
from launch.flags import define
from tools.tiny_models import hybrid
from tools.tiny_models.corpus import document
from tools.tiny_models.export import write_checkpoint
from tools.tiny_models.network import SHAPES, TinyNetwork
from tools.tiny_models.served import ServedNetwork
from tools.tiny_models.tokenizer import train_tokenizer
from tools.tiny_models.training import Schedule, TrainingProgress, held_out_losses, train

_TOKENIZER_DOCUMENTS = 6000
_STEPS_OF_FAMILY = {"llama": 4000, "qwen3_moe": 3000, "hybrid": 3000}

flags = define(
    "family", "steps", "seed", "minutes", "keep", "destination", required=("destination",), seed=0
)


def tokenizer_of(seed: int) -> Tokenizer:
    """Trains the tokenizer that both families share."""
    return train_tokenizer(
        (document(seed, index) for index in range(_TOKENIZER_DOCUMENTS)), SHAPES["llama"].vocabulary
    )


def main() -> None:
    destination, keep = places_to_write(flags.destination, flags.keep)
    train_and_write(destination, keep)


def places_to_write(destination: str, keep: str | None) -> tuple[Path, Path | None]:
    """Returns the destination folder and the path of the training state. Creates the folders of
    both before the training starts, so that an invalid path fails early. Raises ConfigError."""
    folder = made_folder("--destination", destination)
    if keep is None:
        return folder, None
    file = made_folder("--keep", Path(keep).parent) / Path(keep).name
    if file.is_dir():
        raise ConfigError(f"--keep={keep} is a folder; name a file in it")
    return folder, file


def train_and_write(destination: Path, keep: Path | None) -> None:
    tokenizer = tokenizer_of(flags.seed)
    steps = flags.steps or _STEPS_OF_FAMILY[flags.family]
    schedule = Schedule(steps, flags.seed, seconds_at_most=60 * flags.minutes)

    def report(progress: TrainingProgress, network: TinyNetwork | ServedNetwork) -> None:
        loss, imbalance = progress.told
        told = f"loss {loss:.4f}  imbalance {imbalance:.3f}  {progress.seconds:.0f} s"
        print(f"step {progress.step}/{schedule.steps}  {told}", flush=True)
        if isinstance(network, TinyNetwork):
            write_checkpoint(network, tokenizer, destination)
        else:
            hybrid.write(network.model, hybrid.CONFIG, tokenizer, destination)

    network = train(_untrained(flags.family), tokenizer, schedule, report, keep=keep)
    losses = {
        name: round(loss, 4)
        for name, loss in held_out_losses(network, tokenizer, flags.seed).items()
    }
    print(
        f"held-out loss, nats per token: {json.dumps(losses)}; JAX {jax.__version__}; written to"
        f" {destination}"
    )


def _untrained(family: str) -> TinyNetwork | ServedNetwork:
    if family == "hybrid":
        return ServedNetwork(hybrid.untrained(hybrid.CONFIG, flags.seed))
    return TinyNetwork(SHAPES[family], flags.seed)


if __name__ == "__main__":
    run(main, flags)
