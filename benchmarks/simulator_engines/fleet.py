"""Fleets of studies: pools at several sites behind one shared link, decode workers that also
prefill, and engines whose loop differs from ours. Pure data."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jdisagg.config import Mode
from jdisagg.costs.hardware import Link
from jdisagg.errors import ConfigError
from jdisagg.simulator.fleet import Fleet, Pool


@dataclass(frozen=True)
class StudyPool(Pool):
    """A pool with what studies vary.

    Attributes:
      site: Site of the instances, in a fleet of several sites.
      prefills: Whether decode instances also prefill prompts that the router leaves to them.
    """

    site: str = ""
    prefills: bool = False


@dataclass(frozen=True)
class StudyFleet(Fleet):
    """A fleet with what studies vary.

    Attributes:
      more_prefill: Further prefill pools, of other hardware or at other sites.
      site_link: The link between sites. All hand-offs between sites share one direction of it, and
        all hosts of a site form one rack, so that the router sees which workers are near.
      run_ahead: Decode commands issued before the first result is read.
      drains: Issue nothing while KV is fetched into pages (`executor.DrainingExecutor`).
      serial: One loop drives all pipeline stages (`executor.SerialExecutor`).
      late_reservation: Reserve decode pages after the prefill (`deferred_reservation`).
    """

    more_prefill: tuple[Pool, ...] = ()
    site_link: Link | None = None
    run_ahead: int = 1
    drains: bool = False
    serial: bool = False
    late_reservation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.more_prefill and self.prefill is None:
            raise ConfigError(
                f"mode {self.mode.value} has no prefill workers, and more_prefill adds to them;"
                " leave it out"
            )
        sites = sorted({_site(pool) for pool in self.pools})
        if self.site_link is None and len(sites) > 1:
            raise ConfigError(f"pools are at sites {sites}, and no link joins them; set site_link")
        if self.run_ahead < 0:
            raise ConfigError(f"run_ahead must not be negative, got {self.run_ahead}")

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (*super().pools, *self.more_prefill)

    def mode_of(self, pool: Pool) -> Mode:
        mixed = also_prefills(pool) and self.mode is Mode.DISAGGREGATED
        return Mode.CHUNKED if mixed else self.mode

    def hosts_of(self, pool: Pool) -> str:
        return f"{super().hosts_of(pool)} {_site(pool)}"

    def rack_of(self, pool: Pool, host: int) -> str:
        return f"site-{_site(pool)}" if self.site_link else super().rack_of(pool, host)

    def link_between(self) -> Callable[[str, str], Link]:
        within, sites = super().link_between(), self.site_link

        def between(one: str, other: str) -> Link:
            if sites is not None and one.split("/")[0] != other.split("/")[0]:
                return sites
            return within(one, other)

        return between

    @property
    def far(self) -> Link:
        """The link between sites, divided among the devices that a sequence lies on."""
        if self.site_link is None:
            return super().far
        lanes = min(pool.instance.layout.tp for pool in self.pools)
        return replace(self.site_link, bytes_per_second=self.site_link.bytes_per_second / lanes)


def also_prefills(pool: Pool) -> bool:
    return isinstance(pool, StudyPool) and pool.prefills


def _site(pool: Pool) -> str:
    return pool.site if isinstance(pool, StudyPool) else ""
