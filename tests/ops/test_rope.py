"""Rotation as multiplication of complex numbers; context extensions by their defining
properties."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.rope import rope_angles, rotate
from jdisagg.ops.rope_frequencies import Rope, RopeType

pytestmark = pytest.mark.one_device

HEAD, ORIGINAL = 16, 64
TYPES: list[RopeType] = ["default", "linear", "llama3", "yarn"]


def _rope(kind: RopeType, attention_factor: float = 1.0) -> Rope:
    return Rope(
        HEAD, 10000.0, kind, factor=4.0, original_tokens=ORIGINAL, attention_factor=attention_factor
    )


@pytest.mark.parametrize("kind", TYPES)
def test_pairs_are_turned_as_complex_numbers(kind: RopeType) -> None:
    rope, positions = _rope(kind, attention_factor=1.25), np.array([0, 1, 7, 40])
    x_TNH = np.random.default_rng(0).normal(size=(4, 3, HEAD)).astype(np.float32)
    got = np.asarray(rotate(jnp.asarray(x_TNH), rope_angles(jnp.asarray(positions), rope)))
    turned = (
        (x_TNH[..., : HEAD // 2] + 1j * x_TNH[..., HEAD // 2 :])
        * np.exp(1j * positions[:, None, None] * rope.frequencies())
        * 1.25
    )
    np.testing.assert_allclose(got, np.concatenate((turned.real, turned.imag), axis=-1), atol=1e-5)


def test_plain_frequencies_are_a_geometric_series_from_one() -> None:
    np.testing.assert_allclose(
        _rope("default").frequencies(),
        [10000.0 ** (-2 * pair / HEAD) for pair in range(HEAD // 2)],
        rtol=1e-6,
    )


def test_linear_divides_all_and_llama3_only_long_wavelengths() -> None:
    plain = _rope("default").frequencies()
    np.testing.assert_allclose(_rope("linear").frequencies(), plain / 4, rtol=1e-6)
    turns = ORIGINAL * plain / (2 * np.pi)
    ratio = plain / _rope("llama3").frequencies()
    np.testing.assert_allclose(ratio[turns > 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 1], 4, rtol=1e-6)
    between = ratio[(turns >= 1) & (turns <= 4)]
    assert len(between) and ((between >= 1) & (between <= 4)).all()


def test_yarn_goes_from_plain_to_divided() -> None:
    ratio = _rope("default").frequencies() / _rope("yarn").frequencies()
    assert (
        ratio[0] == pytest.approx(1)
        and ratio[-1] == pytest.approx(4)
        and (np.diff(ratio) >= -1e-6).all()
    )


@pytest.mark.parametrize("kind", TYPES)
def test_a_tokens_rotation_depends_on_its_own_position_alone(kind: RopeType) -> None:
    positions = jnp.arange(3 * ORIGINAL)
    together = rope_angles(positions, _rope(kind))
    for part in (slice(0, 5), slice(70, 71), slice(100, 180)):
        for whole, alone in zip(together, rope_angles(positions[part], _rope(kind)), strict=True):
            np.testing.assert_allclose(whole[part], alone, atol=1e-6)
