"""What one turn decides, and in which order: no worker, no clock, no executor."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

from jdisagg.config import InstanceConfig
from jdisagg.messages.step_commands import DecodeResult, DecodeSteps, PrefillChunk, SampledToken
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.handoff import HandoffEvent
from jdisagg.scheduler.sequences import Prompt, SequenceGroup
from jdisagg.scheduler.turn import CHUNKS_OFFERED, Facts, Scheduler, Turn
from jdisagg.telemetry import Counters
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import toy_limits
from tests.scheduler.bench import waiting

NONE: Mapping[str, int] = {}


class Mesh:
    """The scheduler of a mesh, and what its worker would tell it."""

    def __init__(self, limits: MeshLimits, role: WorkerRole = WorkerRole.DECODE) -> None:
        self.state = DecodeState(limits)
        self.scheduler = Scheduler(
            self.state,
            InstanceConfig(growth_tokens=4),
            role,
            spans=False,
            ids=itertools.count(1).__next__,
            clock=lambda: 0.0,
            counters=Counters(),
        )
        self.decodes, self.step = role.decodes, 0

    def asks(self, number: int, tokens: int = 8, priority: int = 0, to: str = "") -> Prompt:
        request = replace(toy_request(number, tokens, max_tokens=20), priority=priority)
        prompt = replace(waiting(self.state, request, number), destination=to)
        prompt.decodes, prompt.computes = self.decodes, bool(to)
        self.scheduler.admission.enqueue(self.scheduler.prompts.begin(prompt))
        return prompt

    def turn(self, busy: bool = False, offered: Mapping[str, int] = NONE) -> Turn:
        self.step += 1
        return self.scheduler.turn(Facts(None if busy else self.step, 9.0, offered_tokens=offered))

    def steps(self) -> tuple[Turn, DecodeSteps]:
        """A turn that issues decode steps, which bring a token to each sequence."""
        turn = self.turn()
        assert isinstance(turn.command, DecodeSteps)
        tokens = tuple([(7,) for _ in turn.command.slots[0]])
        self.scheduler.batches.apply(DecodeResult(turn.command.step, (tokens,)))
        return turn, turn.command

    def arrives(self, group: SequenceGroup) -> None:
        """All KV of the group, with its first token."""
        self.state.advance(group, HandoffEvent.GENERATE, 9.0)
        self.scheduler.batches.ready(group, (SampledToken(group.key, 0, 1),), 0, 9.0)


def test_pages_are_granted_also_while_enough_commands_are_in_flight() -> None:
    mesh = Mesh(toy_limits())
    prompt = mesh.asks(1)
    turn = mesh.turn(busy=True)
    assert turn.prompts == [prompt] and [one.key for one in turn.groups] == [prompt.key]
    assert turn.command is None and not turn.reason
    mesh.arrives(turn.groups[0])
    assert mesh.turn(busy=True).command is None
    assert isinstance(mesh.turn().command, DecodeSteps)


def test_what_frees_pages_is_known_before_they_are_granted() -> None:
    mesh = Mesh(toy_limits(pages_per_rank=6))
    mesh.asks(1, tokens=16)
    (first,) = mesh.turn().groups
    mesh.asks(2, tokens=16)
    assert not mesh.turn().groups
    mesh.state.end_group(first)
    turn = mesh.turn()
    assert [one.request.request_id for one in turn.groups] == ["r2"]
    assert [(one.group_key, one.preempted) for one in turn.news] == [(first.key, False)]


def test_a_higher_priority_gets_pages_and_a_slot_in_the_turn_in_which_others_give_way() -> None:
    mesh = Mesh(toy_limits(pages_per_rank=6, slots_per_rank=1))
    mesh.asks(1, tokens=16)
    (low,) = mesh.turn().groups
    mesh.arrives(low)
    mesh.turn()
    high = mesh.asks(2, tokens=16, priority=1)
    turn = mesh.turn()
    assert turn.yielded == 1 and turn.prompts == [high]
    assert [(one.group_key, one.yielded) for one in turn.news] == [(low.key, True)]
    mesh.arrives(turn.groups[0])
    command = mesh.turn().command
    assert isinstance(command, DecodeSteps) and command.admits[0].slot == 0


def test_a_prompt_that_gives_way_before_its_first_chunk_is_not_computed_in_the_same_turn() -> None:
    """Its pages are those of the other one by now."""
    mesh = Mesh(toy_limits(pages_per_rank=6), WorkerRole.MIXED)
    mesh.asks(1, tokens=16)
    (low,) = mesh.turn(busy=True).groups
    mesh.state.advance(low, HandoffEvent.GENERATE, 9.0)
    samples = tuple([child.sample_spec() for child in low.alive])
    mesh.scheduler.prompts.add(low.key, low.rank, samples, 0, low.epoch)
    high = mesh.asks(2, tokens=4, priority=1)
    turn = mesh.turn()
    assert turn.yielded == 1 and turn.prompts == [high]
    assert turn.command is None and not mesh.scheduler.prompts


def test_a_sequence_that_loses_its_pages_to_a_running_one_is_reported_in_the_same_turn() -> None:
    mesh = Mesh(toy_limits(pages_per_rank=8))
    mesh.asks(1, tokens=8)
    (old,) = mesh.turn().groups
    mesh.arrives(old)
    mesh.asks(2, tokens=8)
    (young,) = mesh.turn().groups
    mesh.arrives(young)
    turn, steps = mesh.steps()
    while young.key in mesh.state.groups:
        turn, steps = mesh.steps()
    assert [one.group_key for one in turn.news if one.preempted] == [young.key]
    assert [len(rank) for rank in steps.slots] == [1], "the other one goes on at once"


def test_a_mesh_that_sends_computes_for_those_who_fetch() -> None:
    limits = toy_limits()
    mesh, most = Mesh(limits, WorkerRole.PREFILL), CHUNKS_OFFERED * 16 * limits.layer_groups
    slow, quick = mesh.asks(1, to="slow"), mesh.asks(2, to="quick")
    turn = mesh.turn(offered={"slow": most})
    assert turn.prompts == [quick] and turn.held_back
    assert isinstance(turn.command, PrefillChunk)
    assert [row.sequence for row in turn.command.rows] == [quick.key]
    turn = mesh.turn(offered={"slow": most - 1})
    assert turn.prompts == [slow] and not turn.held_back
    assert isinstance(turn.command, PrefillChunk)


def test_nothing_is_computed_while_all_destinations_together_fetch_too_slowly() -> None:
    limits = toy_limits()
    mesh, most = Mesh(limits, WorkerRole.PREFILL), CHUNKS_OFFERED * 16 * limits.layer_groups
    mesh.asks(1, to="d0")
    offered = {f"d{number}": most - 1 for number in range(1, 6)}
    turn = mesh.turn(offered=offered)
    assert turn.prompts and turn.command is None and turn.held_back
    assert isinstance(mesh.turn().command, PrefillChunk)


def test_a_turn_in_which_nothing_has_happened_changes_nothing() -> None:
    for role in WorkerRole:
        mesh = Mesh(toy_limits(), role)
        turn = mesh.turn()
        assert (turn.prompts, turn.groups, turn.news, turn.copies, turn.cut) == ([],) * 5
        assert turn.command is None and not turn.yielded and not turn.interrupt
        assert mesh.state.ledgers[0].free_pages == mesh.state.ledgers[0].total_pages
