"""The error tree."""

import pickle

import pytest

from dynatrain_megatron import errors

ALL: list[type[errors.DynaTrainError]] = [
    errors.ConfigError,
    errors.LayoutError,
    errors.SwitchRefused,
    errors.HostMismatch,
    errors.TransitionError,
    errors.PlatformError,
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_ours_and_crosses_processes(kind: type[errors.DynaTrainError]) -> None:
    error = kind("tp=3 must divide 4")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) == "tp=3 must divide 4"
    assert isinstance(error, errors.DynaTrainError)


def test_only_usage_errors_end_with_two() -> None:
    assert [kind for kind in ALL if kind.exit_code == 2] == [errors.ConfigError]


def test_a_refusal_keeps_reason_and_next_step_apart() -> None:
    error = errors.SwitchRefused("CP is not supported", "use a layout with cp 1")
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.next_step) == ("CP is not supported", "use a layout with cp 1")
    assert str(again) == "CP is not supported; use a layout with cp 1"


def test_the_nearest_name() -> None:
    assert errors.did_you_mean("swich", ["switch", "other"]) == " (did you mean 'switch'?)"
    assert errors.did_you_mean("zzz", ["switch", "other"]) == ""
