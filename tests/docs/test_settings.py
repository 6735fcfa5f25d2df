"""Settings that the pages show exist and load."""

import re
from pathlib import Path

from jdisagg.config import EngineConfig
from jdisagg.node.recipes import load_recipe, load_shape, of_both_sides
from jdisagg.router.elastic import ElasticConfig
from jdisagg.settings.declared import assignment, changed
from tests.docs.pages import PAGES


def test_every_setting_on_a_page_is_one() -> None:
    found = 0
    for page in PAGES:
        shown = re.findall(r"--set[= ]([a-z_.]+=[^ `|,;)A-Z\n]+)\b", page.read_text())
        elastic = [text.removeprefix("elastic.") for text in shown if text.startswith("elastic.")]
        others = [text for text in shown if not text.startswith("elastic.")]
        changed(ElasticConfig(), map(assignment, elastic))
        changed(EngineConfig(), of_both_sides(map(assignment, others)))
        found += len(shown)
    assert found > 10


def test_every_recipe_on_a_page_loads(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    texts = [
        text for page in PAGES for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)
    ]
    assert texts
    for text in texts:
        path.write_text(text)
        load_recipe(str(path))
        load_shape(str(path))
