"""Measures decoding streams while long prompts arrive (a storm), with a small client for any
OpenAI-compatible server. A gap is the time between two events of one stream at the client."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from jdisagg.errors import ConfigError, UnavailableError

VOCABULARY, FIRST_ID = 32000, 3
ANSWER_SECONDS = 300.0


class Storm(NamedTuple):
    """`streams` streams decode for `seconds`; each starts again after `stream_tokens` tokens. The
    first `settle_seconds` are not counted. Prompts of `prompt_tokens` tokens arrive `rate` times
    per second (Poisson process) and request one token each; a rate of 0 sends none."""

    streams: int = 4
    stream_tokens: int = 512
    prompt_tokens: int = 2048
    rate: float = 0.5
    seconds: float = 30.0
    settle_seconds: float = 3.0


def measured(url: str, model: str, storm: Storm, seed: int = 0) -> dict[str, float]:
    """Returns the figures of one storm. Equal seeds give each server the same prompts at the same
    times."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(FIRST_ID, VOCABULARY, (storm.streams, 64)).tolist()
    arrivals = list(_arrivals(rng, storm))
    if storm.rate and not arrivals:
        raise ConfigError(
            f"no prompt comes in {storm.seconds} s at {storm.rate} a second; give either more"
        )
    long = rng.integers(FIRST_ID, VOCABULARY, (len(arrivals), storm.prompt_tokens)).tolist()
    began = time.perf_counter()
    until = began + storm.seconds
    gaps: list[float] = []
    firsts: list[float] = []
    failed: list[Exception] = []

    def decode(prompt: list[int]) -> None:
        try:
            while time.perf_counter() < until:
                times = list(frames(url, model, prompt, storm.stream_tokens, until))
                gaps.extend(counted_gaps(times, began + storm.settle_seconds, until))
        except (OSError, http.client.HTTPException, ValueError) as error:
            failed.append(error)

    def arrive(at: float, prompt: list[int]) -> None:
        try:
            asked = time.perf_counter()
            firsts.append(next(frames(url, model, prompt, 1)) - asked)
        except (OSError, http.client.HTTPException, ValueError, StopIteration) as error:
            failed.append(ValueError(f"a prompt at {at:.1f} s: {error}"))

    threads = [threading.Thread(target=decode, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for at, prompt in zip(arrivals, long, strict=True):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        threads.append(threading.Thread(target=arrive, args=(at, prompt)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if failed:
        raise UnavailableError(f"{len(failed)} requests failed at {url}; the first: {failed[0]}")
    return gap_figures(gaps) | ({"prompts": len(firsts)} | _ttft(firsts) if firsts else {})


def frames(
    url: str, model: str, prompt: list[int], tokens: int, until: float | None = None
) -> Iterator[float]:
    """Returns the time of each event of a stream. Closes the connection after `until`."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.netloc, timeout=ANSWER_SECONDS)
    try:
        head = {"content-type": "application/json"}
        connection.request("POST", f"{place.path}/v1/completions", json.dumps(body), head)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{response.status} {response.read()[:500].decode()}")
        for line in response:
            now = time.perf_counter()
            if line.startswith(b"data: {"):
                fields = json.loads(line[len(b"data: ") :])
                if "error" in fields:
                    raise ValueError(f"a stream broke: {fields['error']}")
                if fields.get("choices"):
                    yield now
            if until is not None and now > until:
                return
    finally:
        connection.close()


def counted_gaps(times: Sequence[float], low: float, high: float) -> list[float]:
    """Returns the gaps that ended between `low` and `high`."""
    gaps = zip(times, times[1:], strict=False)
    return [after - before for before, after in gaps if low <= after <= high]


def gap_figures(gaps: Sequence[float]) -> dict[str, float]:
    """Returns figures of the gaps, in milliseconds."""
    if not gaps:
        raise ConfigError(
            "no stream had two frames in the time that counts; give the storm more seconds, or"
            " fewer streams"
        )
    p50, p99 = np.percentile(np.asarray(gaps) * 1e3, (50, 99))
    return {
        "tbt_p50_ms": round(float(p50), 2),
        "tbt_p99_ms": round(float(p99), 2),
        "tbt_max_ms": round(1e3 * max(gaps), 2),
        "gaps": len(gaps),
    }


def _ttft(firsts: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(firsts) * 1e3, (50, 99))
    return {"ttft_p50_ms": round(float(p50), 1), "ttft_p99_ms": round(float(p99), 1)}


def _arrivals(rng: np.random.Generator, storm: Storm) -> Iterator[float]:
    at = storm.settle_seconds
    while storm.rate > 0:
        at += rng.exponential(1 / storm.rate)
        if at >= storm.seconds:
            return
        yield at
