"""Workers that fetch what others keep."""

from collections.abc import Callable
from dataclasses import replace

from jdisagg.request import Request
from jdisagg.router.decision import PromptBlocks
from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.cluster import Fleet
from tests.fakes.fake_executor import Faults
from tests.worker.conversations import NAMES, limits
from tests.worker.tiers import FAST, other

ALWAYS = TierRoom(always=True)
PROMPT = other(1)  # 80 tokens: four blocks may be known, one more token at least is computed


def fleet(**more: object) -> Fleet:
    options: dict[str, object] = {
        "decode": limits(pages=400),
        "prefill": limits(),
        "names": NAMES,
        "costs": FAST,
        "tiers": ALWAYS,
        "hints": True,
        "decodes": 1,
    }
    return Fleet(**(options | more))  # type: ignore[arg-type]


def faults_of(name: str, faults: Faults) -> Callable[[str], Faults]:
    return lambda other: faults if other == name else Faults()


async def at(fleet: Fleet, name: str, request: Request = PROMPT) -> int:
    """Sends a prompt to this prefill worker; returns how many of its tokens were computed."""
    fleet.decode_worker("decode0")._state.residency.clear()
    again = replace(request, request_id=str(fleet.new_id()))
    collected = await fleet.ask(again, fleet.new_path(name))
    return len(request.prompt_token_ids) - collected.cached_tokens


def counted(fleet: Fleet, name: str) -> Callable[[str], int]:
    return lambda counter: fleet.processes[name].worker.counters[counter]


def failed(fleet: Fleet, name: str) -> dict[str, int]:
    """Fetches that brought less than was wanted, by cause."""
    labelled = fleet.prefill_worker(name).counters.labelled()
    return {
        dict(labels)["cause"]: count
        for (counter, labels), count in labelled.items()
        if counter == "peer_fetch_failed" and labels
    }


async def settled(fleet: Fleet) -> None:
    """Once leases are over nothing is on its way, and every page is free."""
    await fleet.check_quiet(settle_seconds=30.0)
    for process in fleet.processes.values():
        if not fleet.local.is_dead(process.worker):
            assert process.worker._sources.quiet and not len(process.worker._given)


class EveryoneKnown:
    """A router's index that is always right about all workers."""

    fleet: Fleet

    def prompt_blocks(self, request: Request) -> PromptBlocks:
        return PromptBlocks()

    def known(self, request: Request) -> Callable[[], dict[str, int]]:
        def now() -> dict[str, int]:
            found = {}
            for name, process in self.fleet.processes.items():
                kept = process.worker._kept
                chain = kept.chain(request, request.prompt_token_ids)
                found[name] = kept.match(0, chain) * kept.block_tokens
            return {name: tokens for name, tokens in found.items() if tokens}

        return now
