"""A decode scheduler and its sequences."""

import itertools
from dataclasses import replace

from jdisagg.messages.ports import Child
from jdisagg.messages.step_commands import DecodeResult, DecodeSteps, SampledToken
from jdisagg.request import Grammar, Request
from jdisagg.scheduler.admission import Admission
from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.handoff import HandoffEvent
from jdisagg.scheduler.prompts import Prompts
from jdisagg.scheduler.sequences import Prompt, SequenceGroup
from jdisagg.telemetry import Counters
from tests.fakes.cluster import toy_request

STOP = 99


def waiting(state: DecodeState, request: Request, number: int, children: int = 1) -> Prompt:
    """A request that waits for pages since an instant of this number."""
    made = tuple(Child(index) for index in range(children))
    return Prompt(state.new_key(), request, made, float(number), computes=False)


def prompts_of(state: DecodeState) -> Prompts:
    return Prompts(state, itertools.count(1).__next__, Counters())


def granted(admission: Admission, prompt: Prompt) -> SequenceGroup:
    """The group of a prompt for which there is room."""
    admission.enqueue(prompt)
    (group,) = admission.admit(lease_until=9.0).groups
    return group


class Bench:
    """A state with its two deciders, and short names for what a worker would do."""

    def __init__(self, limits: MeshLimits, growth_tokens: int = 4, steps: int = 1) -> None:
        self.state = DecodeState(limits)
        self.admission = Admission(self.state, prompts_of(self.state), growth_tokens=growth_tokens)
        self.batches = DecodeBatches(self.state, growth_tokens, steps)
        self.step = 0

    def ready(
        self,
        number: int,
        prompt_tokens: int = 4,
        max_tokens: int = 20,
        first: int = 1,
        grammar: Grammar | None = None,
    ) -> SequenceGroup:
        request = replace(
            toy_request(number, prompt_tokens, max_tokens=max_tokens, grammar=grammar),
            stop_ids=(STOP,),
        )
        group = granted(self.admission, waiting(self.state, request, number))
        self.state.advance(group, HandoffEvent.GENERATE, 9.0)
        self.batches.ready(group, (SampledToken(group.key, 0, first),), 0, 9.0)
        return group

    def plan(self, quiet: bool = True) -> DecodeSteps:
        self.step += 1
        plan = self.batches.next_step(self.step, quiet)
        assert plan is not None
        return plan

    def result(self, plan: DecodeSteps, *rows: tuple[int, ...]) -> None:
        self.batches.apply(DecodeResult(plan.step, (rows,)))
