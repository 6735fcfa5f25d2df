"""A trace replayed against a real server: what is sent is what the trace says, and what is reported
is what the server did."""

import asyncio
import csv
import json
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from jdisagg.errors import ConfigError, WorkloadError
from jdisagg.messages.step_commands import PrefillChunk, StepResult
from jdisagg.node.commands.trace_sender import PromptMaker, ReplayProgress, TraceSender
from jdisagg.simulator.workloads import Arrival, Fixed, poisson
from tests.end_to_end.clusters import config
from tests.end_to_end.doors import Served, served
from tests.launch.script_ends import not_refused
from tests.service.doors import eventually
from tests.simulator.traces import write_trace

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 256


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door():
    async with served(config(context=CONTEXT, slots=4)) as door:
        yield door


def maker(door: Served, **changed: int) -> PromptMaker:
    return PromptMaker(
        door.run.cluster.model.vocabulary, CONTEXT, **{"block_tokens": 16, **changed}
    )  # type: ignore[arg-type]


def prefilled(door: Served) -> dict[int, int]:
    """Prompt tokens that the prefill mesh was given, by sequence."""
    tokens: dict[int, int] = {}
    for command in door.run.recording.prefill:
        if isinstance(command, PrefillChunk):
            for row in command.rows:
                tokens[row.sequence] = max(tokens.get(row.sequence, 0), row.start + len(row.tokens))
    return tokens


def test_equal_hashes_become_equal_tokens_and_all_others_differ():
    make = PromptMaker(1000, 4096, block_tokens=512)
    one = make.prompt(0, Arrival(0, 1200, 5, (7, 8, 9))).token_ids
    two = make.prompt(1, Arrival(0, 1300, 5, (7, 8, 10))).token_ids
    assert (len(one), len(two)) == (1200, 1300)
    assert one[:1024] == two[:1024] and one[1024:] != two[1024:1200]
    bare = [make.prompt(number, Arrival(0, 600, 5)).token_ids for number in (0, 1)]
    assert bare[0] != bare[1] and bare[0] == make.prompt(0, Arrival(3, 600, 5)).token_ids
    other = PromptMaker(1000, 4096, block_tokens=512, seed=1)
    assert one[:512] != other.prompt(0, Arrival(0, 1200, 5, (7, 8, 9))).token_ids[:512]
    assert all(0 <= token < 1000 for token in (*one, *two, *bare[0]))


def test_what_the_context_does_not_hold_is_cut_and_said():
    make = PromptMaker(1000, 100, block_tokens=16)
    assert not make.prompt(0, Arrival(0, 60, 40)).cut
    for prompt, output, lengths in (
        (60, 41, (59, 41)),
        (500, 10, (90, 10)),
        (500, 500, (50, 50)),
        (10, 500, (10, 90)),
    ):
        made = make.prompt(0, Arrival(0, prompt, output))
        assert (len(made.token_ids), made.output_tokens) == lengths and made.cut
    short = PromptMaker(1000, 100, block_tokens=16, max_prompt_tokens=20, max_output_tokens=5)
    made = short.prompt(0, Arrival(0, 60, 40))
    assert (len(made.token_ids), made.output_tokens, made.cut) == (20, 5, True)
    with pytest.raises(ConfigError, match="max_output_tokens must be at least 1, got 0"):
        PromptMaker(1000, 100, block_tokens=16, max_output_tokens=0)
    with pytest.raises(ConfigError, match="context of 1 tokens"):
        PromptMaker(1000, 1, block_tokens=16)


@pytest.mark.ci
@pytest.mark.asyncio(loop_scope="module")
async def test_every_arrival_is_served_with_its_lengths_and_its_times_are_in_order(door: Served):
    arrivals = [
        Arrival(0.05 * index, 20 + index, 1 + index % 7, tenant="ab"[index % 2])
        for index in range(12)
    ]
    seen: list[ReplayProgress] = []
    before = set(prefilled(door))
    outcomes = await TraceSender(door.client, maker(door), name="lengths").run(
        arrivals, seen.append
    )
    served = [(item.prompt_tokens, item.output_tokens, item.tenant) for item in outcomes]
    assert served == [(item.prompt_tokens, item.output_tokens, item.tenant) for item in arrivals]
    assert {item.end for item in outcomes} == {"finished"}
    # A set: while programs are compiled a hand-off may run out of time, and its prompt is then
    # computed again.
    assert {length for key, length in prefilled(door).items() if key not in before} == {
        item.prompt_tokens for item in arrivals
    }
    for arrival, outcome in zip(arrivals, outcomes, strict=True):
        assert outcome.arrival == pytest.approx(arrival.at_seconds)
        assert outcome.first_token is not None
        assert outcome.arrival < outcome.first_token <= outcome.finish
        assert (outcome.gaps.count if outcome.gaps else 0) == arrival.output_tokens - 1
    assert (seen[-1].sent, seen[-1].ended, seen[-1].failed, seen[-1].cut) == (12, 12, 0, 0)
    assert seen[-1].tokens == sum(item.output_tokens for item in arrivals)
    await door.quiet()


@pytest.mark.ci
@pytest.mark.asyncio(loop_scope="module")
async def test_twice_the_speed_halves_the_times_at_which_requests_are_due(door: Served):
    outcomes = await TraceSender(door.client, maker(door), speed=2.0, name="fast").run(
        [Arrival(3.0, 5, 2), Arrival(3.5, 5, 2)]
    )
    assert [item.arrival for item in outcomes] == pytest.approx([0.0, 0.25])
    assert outcomes[1].first_token is not None and outcomes[1].first_token > 0.25
    await door.quiet()


@pytest.mark.ci
@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_cannot_make_its_deadline_is_an_outcome_and_not_an_end_of_the_replay(
    door: Served, monkeypatch: pytest.MonkeyPatch
):
    assert door.run.cluster.prefill is not None
    executor, opened = door.run.cluster.prefill.executor, asyncio.Event()
    run = executor.run

    async def later(result: "asyncio.Future[StepResult]") -> StepResult:
        await opened.wait()
        return await result

    monkeypatch.setattr(executor, "run", lambda command: asyncio.ensure_future(later(run(command))))
    seen: list[ReplayProgress] = []
    replay = asyncio.create_task(
        TraceSender(door.client, maker(door), name="late").run(
            [Arrival(0, 9, 3, deadline=0.3), Arrival(0, 9, 3)], seen.append
        )
    )
    await eventually(lambda: seen and seen[-1].ended == 1)
    opened.set()
    late, fine = await replay
    end = (late.end, late.output_tokens, late.first_token, late.gaps)
    assert end == ("deadline", 0, None, None) and late.reason
    assert (fine.end, fine.output_tokens) == ("finished", 3)
    await door.quiet()


@pytest.mark.ci
@pytest.mark.asyncio(loop_scope="module")
async def test_the_command_reports_writes_and_ends_well(door: Served, tmp_path: Path):
    names = ("trace.csv", "requests.csv", "figures.json")
    trace, table, figures = (tmp_path / name for name in names)
    write_trace(poisson(4.0, 8, Fixed(400, 6), seed=1), trace)
    status, out, err = await command(
        f"--target={door.target}",
        f"--trace={trace}",
        "--rate=20",
        "--max_prompt_tokens=40",
        "--ttft=60",
        "--tpot=60",
        f"--requests_table={table}",
        f"--json={figures}",
    )
    assert status == 0, err
    assert "8 requests (8 finished)" in out and "SLO attainment 100.0 %" in out
    assert "8 of 8 requests were cut" in err
    rows = list(csv.DictReader(table.read_text().splitlines()))
    columns = ("prompt_tokens", "output_tokens", "attained")
    assert [tuple(row[name] for name in columns) for row in rows] == [("40", "6", "1")] * 8
    told = json.loads(figures.read_text())
    assert told["ends"] == {"finished": 8} and told["tbt"]["count"] == 40
    assert told["arrivals_per_second"] == pytest.approx(20)
    await door.quiet()


@pytest.mark.ci
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_input_is_one_line_that_names_it(door: Served, tmp_path: Path):
    empty, columns = tmp_path / "empty.csv", tmp_path / "columns.csv"
    empty.write_text("at_seconds,prompt_tokens,output_tokens\n")
    columns.write_text("at_seconds,prompt_tokens\n0,3\n")
    good = tmp_path / "good.csv"
    write_trace([Arrival(0, 5, 2), Arrival(1, 5, 2)], good)
    cases = (
        ((f"--trace={empty}",), "holds no requests"),
        ((f"--trace={columns}",), "no column for output_tokens"),
        ((f"--trace={good}", "--speed=2", "--rate=2"), "give one of them"),
        ((f"--trace={good}", "--speed=0"), "--speed must be positive, got 0"),
        ((f"--trace={good}", f"--json={tmp_path}/no/such.json"), "in a folder that exists"),
    )
    given = [((f"--target={door.target}", *flags), said) for flags, said in cases]
    assert await asyncio.to_thread(not_refused, "replay_trace", given) == []
    with pytest.raises(WorkloadError, match="no requests to send"):
        await TraceSender(door.client, maker(door)).run([])


async def command(*given: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "launch.replay_trace",
        *given,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()
