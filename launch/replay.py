"""Re-runs recorded command streams on fresh meshes and checks that the tokens are equal.

    jdisagg serve --record=DIR          (or jdisagg generate, or jdisagg worker for each worker)
    jdisagg replay --recording=DIR/prefill-0.commands,DIR/decode-0.commands [--model=DIR]

All meshes are rebuilt in this process, on virtual devices of the CPU. A mesh that pulled KV must be
replayed together with the meshes that sent the KV. Commands that failed during the recording are
omitted. If all tokens are equal, the command prints "N steps, M tokens, identical" and exits with
status 0. If not, it prints the first difference and exits with status 1. An instance of several
processes may sum floats in another order than one process. Tokens may then differ where two tokens
are almost equally likely."""

import asyncio
from pathlib import Path

from jdisagg.config import EngineConfig
from jdisagg.layout.axes import Layout
from jdisagg.node.commands.replay import replay
from jdisagg.node.deployment import prepare_runtime
from jdisagg.node.recording import read_recording
from launch.console import run
from launch.flags import define
from launch.grammars import grammar_compiler
from launch.model import loader

REFUSED = 2  # 1 is a difference
flags = define(
    "recording",
    "model",
    "compilation_cache",
    required=("recording",),
    model="",
    compilation_cache=EngineConfig.compilation_cache,
)


def main() -> int:
    recordings = [read_recording(Path(name)) for name in flags.recording]
    devices = sum(Layout.parse(recording.header.layout).devices for recording in recordings)
    prepare_runtime(devices, flags.compilation_cache)
    replayed = asyncio.run(
        replay(
            recordings,
            lambda header: loader(
                flags.model or header.model,
                header.dtype,
                header.weights,
                header.kv_dtype,
                str(header.limits.get("draft_layer") or "off"),
                header.draft,
            ),
            lambda header: grammar_compiler(flags.model or header.model),
        )
    )
    left_out = (
        f", {replayed.left_out} commands that had failed left out" if replayed.left_out else ""
    )
    print(
        f"{replayed.steps} steps, {replayed.tokens} tokens,"
        f" {replayed.difference or 'identical'}{left_out}"
    )
    return 1 if replayed.difference else 0


if __name__ == "__main__":
    run(main, flags, refused=REFUSED)
