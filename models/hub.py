"""Resolves a model's name to a local checkpoint folder: an existing folder is used directly. A name
`org/name` is looked up in the Hugging Face cache, and downloaded if the cache lacks it.

`huggingface_hub` reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Imports no JAX."""

import re
from pathlib import Path

from jdisagg.errors import CheckpointError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights in other formats (PyTorch pickles, ONNX, GGUF) would double the download and are not read.
_CONFIGURATION = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHTS = ("*.safetensors",)
# Files in original formats and exports, which some repositories keep next to the safetensors files.
_LEFT_OUT = ("original/*", "onnx/*", "consolidated*", "metal/*")
_WAIT_SECONDS = 10.0


def local_model(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """Returns the folder of a checkpoint. Blocks while files are downloaded, with a progress bar on
    stderr.

    Args:
        name: A folder, or `org/name` of a Hugging Face repository. A folder takes precedence.
        revision: Branch, tag or commit of the repository; None means its default branch.
        weights: Whether to download weights too, or only configuration and tokenizer.

    Raises:
        CheckpointError: `org/name` is not in the cache and cannot be downloaded. The error gives a
            command to download it on another machine. Other names are returned as paths, which
            `check_model_folder` checks.
    """
    folder = Path(name).expanduser()
    if folder.exists() or not _HUB_NAME.fullmatch(name):
        if revision:
            raise CheckpointError(
                f"--revision={revision} applies to a Hugging Face name (org/name), got {name!r}"
            )
        return folder
    from huggingface_hub import constants, errors, snapshot_download

    patterns = [*_CONFIGURATION, *(_WEIGHTS if weights else ())]
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=list(_LEFT_OUT),
                etag_timeout=_WAIT_SECONDS,
            )
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"model {name!r} is gated: accept its licence on its page, and set HF_TOKEN to a token"
            " of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"model {name!r} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {name!r} is neither a folder nor a Hugging Face repository that this account"
            " can read; check the name, and set HF_TOKEN if it is private"
        ) from error
    except (OSError, errors.HfHubHTTPError, errors.HFValidationError) as error:
        at = f" --revision {revision}" if revision else ""
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _reason(error)
        raise CheckpointError(
            f"model {name!r} is neither a folder nor in the Hugging Face cache"
            f" ({constants.HF_HUB_CACHE}), and was not downloaded: {why}. Run `hf download"
            f" {name}{at} --local-dir DIR` where there is a network, and give DIR as the model"
        ) from error


def served_name(directory: str) -> str:
    """Returns the name of a model in the APIs: the folder's name, or org/name for a folder of the
    Hugging Face cache (models--ORG--NAME/snapshots/COMMIT)."""
    path = Path(directory).expanduser().resolve()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def _reason(error: BaseException) -> str:
    """Returns the first line of the innermost cause, because error messages of `huggingface_hub`
    span paragraphs."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().split("\n")[0] or type(error).__name__
