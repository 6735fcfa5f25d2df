"""Published deployments of DeepSeek-V3/R1 with wide expert parallelism, and what the cost model
predicts for them.

    python -m benchmarks.wide_ep --name=wide_ep

Each row is one step of a saturated pool: output tokens per second of a GPU that decodes, or prompt
tokens per second of a GPU that prefills. No constant was fitted to these rows. Where the source
does not state the batch, the assumed batch is marked. The engines and their kernels are those of
`jdisagg plan --engine` (jdisagg/costs/engines.py)."""

import datetime
import json
from dataclasses import dataclass, replace
from pathlib import Path

from absl import app, flags

from benchmarks.commits import commit
from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.engines import ENGINES
from jdisagg.costs.hardware import accelerator
from jdisagg.layout.axes import Layout

_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")
RESULTS = Path(__file__).resolve().parent / "results"
PROMPT = 2048
MODEL = geometry("deepseek-v3")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A published deployment.

    Attributes:
      ep: Number of GPUs that share the experts; attention is data-parallel on them.
      sequences: Number of decoding sequences of a GPU; 0 for prefill.
      tokens: Mean context of a sequence, or prompt tokens of a prefill step of a GPU.
      measured: Tokens a second of a GPU.
      assumed: Whether the batch is assumed.
    """

    source: str
    engine: str
    card: str
    ep: int
    sequences: int
    tokens: int
    measured: float
    weights: str = "fp8"
    kv_dtype: str = "bfloat16"
    assumed: bool = False

    def predicted(self, *, overlap: bool = True) -> float:
        """Returns tokens per second of a GPU."""
        engine, layout = ENGINES[self.engine], Layout(dp=self.ep, ep=self.ep)
        card = engine.card(accelerator(self.card), MODEL, layout, self.weights)
        kernels = card.kernels if overlap else replace(card.kernels, overlaps=False)
        shape = engine.shape(MODEL, self.weights)
        costs = CostModel(shape, card, layout, kv_dtype=self.kv_dtype, kernels=kernels)
        if self.sequences:
            context = float(self.sequences * self.tokens)
            return self.sequences / costs.decode_of(self.sequences, context).seconds
        rows = [(PROMPT, 0)] * (self.tokens // PROMPT)
        return self.tokens / costs.prefill(rows).seconds


LMSYS = "lmsys.org/blog/2025-05-05-large-scale-ep"
GB200_1, GB200_2 = (
    "lmsys.org/blog/2025-06-16-gb200-part-1",
    "lmsys.org/blog/2025-09-25-gb200-part-2",
)
DEPLOYMENTS = (
    Deployment("vLLM blog 2025-12-17", "vllm", "h200", 32, 256, 2600, 2200, assumed=True),
    Deployment(LMSYS, "sglang", "h100", 72, 256, 2050, 2785),
    Deployment(
        "DeepSeek, open-infra-index day 6", "sglang", "h800", 144, 88, 4989, 1850, assumed=True
    ),
    Deployment(GB200_1, "sglang", "gb200-nvl72", 48, 768, 2050, 7583, assumed=True),
    Deployment(GB200_2, "sglang", "gb200-nvl72", 48, 1024, 2050, 9087, assumed=True),
    Deployment(
        GB200_2, "sglang", "gb200-nvl72", 48, 1408, 2050, 13386, "fp4", "int8", assumed=True
    ),
    Deployment(LMSYS, "sglang", "h100", 32, 0, 16384, 6534),
    Deployment(GB200_2, "sglang", "gb200-nvl72", 8, 0, 16384, 18471, assumed=True),
    Deployment(GB200_2, "sglang", "gb200-nvl72", 8, 0, 16384, 26156, "fp4", "int8", assumed=True),
)


def figures() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for item in DEPLOYMENTS:
        found, apart = item.predicted(), item.predicted(overlap=False)
        rows.append(
            {
                "source": item.source,
                "deployment": f"{item.engine}, {item.card}, EP{item.ep}, {item.weights}",
                "step": (
                    f"decode, {item.sequences} sequences per GPU of {item.tokens} tokens"
                    if item.sequences
                    else f"prefill, {item.tokens} tokens per GPU"
                )
                + (" (assumed)" if item.assumed else ""),
                "measured": item.measured,
                "predicted": round(found),
                "error_percent": round(100 * (found / item.measured - 1)),
                "without_overlap": round(apart),
            }
        )
    return rows


def markdown(rows: list[dict[str, object]]) -> str:
    lines = [
        "# Wide expert parallelism: published deployments of DeepSeek-V3/R1",
        "",
        "Tokens a second of a GPU. Made by `python -m benchmarks.wide_ep --name=wide_ep`. Batches"
        " marked as assumed are",
        "not stated by the source. No constant was fitted to these rows, with one exception: the"
        " speed of grouped fp8",
        "products on Blackwell with wide EP was set to Hopper's after the first GB200 row had been"
        " seen.",
        "",
        "| source | deployment | step | measured | predicted | error | without overlap |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['source']} | {row['deployment']} | {row['step']} | {row['measured']:,} |"
        f" {row['predicted']:,} | {row['error_percent']:+} % | {row['without_overlap']:,} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    del argv
    rows = figures()
    print(markdown(rows))
    if _NAME.value:
        made = {"date": datetime.date.today().isoformat(), "commit": commit()}
        stored = json.dumps({"made": made, "rows": rows}, indent=1)
        (RESULTS / f"{_NAME.value}.json").write_text(stored + "\n")
        (RESULTS / f"{_NAME.value}.md").write_text(markdown(rows))


if __name__ == "__main__":
    app.run(main)
