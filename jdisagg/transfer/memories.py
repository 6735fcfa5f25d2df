"""What of a process's memory others may take KV from past the transfer engine, and by which it
takes theirs."""

from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.model_api import Device
from jdisagg.transfer.device_memory import LentMemory, lent_memory
from jdisagg.transfer.nixl_memory import NixlMemory, nixl_memory
from jdisagg.transfer.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class Memories:
    """None: it has none of that kind. `no_device`: why it lends no memory of its devices, where one
    could expect it to."""

    shared: SharedMemory | None = None
    nixl: NixlMemory | None = None
    device: LentMemory | None = None
    no_device: str = ""

    @staticmethod
    def of_worker(channel: str, host: str, devices: Sequence[Device]) -> "Memories":
        """What a worker on `host` has for `ServiceConfig.kv_channel`. Raises ConfigError where NIXL
        is asked for by name and cannot be used."""
        nixl = nixl_memory(channel, host)
        return Memories(SharedMemory.of_host(), nixl, *lent_memory(channel, devices))

    def end(self, control: str, boot_id: int) -> KvEnd:
        """This process's, which says what it has."""
        shared = self.shared.name if self.shared else ""
        lends = self.device.host if self.device else ""
        return KvEnd(control, boot_id, shared, self.nixl is not None, lends)
