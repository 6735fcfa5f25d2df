"""Whose a request is: what its token says goes before what it says itself, and KV is shared only
within that."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.caller import Caller, calling, current
from jdisagg.client import AsyncClient
from jdisagg.config import ServiceConfig
from jdisagg.errors import UnauthenticatedError
from jdisagg.request import Request
from jdisagg.scheduler.residency import BlockNames
from jdisagg.service.bearer import identify, token_of
from tests.service.http_doors import http_door

LINES = ("one tenant=acme", "two tenant=acme", "three tenant=globex", "four", "five five")


def test_a_line_may_say_whose_its_token_is() -> None:
    assert [token_of(line) for line in LINES] == ["one", "two", "three", "four", "five five"]
    assert identify(LINES, "Bearer one") == Caller(tenant="acme")
    assert identify(LINES, "Bearer one tenant=acme") is None
    four, five = identify(LINES, "Bearer four"), identify(lambda: LINES, "Bearer five five")
    assert four and five and four.token != five.token and not four.tenant
    assert identify(LINES, "Bearer acme") is None and identify(LINES, "") is None
    assert identify((), "Bearer whatever") == Caller(), "nobody is asked for a token"


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


async def test_who_belongs_to_a_tenant_may_not_empty_the_cache_of_all(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("\n".join(LINES))
    async with http_door(service=ServiceConfig(token_file=str(file))) as door:
        target = f"127.0.0.1:{door.server._port}"
        async with AsyncClient(target, token="one") as client:
            with pytest.raises(UnauthenticatedError, match="'acme'"):
                await client.reset_cache()
        async with AsyncClient(target, token="four") as client:
            assert await client.reset_cache() == 7


async def test_blocks_of_two_tenants_have_no_name_in_common_whatever_they_send(
    tmp_path: Path,
) -> None:
    """Through both public doors: one prompt, sent by everybody with all that a message may say."""
    file = tmp_path / "tokens"
    file.write_text("\n".join(LINES))
    owner = {"one": "acme", "two": "acme", "three": "globex", "four": "four", "five five": "five"}
    said = ["", "acme", "globex", "four", '["", "acme", ""]', "\x00"]
    rng = random.Random(4)
    wanted = [
        (token, tenant, salt) for token in owner for tenant in said for salt in rng.sample(said, 2)
    ]
    prompt = list(range(1, 40))
    async with http_door(service=ServiceConfig(token_file=str(file))) as door:
        target = f"127.0.0.1:{door.server._port}"
        for token in owner:
            async with AsyncClient(target, token=token) as client:
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
