"""Whether a new request is let in: refused at once, with a reason and a hint, when the queue in front is full. Pure."""

from jdisagg.errors import OverloadedError

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0


def admit(waiting_requests: int, max_waiting_requests: int, seconds_per_request: float) -> None:
    """Raises OverloadedError when `max_waiting_requests` wait for their first token already.

    `seconds_per_request` is the recent mean time between two first tokens; it makes the predicted wait.
    """
    if waiting_requests < max_waiting_requests:
        return
    wait_seconds = min(max(waiting_requests * seconds_per_request, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
    raise OverloadedError(
        f"{waiting_requests} requests wait for their first token, the limit is {max_waiting_requests}; "
        f"about {wait_seconds:.1f} s to wait: try again then",
        retry_after_seconds=wait_seconds,
    )
