"""How well does the cost model predict measured steps: of the model to which it was fitted, and of
another model?

    python -m benchmarks.cost_model --name=cost_model

The measurements were published by others (data/README.md): Llama2-70B with tensor parallelism 2, 4
and 8, and BLOOM-176B with 8, on A100, H100 and H100 with capped power. Eight constants per machine
are fitted to one model, over all layouts and both phases at once, and the other model is predicted
with them. "rows": every measurement. "settings": each setting once (its median), because one prompt
of 512 tokens is 45 of 105 rows of the file. No measurement is omitted, not even Llama2-70B at TP 2
with 64 prompts of 512 tokens, which ran out of memory."""

import dataclasses

from absl import app, flags

from benchmarks.measure import save
from benchmarks.measured_steps import MACHINES, MODELS, Steps, eager_accelerator, measured_steps
from jdisagg.costs.fitting import WHOLE_STEP_CONSTANTS, Errors, Observation, fit, relative_errors
from jdisagg.costs.hardware import Accelerator

_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")


def percent(accelerator: Accelerator, seen: tuple[Observation, ...]) -> dict[str, float]:
    errors = Errors.of(relative_errors(accelerator, seen))
    return {
        "median_percent": round(100 * errors.median, 2),
        "p90_percent": round(100 * errors.p90, 2),
        "count": errors.count,
    }


def errors_of(accelerator: Accelerator, steps: Steps) -> dict[str, object]:
    found: dict[str, object] = {}
    for phase, rows, settings in (
        ("prefill", steps.prefill, steps.cells.prefill),
        ("decode", steps.decode, steps.cells.decode),
    ):
        degrees = sorted({seen.layout.tp for seen in rows})
        by_degree = {
            f"tp{tp}": percent(accelerator, tuple(seen for seen in rows if seen.layout.tp == tp))
            for tp in degrees
        }
        found[phase] = {
            "rows": percent(accelerator, rows),
            "settings": percent(accelerator, settings),
            **by_degree,
        }
    return found


def main(argv: list[str]) -> None:
    del argv
    steps = measured_steps()
    figures: dict[str, object] = {}
    first, second = MODELS.values()
    for machine in MACHINES:
        for fitted_to, other in ((first, second), (second, first)):
            accelerator = fit(eager_accelerator(machine), steps[fitted_to, machine].cells.all)
            constants = dataclasses.asdict(accelerator.efficiency)
            result = {
                "constants": {
                    name: float(f"{constants[name]:.4g}") for name in WHOLE_STEP_CONSTANTS
                },
                "in_sample": errors_of(accelerator, steps[fitted_to, machine]),
                "held_out": errors_of(accelerator, steps[other, machine]),
            }
            figures[f"{machine}, fitted to {fitted_to}"] = result
            for kind, model in (("in_sample", fitted_to), ("held_out", other)):
                for phase in ("prefill", "decode"):
                    rows, settings = (result[kind][phase][part] for part in ("rows", "settings"))
                    print(
                        f"{machine:15} fitted to {fitted_to:12} {kind:9} {model:12} {phase:7} rows"
                        f" {rows['median_percent']:5.1f} (p90 {rows['p90_percent']:5.1f}) %,"
                        f" settings {settings['median_percent']:5.1f} (p90"
                        f" {settings['p90_percent']:5.1f}) %"
                    )
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
