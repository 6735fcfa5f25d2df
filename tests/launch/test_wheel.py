"""The wheel serves: it holds the pages, the models and the recipes under a name of ours, and the
command `jdisagg` starts them from anywhere."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from models.tokenizer import Tokenizer
from tests import time_scale
from tests.end_to_end.clusters import LLAMA, dense_greedy
from tests.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "jdisagg": "jdisagg",
    **{f: f"jdisagg/_app/{f}" for f in ("models", "launch", "configs")},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in ignored:
        wanted = name.split("/")[0] in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE")
        if wanted and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    options = ["--no-deps", "--no-build-isolation", "--quiet", f"--wheel-dir={folder}"]
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(source)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.ci
def test_the_wheel_holds_all_modules_weights_and_recipes_and_no_generic_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        points = next(name for name in held if name.endswith("entry_points.txt"))
        assert "jdisagg = jdisagg.__main__:main" in archive.read(points).decode()
    assert {name.split("/")[0].partition("-")[0] for name in held} == {"jdisagg"}
    wanted = {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    for model in ("llama", "qwen3_moe"):
        files = (ROOT / "models" / "tiny" / model).iterdir()
        wanted |= {f"jdisagg/_app/models/tiny/{model}/{path.name}" for path in files}
    for folder in ("jdisagg/guide/web", "jdisagg/service/http/web"):
        wanted |= {f"{folder}/{path.name}" for path in (ROOT / folder).iterdir()}
    wanted |= {"jdisagg/py.typed", "jdisagg/_app/launch/calibration_text.txt"}
    assert wanted <= held, sorted(wanted - held)


@pytest.mark.ci
def test_the_command_of_the_wheel_finds_its_pages_from_an_empty_folder(
    wheel: Path, tmp_path: Path
) -> None:
    """Unpacked where nothing else of ours is: pip would lay it out so."""
    (tmp_path / "site").mkdir()
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    ran = subprocess.run(
        [sys.executable, "-m", "jdisagg", "kv_calculator", "--model=llama-3-70b"],
        cwd=tmp_path / "empty",
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0 and "KV per token" in ran.stdout, ran.stderr


LIBRARY = """
import sys

import jdisagg
from jdisagg.errors import ConfigError

assert not {"jax", "grpc"} & set(sys.modules)
from jdisagg import LLM

prompts, cache = ["Once upon a time", "The dog"], sys.argv[1]
# a command may take longer when it compiles its program
own = {"compilation_cache": cache, "set": ["limits.step_seconds=0.01"]}
with LLM(prefill="tp=2", decode="dp=2", **own) as llm:
    for output in llm.generate(prompts, {"max_tokens": 12, "temperature": 0}):
        print(output.choices[0].token_ids)
    (alone,) = llm.generate(prompts[1], jdisagg.request.SamplingParams(5, temperature=0))
    print(alone.choices[0].token_ids)
    ids = jdisagg.dispatch.prompts.TokenPrompt((5, 6, 7))
    given = [llm.generate(one, {"max_tokens": 4, "temperature": 0}) for one in ([[5, 6, 7]], ids)]
    print(*(one.choices[0].token_ids for (one,) in given))
for wrong in (lambda: LLM(nonsense=1), lambda: llm.generate(prompts)):
    try:
        wrong()
    except ConfigError as error:
        print(error)
"""
RESEARCH = """
import sys
from jdisagg.research import open_engine

with open_engine(devices=4, compilation_cache=sys.argv[1]) as engine:
    session = engine.create_session("a", layout="dp=2")
    session.push(engine.prefill("Once upon a time", layout="tp=2"))
    print(engine.generate_tokens(session, max_new_tokens=12).token_ids)
"""


@pytest.mark.ci
def test_the_wheels_library_computes_the_dense_tokens_from_an_empty_folder(
    wheel: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    said = []
    for program in (LIBRARY, RESEARCH):
        ran = subprocess.run(
            [sys.executable, "-c", program, str(PROGRAMS)],
            cwd=tmp_path / "empty",
            env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=time_scale.seconds(240),
        )
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout.splitlines())
    tokenizer = Tokenizer.from_directory(LLAMA)
    once, dog = (
        list(dense_greedy(LLAMA, tokenizer.encode(prompt), 12))
        for prompt in ("Once upon a time", "The dog")
    )
    assert [ast.literal_eval(line) for line in said[0][:3]] == [once, dog, dog[:5]]
    ids = list(dense_greedy(LLAMA, [5, 6, 7], 4))
    assert said[0][3] == f"{ids} {ids}"
    assert "nonsense" in said[0][4] and said[0][5].startswith("this LLM is closed")
    assert list(ast.literal_eval(said[1][0])) == once
