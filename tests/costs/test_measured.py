"""Costs from measured times: what was measured is predicted as measured, and what lies between
follows the compiled sizes and the attention work."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from jdisagg.costs.catalog import geometry
from jdisagg.costs.measured import MeasuredCosts, StepTimes
from jdisagg.costs.speeds import Kind, PriceSource, Speed, speed_of
from jdisagg.layout.axes import Layout
from tests.costs.named import H100, LLAMA_31_8B

MODEL = LLAMA_31_8B
TIMES = StepTimes(
    chunk_sizes=(64, 128, 256, 512),
    chunks=((64, 0, 0.010), (256, 0, 0.034), (256, 1024, 0.060)),
    batch_sizes=(1, 2, 4, 8),
    steps=((1, 1, 0.004), (8, 1, 0.011), (8, 1001, 0.015)),
)
MEASURED = MeasuredCosts(MODEL, TIMES)
KIND = Kind(MODEL, Layout(), None, times=TIMES)


@pytest.mark.parametrize(("tokens", "cached", "seconds"), TIMES.chunks)
def test_measured_chunks_are_predicted_as_measured(tokens, cached, seconds) -> None:
    assert MEASURED.prefill([(tokens, cached)]).seconds == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(("sequences", "context", "seconds"), TIMES.steps)
def test_measured_steps_are_predicted_as_measured(sequences, context, seconds) -> None:
    predicted = MEASURED.decode_of(sequences, sequences * context).seconds
    assert predicted == pytest.approx(seconds, rel=1e-9)


def test_a_chunk_is_padded_to_the_next_compiled_size() -> None:
    pair = (0.060 - 0.034) / (256 * 1024)
    of_128, of_65 = (MEASURED.prefill_of(tokens, 0.0, 0.0, 1).seconds for tokens in (128, 65))
    assert of_65 == of_128
    assert MEASURED.prefill([(65, 0)]).seconds == pytest.approx(of_128 + 65 * 66 / 2 * pair)


def test_a_step_is_padded_to_the_next_compiled_batch() -> None:
    assert MEASURED.decode_of(5, 0.0).seconds == MEASURED.decode_of(8, 0.0).seconds
    assert MEASURED.decode_of(5, 0.0).seconds > MEASURED.decode_of(4, 0.0).seconds


def test_the_largest_chunk_is_extrapolated_and_longer_prompts_take_several() -> None:
    largest = MEASURED.prefill_of(512, 0.0, 0.0, 1).seconds
    assert largest == pytest.approx(2 * MEASURED.prefill_of(256, 0.0, 0.0, 1).seconds, rel=0.2)
    assert MEASURED.prefill_of(1024, 0.0, 0.0, 1).seconds == pytest.approx(2 * largest)


def test_windowed_layers_read_no_more_than_their_window() -> None:
    windowed = MeasuredCosts(geometry("gpt-oss-20b"), TIMES)
    near, far = (windowed.decode_of(1, context).seconds for context in (128, 128 + 4096))
    farther = windowed.decode_of(1, 128 + 2 * 4096).seconds
    assert far - near == pytest.approx(farther - far)
    assert 0 < far - near < 32 * (near - windowed.decode_of(1, 0).seconds)
    assert windowed.decode_of(8, 8 * 1001).seconds == pytest.approx(0.015)


def test_slower_attention_than_measured_alone_is_never_negative() -> None:
    noisy = replace_times(chunks=((64, 0, 0.010), (256, 0, 0.034), (256, 1024, 0.020)))
    costs = MeasuredCosts(MODEL, noisy)
    assert costs.prefill([(256, 1024)]).seconds == costs.prefill([(256, 0)]).seconds == 0.034


def test_a_speed_from_measured_times_follows_the_compiled_sizes() -> None:
    speed = Speed(KIND)
    assert speed.prefill_seconds(48, 0, 512) == pytest.approx(MEASURED.prefill([(48, 0)]).seconds)
    for new, cached in ((48, 0), (65, 512), (130, 1024), (700, 0)):
        (many,) = speed.prefills_seconds(*numbers(new, cached), chunk_tokens=512)
        assert many == pytest.approx(speed.prefill_seconds(new, cached, 512), rel=0.05)
    (step,) = speed.step_seconds(*numbers(5, 5 * 300))
    assert step == pytest.approx(MEASURED.decode_of(5, 5 * 300).seconds, rel=0.03)


def test_given_hardware_overrides_measured_times() -> None:
    given = replace(KIND, hardware=H100)
    assert given.source is PriceSource.GIVEN and KIND.source is PriceSource.MEASURED
    assert Speed(given).prefill_seconds(256) == Speed(replace(given, times=None)).prefill_seconds(
        256
    )


def test_without_hardware_and_times_a_fast_accelerator_is_assumed() -> None:
    unknown = replace(KIND, times=None)
    assert unknown.source is PriceSource.ASSUMED
    h100 = Speed(replace(unknown, hardware=H100))
    assert speed_of(unknown).prefill_seconds(256) == h100.prefill_seconds(256)


def replace_times(**fields: object) -> StepTimes:
    return msgspec.structs.replace(TIMES, **fields)


def numbers(*values: float) -> list[np.ndarray]:
    return [np.array([float(value)]) for value in values]
