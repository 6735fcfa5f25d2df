"""Regenerates the committed gRPC stubs: `python -m jdisagg.service.grpc.generate_stubs`.

Needs grpcio-tools, in the `dev` extra. Writes *_pb2.py and *_pb2.pyi next to each .proto, and
*_pb2_grpc.py for files with services. The include path is the checkout, so that generated files
import each other as `from jdisagg.service.grpc import generation_pb2`. A test regenerates the stubs
into another folder and compares them with the committed ones."""

import importlib.resources
import pathlib
import sys

PROTOS = ("common", "generation")
SERVICES = ("generation",)
HERE = pathlib.Path(__file__).resolve().parent


def generate(destination: pathlib.Path) -> list[pathlib.Path]:
    from grpc_tools import protoc

    root = HERE.parents[2]
    names = [f"jdisagg/service/grpc/{name}.proto" for name in PROTOS]
    includes = [f"-I{root}", f"-I{importlib.resources.files('grpc_tools') / '_proto'}"]
    services = [f"jdisagg/service/grpc/{name}.proto" for name in SERVICES]
    for outputs, protos in (
        ([f"--python_out={destination}", f"--pyi_out={destination}"], names),
        ([f"--grpc_python_out={destination}"], services),
    ):
        if protoc.main(["protoc", *includes, *outputs, *protos]) != 0:
            raise RuntimeError(f"protoc failed on {', '.join(protos)}; its messages are above")
    folder = destination / "jdisagg" / "service" / "grpc"
    return sorted(
        [*folder.glob("*_pb2.py"), *folder.glob("*_pb2.pyi"), *folder.glob("*_pb2_grpc.py")]
    )


if __name__ == "__main__":
    for path in generate(HERE.parents[2]):
        print(path, file=sys.stderr)
