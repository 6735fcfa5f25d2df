"""LoRA adapters of a server: loaded, listed, selected and unloaded."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from jdisagg.client import Administration, AsyncClient
from jdisagg.dispatch import caller
from jdisagg.dispatch.served_adapters import ServedAdapters
from jdisagg.errors import InvalidRequestError, UnauthenticatedError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import Adapter
from tests.service.doors import STATUS
from tests.service.http_doors import HttpDoor, http_door, taken

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass
class Folders:
    """Folders of adapters and their digests; the statuses of workers with slots."""

    digests: dict[str, str] = field(default_factory=dict)
    slots: int = 4

    def check(self, path: str) -> str:
        if path not in self.digests:
            raise InvalidRequestError(f"adapter {path!r}: use_dora=True is not supported; train it")
        return self.digests[path]

    async def statuses(self) -> tuple[WorkerStatus, ...]:
        return (msgspec.structs.replace(STATUS, adapter_slots=self.slots),)


@pytest.fixture
async def served() -> AsyncIterator[tuple[HttpDoor, Folders]]:
    async with http_door() as door:
        folders = Folders({"/poems": "d1", "/laws": "d2"})
        door.frontend.adapters = ServedAdapters(folders.check, folders.statuses)
        yield door, folders


async def test_an_adapter_is_listed_with_its_parent_and_selected_by_the_field_model(
    served: tuple[HttpDoor, Folders],
) -> None:
    door, _ = served
    answer = await door.ask(LOAD, {"lora_name": "poems", "lora_path": "/poems"})
    assert answer.status == 200
    async with door.client() as client:
        base, poems = [one async for one in client.models.list()]
        assert (poems.id, poems.model_extra["parent"]) == ("poems", base.id)
        assert poems.model_extra["root"] == "/poems"
        done = await client.completions.create(model="poems", prompt="hi", max_tokens=2)
        assert done.model == "poems"
        await client.completions.create(model=base.id, prompt="hi", max_tokens=2)
    assert [one.adapter for one in door.path.requests] == [Adapter("poems", "/poems", "d1"), None]
    assert (await door.ask(f"/v1/models/{poems.id}")).fields["parent"] == base.id


async def test_new_requests_are_refused_by_name_after_an_unload_and_get_new_content_after_a_reload(
    served: tuple[HttpDoor, Folders],
) -> None:
    door, folders = served
    admin, listed = Administration(door.url), door.frontend.adapters
    async with AsyncClient(door.target) as client:
        await asyncio.to_thread(admin.load_adapter, "mine", "/poems")
        await client.complete("hi", max_tokens=2, model="mine")
        with pytest.raises(InvalidRequestError, match="'mine' is taken"):
            await asyncio.to_thread(admin.load_adapter, "mine", "/laws")
        await asyncio.to_thread(admin.load_adapter, "mine", "/laws", replace=True)
        assert tuple(listed.listed) == (Adapter("mine", "/laws", "d2"),)
        await client.complete("hi", max_tokens=2, model="mine")
        folders.digests["/laws"] = "d3"
        again = {"lora_name": "mine", "lora_path": "/laws", "load_inplace": True}
        await door.served(LOAD, again)
        await client.complete("hi", max_tokens=2, model="mine")
        asked = [one.adapter and one.adapter.digest for one in door.path.requests]
        assert asked == ["d1", "d2", "d3"]
        await door.served(UNLOAD, {"lora_name": "mine"})
        with pytest.raises(InvalidRequestError, match="got 'mine'"):
            await client.complete("hi", max_tokens=2, model="mine")
        with pytest.raises(InvalidRequestError, match="'mine' is not loaded"):
            await asyncio.to_thread(admin.unload_adapter, "mine")
    refused = await door.ask("/v1/completions", {"model": "mine", "prompt": "hi"})
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")


async def test_an_adapter_that_cannot_be_served_is_refused_when_it_is_loaded(
    served: tuple[HttpDoor, Folders],
) -> None:
    poems = {"lora_path": "/poems"}
    rows: list[tuple[str, dict[str, Any], str]] = [
        (LOAD, {"lora_name": "a", "lora_path": "/dora"}, "use_dora"),
        (LOAD, {"lora_name": ""} | poems, "lora_name must have 1 to"),
        (LOAD, {"lora_name": "a"}, "lora_path"),
        (LOAD, {"lora_name": "tiny"} | poems, "'tiny' is taken"),
    ]
    assert not await taken(served[0], rows)


async def test_adapters_need_slots_at_workers_and_a_token_without_a_tenant(
    served: tuple[HttpDoor, Folders],
) -> None:
    door, folders = served
    folders.slots = 0
    answer = await door.ask(LOAD, {"lora_name": "poems", "lora_path": "/poems"})
    assert answer.status == 400 and "--adapters" in answer.error["message"]
    folders.slots = 1
    adapters = door.frontend.adapters
    with caller.calling(caller.Caller(tenant="acme")):
        with pytest.raises(UnauthenticatedError):
            await adapters.load("poems", "/poems", "model")
        with pytest.raises(UnauthenticatedError):
            adapters.unload("poems")


def test_adapters_are_named_at_the_start() -> None:
    adapters = ServedAdapters(Folders({"/poems": "d1", "/laws": "d2"}).check)
    adapters.name_all("poems=/poems, laws=/laws")
    assert [one.name for one in adapters.listed] == ["poems", "laws"]
    with pytest.raises(InvalidRequestError, match="name=path"):
        adapters.name_all("poems")
