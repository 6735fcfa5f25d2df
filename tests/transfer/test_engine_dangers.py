"""Which dangers of the bare transfer engine still hold: when JAX changes one of these, what jdisagg
does about it may go.

What is dangerous is said in engine_dangers.py; each runs there in a process of its own, or, where
the process survives, all in one. The rest of the list (a stalled puller, poison while bytes fly)
needs luck to reproduce; test_kv_processes.py tests the channel then."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import time_scale

pytestmark = pytest.mark.ci

PENDING = "pending"
WHOLE = [5.0] * 8
TOGETHER = (
    "an_unpulled_posting an_unknown_id a_timeout_with_and_without_a_tick another_dtype"
    " another_sharding a_second_pull an_empty_leaf a_poisoned_connection a_dropped_server"
    " an_id_used_again an_error_array an_error_array_for_a_waiting_pull"
    " an_array_deleted_after_posting no_transports_at_the_receiver two_servers_at_one_address"
    " garbage_that_is_survived a_program_fed_before_arrival"
)


def run(*dangers: str) -> tuple[int, Any]:
    """The exit status, and what was seen (None where the process ended early)."""
    command = [sys.executable, "-m", "tests.transfer.engine_dangers", *dangers]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(90),
        check=False,
    )
    return done.returncode, (
        json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    )


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    status, found = run(*TOGETHER.split())
    assert status == 0
    return found


def test_a_pull_of_an_unknown_id_stays_pending(seen: dict[str, Any]) -> None:
    assert seen["an_unknown_id"] == PENDING


def test_a_timeout_passes_only_when_the_sender_next_posts_something(seen: dict[str, Any]) -> None:
    without, after_a_tick = seen["a_timeout_with_and_without_a_tick"]
    assert without == PENDING
    assert "Pull expired" in after_a_tick


def test_a_pull_of_another_dtype_reinterprets_the_bytes(seen: dict[str, Any]) -> None:
    assert seen["another_dtype"] == [1084227584.0] * 8


def test_a_pull_of_another_sharding_permutes_the_values(seen: dict[str, Any]) -> None:
    assert seen["another_sharding"] == [[0.0, 2.0], [1.0, 3.0]]


def test_a_second_pull_of_an_id_stays_pending(seen: dict[str, Any]) -> None:
    assert seen["a_second_pull"] == [WHOLE, PENDING]


def test_an_empty_leaf_never_arrives(seen: dict[str, Any]) -> None:
    assert seen["an_empty_leaf"] == [WHOLE, PENDING]


def test_a_poisoned_connection_fails_all_its_pulls_and_a_new_one_works(
    seen: dict[str, Any],
) -> None:
    before, after, anew = seen["a_poisoned_connection"]
    assert before.startswith("error")
    assert after.startswith("error")
    assert anew == WHOLE


def test_pulls_from_a_server_that_was_dropped_stay_pending(seen: dict[str, Any]) -> None:
    """An open connection keeps what is left of it."""
    assert seen["a_dropped_server"] == [WHOLE, PENDING, PENDING]


def test_a_forgotten_request_takes_what_is_posted_for_the_next_one_of_its_id(
    seen: dict[str, Any],
) -> None:
    assert seen["an_id_used_again"] == PENDING or "already been fetched" in seen["an_id_used_again"]


@pytest.mark.parametrize("danger", ["an_error_array", "an_error_array_for_a_waiting_pull"])
def test_an_error_array_brings_its_message(seen: dict[str, Any], danger: str) -> None:
    """No danger, but what revocation stands on."""
    assert "Error while transferring: given up" in seen[danger]


def test_an_array_deleted_after_posting_fails_its_pull(seen: dict[str, Any]) -> None:
    assert "deleted or donated buffer" in seen["an_array_deleted_after_posting"]


def test_an_unpulled_posting_holds_its_memory_until_its_id_is_posted_again(
    seen: dict[str, Any],
) -> None:
    before, posted, replaced = seen["an_unpulled_posting"]
    assert posted - before > 100
    assert replaced - before < 60


def test_a_receiver_without_transport_addresses_waits_for_ever(seen: dict[str, Any]) -> None:
    assert seen["no_transports_at_the_receiver"] == PENDING


def test_two_servers_may_listen_at_one_address(seen: dict[str, Any]) -> None:
    assert seen["two_servers_at_one_address"] == [True]


def test_http_tls_and_noise_on_the_control_port_are_survived(seen: dict[str, Any]) -> None:
    assert seen["garbage_that_is_survived"] == WHOLE


def test_a_program_fed_with_an_array_that_has_not_arrived_holds_up_its_thread(
    seen: dict[str, Any],
) -> None:
    assert seen["a_program_fed_before_arrival"] == [PENDING, True]


def test_four_zero_bytes_on_the_control_port_abort_the_process() -> None:
    assert run("four_zero_bytes")[0] == -signal.SIGABRT


def test_fewer_transports_at_the_receiver_abort_it() -> None:
    # a failed check; now and then worse, and on a busy machine now and then nothing
    tries = (run("fewer_transports_at_the_receiver")[0] for _ in range(4))
    assert any(status in (-signal.SIGABRT, -signal.SIGSEGV) for status in tries)


def test_posting_a_deleted_array_crashes_before_jax_0_12() -> None:
    status, found = run("a_deleted_array")
    if jax.__version_info__ < (0, 11):
        assert status == -signal.SIGSEGV
    elif jax.__version_info__ >= (0, 12):
        assert found["a_deleted_array"].startswith("error: INVALID_ARGUMENT")
