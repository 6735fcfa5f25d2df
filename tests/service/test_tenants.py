"""Whose a request is: what its token says goes before what it says itself, and KV is shared only
within that."""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.client import Administration, AsyncClient
from jdisagg.dispatch.caller import Caller, KeyLimits, calling, current
from jdisagg.errors import ConfigError, QuotaExceededError, UnauthenticatedError
from jdisagg.request import Request
from jdisagg.scheduler.residency import BlockNames
from jdisagg.service import reread
from jdisagg.service.bearer import identify, token_of
from jdisagg.service.server import read_clients
from tests.service.http_doors import http_door, with_tokens

LINES = ("one tenant=acme", "two tenant=acme", "three tenant=globex", "four", "five five")


def test_a_line_may_say_whose_its_token_is() -> None:
    assert [token_of(line) for line in LINES] == ["one", "two", "three", "four", "five five"]
    assert identify(LINES, "Bearer one") == Caller(tenant="acme")
    assert identify(LINES, "Bearer one tenant=acme") is None
    four, five = identify(LINES, "Bearer four"), identify(lambda: LINES, "Bearer five five")
    assert four and five and four.token != five.token and not four.tenant
    assert identify(LINES, "Bearer acme") is None and identify(LINES, "") is None
    assert identify((), "Bearer whatever") == Caller(), "nobody is asked for a token"


def test_a_line_may_say_how_much_its_token_may_use_in_any_order() -> None:
    lines = (
        "one streams=2 tenant=acme tokens_per_second=1e3",
        "two requests_per_second=.5",
        "pad== x=",
    )
    assert [token_of(line) for line in lines] == ["one", "two", "pad== x="]
    one, two = identify(lines, "Bearer one"), identify(lines, "Bearer two")
    assert one and one.tenant == "acme" and one.limits == KeyLimits(2, None, 1000.0)
    assert two and two.token and two.limits == KeyLimits(requests_per_second=0.5)
    assert one.key != two.key == two.token


WRONG = {
    "secret stream=2": "field 'stream' after a token is unknown; use tenant, streams",
    "secret streams=2 streams=3": "field 'streams' after a token is given twice",
    "secret streams=2.5": "streams must be a whole number above 0, got '2.5'",
    "secret streams=0": "streams must be a whole number above 0",
    "secret tokens_per_second=inf": "tokens_per_second must be a number above 0",
    "secret requests_per_second=-1 tenant=a": "requests_per_second must be a number above 0",
}


def test_what_is_wrong_in_a_token_file_is_named_without_the_token(tmp_path: Path) -> None:
    for line, message in WRONG.items():
        file = tmp_path / "tokens"
        file.write_text(f"first\n{line}\n")
        with pytest.raises(ConfigError) as caught:
            read_clients(str(file))
        assert f"token file {str(file)!r}, token 2:" in str(caught.value)
        assert message in str(caught.value) and "secret" not in str(caught.value)


names = st.text(max_size=3)
callers = st.sampled_from(
    [identify(LINES, f"Bearer {token_of(line)}") or Caller() for line in LINES]
)


@given(callers, names, names, callers, names, names)
def test_what_a_message_says_narrows_a_scope_and_never_widens_it(
    one: Caller, said: str, salt: str, other: Caller, other_said: str, other_salt: str
) -> None:
    ours = one.tenant_of(said), one.cache_scope(said, salt)
    theirs = other.tenant_of(other_said), other.cache_scope(other_said, other_salt)
    if ours == theirs:
        assert salt == other_salt
        assert one == other, "two tenants, or a token of its own and another, never share"
        assert one.tenant_of(said) == other.tenant_of(other_said)


def test_outside_of_a_door_nobody_in_particular_calls() -> None:
    assert current() == Caller()
    with calling(Caller("acme")):
        assert current().tenant == "acme"
    assert current().cache_scope("", "") == ""


async def test_who_belongs_to_a_tenant_empties_no_cache_and_suspends_its_own_requests_alone(
    tmp_path: Path,
) -> None:
    async with http_door(service=with_tokens(tmp_path, *LINES)) as door:
        one, four = (Administration(door.url, token=token) for token in ("one", "four"))
        with pytest.raises(UnauthenticatedError, match="'acme'"):
            await asyncio.to_thread(one.reset_cache)
        assert await asyncio.to_thread(four.reset_cache) == 7
        async with AsyncClient(door.target, token="one") as client:
            await client.suspend("r", tenant="globex")
            await client.resume("r", tenant="globex")
    assert [(tenant, name) for tenant, name, _ in door.path.suspended] == [("acme", "r")] * 2


async def test_blocks_of_two_tenants_have_no_name_in_common_whatever_they_send(
    tmp_path: Path,
) -> None:
    """Through both public doors: one prompt, sent by everybody with all that a message may say."""
    owner = {"one": "acme", "two": "acme", "three": "globex", "four": "four", "five five": "five"}
    said = ["", "acme", "globex", "four", '["", "acme", ""]', "\x00"]
    rng = random.Random(4)
    wanted = [
        (token, tenant, salt) for token in owner for tenant in said for salt in rng.sample(said, 2)
    ]
    prompt = list(range(1, 40))
    async with http_door(service=with_tokens(tmp_path, *LINES)) as door:
        for token in owner:
            async with AsyncClient(door.target, token=token) as client:
                for _, tenant, salt in [one for one in wanted if one[0] == token]:
                    options = {"tenant": tenant, "cache_salt": salt}
                    await client.complete(token_ids=prompt, max_tokens=1, **options)
                    fields = {"prompt": prompt, "max_tokens": 1, **options}
                    answer = await door.ask(
                        "/v1/completions", fields, authorization=f"Bearer {token}"
                    )
                    assert answer.status == 200
        asked = door.path.requests
    assert len(asked) == 2 * len(wanted)
    names = BlockNames(b"secret", "model", 16)

    def blocks(request: Request) -> frozenset[bytes]:
        return frozenset(names.chain(request, request.prompt_token_ids, 16))

    shared = 0
    for index, request in enumerate(asked):
        for other_index, other in enumerate(asked[:index]):
            one, two = wanted[index // 2], wanted[other_index // 2]
            common = blocks(request) & blocks(other)
            if owner[one[0]] != owner[two[0]] or one[2] != two[2]:
                assert not common, (one, two)
            shared += bool(common)
    assert shared > len(wanted), "the two doors agree, and tokens of one tenant share"


async def test_a_token_that_used_up_its_streams_is_refused_at_both_doors_until_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reread, "LOOK_SECONDS", 0.0)
    asked = {"prompt": "x", "max_tokens": 3}
    service = with_tokens(tmp_path, "one tenant=acme streams=1", "two tenant=acme")
    async with http_door(service=service) as door:
        door.path.gate.clear()
        async with (
            AsyncClient(door.target, token="one") as client,
            AsyncClient(door.target, token="two") as other,
        ):
            stream = client.generate("x", max_tokens=3)
            await anext(stream)
            refused = await door.ask("/v1/completions", asked, authorization="Bearer one")
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert "has 1 running streams" in refused.error["message"]
            with pytest.raises(QuotaExceededError, match="has 1 running streams and may") as caught:
                await client.complete("x", max_tokens=3)
            assert caught.value.retry_after_seconds == 1.0
            assert len(door.path.requests) == 1, "neither reached the path"
            with_tokens(tmp_path, "one tenant=acme streams=2", "two tenant=acme")
            second = client.generate("x", max_tokens=3)
            await anext(second)
            door.path.gate.set()
            for running in (second, stream):
                assert sum([len(event.token_ids) async for event in running]) == 2
            await other.complete("x", max_tokens=3)
        again = await door.ask("/v1/completions", asked, authorization="Bearer one")
        assert again.status == 200
