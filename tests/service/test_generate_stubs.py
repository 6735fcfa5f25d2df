"""The committed stubs are what the .proto files make."""

import pathlib
import subprocess
import sys

import pytest

from jdisagg.service.grpc import generate_stubs

FOLDER = pathlib.Path(generate_stubs.__file__).parent


@pytest.mark.ci
def test_the_committed_stubs_are_fresh(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is in the dev extra")
    # In a process of its own: protoc's Python module registers every .proto a second time.
    command = (
        "import pathlib; from jdisagg.service.grpc import generate_stubs as g;"
        f" g.generate(pathlib.Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", command], cwd=FOLDER.parents[2], check=True)
    made = {
        path.name: path.read_text()
        for path in (tmp_path / "jdisagg" / "service" / "grpc").iterdir()
    }
    committed = {path.name: path.read_text() for path in FOLDER.iterdir() if "_pb2" in path.name}
    assert made.keys() == committed.keys()
    stale = [name for name, text in made.items() if committed[name] != text]
    assert not stale, f"{stale}: run python -m jdisagg.service.grpc.generate_stubs"


def test_every_proto_file_is_generated() -> None:
    assert {path.stem for path in FOLDER.glob("*.proto")} == set(generate_stubs.PROTOS)
