"""The disk of fake meshes: a dictionary that outlives them, with faults."""

from dataclasses import dataclass, field

from jdisagg.messages.step_commands import (
    DiskCommand,
    DiskResult,
    FindSaved,
    LoadBlock,
    RemoveSaved,
    SaveBlock,
)

Entry = tuple[int, int, int]
Pieces = tuple[tuple[range, tuple[Entry, ...]], ...]


@dataclass
class FakeDisk:
    """A disk in memory.

    Attributes:
        blocks: Pieces and their checksums by namespace and block name.
        fails: Error word with which every command of a kind fails.
        ages: Ages that FindSaved reports, by block name.
    """

    blocks: dict[tuple[bytes, bytes], tuple[Pieces, tuple[int, ...]]] = field(default_factory=dict)
    fails: dict[type, str] = field(default_factory=dict)
    ages: dict[bytes, float] = field(default_factory=dict)
    refused: int = 0
    namespace: bytes = b""
    _rewritten: bool = False  # a block that could not be removed may be written again

    def run(self, command: DiskCommand, host: dict[int, tuple[range, list[Entry]]]) -> DiskResult:
        if word := self.fails.get(type(command)):
            self.refused += 1
            self._rewritten |= isinstance(command, RemoveSaved)
            return DiskResult(command.step, word)
        match command:
            case FindSaved():
                self.namespace = command.namespace
                names = [name for space, name in self.blocks if space == self.namespace]
                ages = tuple([self.ages.get(name, 0.0) for name in names])
                return DiskResult(command.step, names=tuple(names), ages=ages)
            case SaveBlock():
                pieces = tuple((host[one][0], tuple(host[one][1])) for one in command.offer_ids)
                key = (self.namespace, command.name)
                assert key not in self.blocks or self._rewritten, "written twice"
                self.blocks[key] = (pieces, command.checksums)
                return DiskResult(command.step, bytes_moved=1)
            case LoadBlock():
                found = self.blocks.get((self.namespace, command.name))
                if found is None:
                    return DiskResult(command.step, "gone")
                for offer_id, (band, entries) in zip(command.offer_ids, found[0], strict=True):
                    assert offer_id not in host, "ids are used once"
                    host[offer_id] = (band, list(entries))
                return DiskResult(command.step, checksums=found[1], bytes_moved=1)
            case RemoveSaved():
                for key in list(self.blocks):
                    if key[0] == self.namespace and (command.everything or key[1] in command.names):
                        del self.blocks[key]
                return DiskResult(command.step)


def no_disk(command: DiskCommand) -> DiskResult:
    return DiskResult(command.step, "gone")
