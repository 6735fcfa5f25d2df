"""When do two pools win? The planner's verdict, one pool or two, over prompt length and the link
between prefill and decode, for a dense model and a mixture of experts.

    python -m benchmarks.sensitivity    # results/sensitivity.json, half a minute

Each cell has the best candidate of both modes by stepping, within 4 %. Loads no model."""

import json
from dataclasses import dataclass, replace
from typing import Literal

from absl import app

from benchmarks.measure import machine, save
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator, link
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Planner, Search
from jdisagg.simulator.workloads import Fixed, poisson

NAME = "sensitivity"  # of the results
LINKS = ("infiniband-ndr", "ethernet-10g")
PROMPTS = (1000, 8000)
OUTPUT = 250
REQUESTS = 400


@dataclass(frozen=True)
class Case:
    model: str
    hardware: str
    accelerators: int
    ttft: float
    tpot: float

    @property
    def name(self) -> str:
        return f"{self.model} on {self.accelerators} {self.hardware}"


@dataclass(frozen=True)
class Cell:
    """Best rates of both modes, in requests per second of the whole site."""

    one: float
    two: float
    one_name: str
    two_name: str

    @property
    def verdict(self) -> Literal["one", "two"]:
        return "two" if self.two > self.one else "one"


CASES = (Case("llama-3-70b", "h100", 16, 2.0, 0.05), Case("gpt-oss-120b", "h100", 16, 2.0, 0.05))


def cell_of(case: Case, prompt: int, between: str) -> Cell:
    site = Site(accelerator(case.hardware), case.accelerators)
    site = replace(site, between=link(between))
    model = geometry(case.model)
    maker = FleetMaker(model, site)
    goal = Goal(case.ttft, case.tpot)
    planner = Planner(model, site, goal, maker.runners, Search(most_requests=REQUESTS))
    found = planner.stepped(poisson(1.0, REQUESTS, Fixed(prompt, OUTPUT), 0))
    one, two = (
        next((item for item in found if (item.candidate.prefill is None) is alone), None)
        for alone in (True, False)
    )
    assert one is not None and two is not None, "both modes fit"
    return Cell(one.rate, two.rate, one.candidate.name, two.candidate.name)


def main(_: list[str]) -> None:
    found: dict[str, object] = {"machine": machine()}
    for case in CASES:
        cells = {}
        for prompt in PROMPTS:
            for between in LINKS:
                cell = cell_of(case, prompt, between)
                cells[f"{prompt}/{OUTPUT} over {between}"] = {
                    "verdict": cell.verdict,
                    "two_over_one": round(cell.two / cell.one, 3),
                    "one": [cell.one_name, round(cell.one, 3)],
                    "two": [cell.two_name, round(cell.two, 3)],
                }
                print(case.name, prompt, between, json.dumps(list(cells.values())[-1]), flush=True)
        found[case.name] = {"ttft": case.ttft, "tpot": case.tpot, "cells": cells}
    save(NAME, found)


if __name__ == "__main__":
    app.run(main)
