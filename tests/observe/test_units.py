import pytest

from dynatrain_megatron.observe.units import duration, scientific, size, size_unit


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0, "0 ms"), (0.0384, "38 ms"), (1.0, "1.00 s"), (75.128, "75.13 s")]
)
def test_duration(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("num_bytes", "told"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (10_040_064, "10.04 MB"), (10**13, "10.00 TB")],
)
def test_size(num_bytes: int, told: str) -> None:
    assert size(num_bytes) == told


def test_size_unit_of_nothing_is_bytes() -> None:
    assert size_unit(0) == ("B", 1.0)
    assert size_unit(2_500_000_000) == ("GB", 1e9)


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, "0"), (1.3176e-7, "1.3e-7"), (0.5, "5.0e-1"), (float("inf"), "inf")],
)
def test_scientific(value: float, told: str) -> None:
    assert scientific(value) == told
