"""Admission of utility calls: an engine looks a name up among all its attributes, and must not be asked for some."""

from __future__ import annotations

from typing import Any

import pytest
from protocol_pieces import nothing

from anyengine._protocol import Connection, EngineLimits
from anyengine._wire import HARMFUL, HARMFUL_IN_WORKERS, METHODS, NEWEST, dialect_for
from anyengine.exceptions import EncodeError, UtilityError, UtilityRejected

VLLM = EngineLimits(32, known_methods_only=True)
OTHERS = EngineLimits(32)


def call(limits: EngineLimits, method: Any, *args: Any, version: str = "0.32.0", unchecked: bool = False) -> Connection:
    connection = Connection({0: dialect_for(version)}, call_id_prefix=1, limits={0: limits})
    try:
        connection.utility(method, args, 0, nothing, unchecked=unchecked)
    except BaseException:
        assert len(connection.utilities) == 0  # refused, and forgotten
        raise
    return connection


def refusal(limits: EngineLimits, method: Any, *args: Any, **options: Any) -> UtilityRejected:
    with pytest.raises(UtilityRejected) as caught:
        call(limits, method, *args, **options)
    error = caught.value
    assert isinstance(error, UtilityError) and isinstance(error, ValueError)
    assert error.parameter and error.remedy and error.rank == 0 and "nothing was sent" in str(error)
    return error


@pytest.mark.parametrize("limits", [VLLM, OTHERS], ids=["vllm", "others"])
@pytest.mark.parametrize(
    "method", [*HARMFUL, "_send_engine_dead", "__class__", "handle_fault_tolerance", 5, None, print]
)
@pytest.mark.feature("C42")
def test_a_method_that_no_engine_survives(limits: EngineLimits, method: Any) -> None:
    assert refusal(limits, method, {}).parameter == "method"


@pytest.mark.parametrize("name", [*HARMFUL_IN_WORKERS, "_x", "__reduce__"])
@pytest.mark.feature("C42")
def test_a_method_of_the_workers_whose_result_silences_the_engine(name: str) -> None:
    for limits in (VLLM, OTHERS):
        error = refusal(limits, "collective_rpc", name)
        assert (error.parameter, error.value, error.method) == ("args[0]", name, "collective_rpc")
    assert call(VLLM, "collective_rpc", name, unchecked=True)


@pytest.mark.case("K70")
@pytest.mark.feature("C42")
def test_what_would_have_to_be_pickled_is_never_asked_for() -> None:
    """A callable, or one that somebody has pickled already."""
    assert "pickled" in str(refusal(VLLM, "collective_rpc", lambda worker: worker))
    assert refusal(VLLM, "collective_rpc", b"\x80\x05pickled").parameter == "args[0]"
    with pytest.raises(EncodeError, match="64"):
        call(VLLM, "collective_rpc", "reset", None, [2**64])


@pytest.mark.parametrize(
    "args", [("ok", None, "text"), ("ok", None, 5), ("ok", None, [], []), ("ok", None, [], {1: 2})]
)
def test_arguments_of_a_worker_call(args: tuple[Any, ...]) -> None:
    assert refusal(OTHERS, "collective_rpc", *args).parameter in ("args[2]", "args[3]")


@pytest.mark.parametrize("args", [("ok",), ("ok", 1.5), ("ok", None, [1]), ("ok", None, (1, "x"), {"a": 1})])
def test_a_good_worker_call(args: tuple[Any, ...]) -> None:
    assert call(VLLM, "collective_rpc", *args)


def test_a_label_that_would_spoil_every_output() -> None:
    assert refusal(OTHERS, "set_weight_version", 7).parameter == "args[0]"
    assert call(VLLM, "set_weight_version", "7")


def test_names_and_arities_of_vllm() -> None:
    error = refusal(VLLM, "no_such_method")
    assert (error.parameter, error.value) == ("method", "no_such_method")
    assert "0.32" in str(error) and "is_sleeping" in str(error)
    assert refusal(VLLM, "is_sleeping", 1).parameter == "args"
    assert refusal(VLLM, "pause_generation", "abort", True).parameter == "method"  # from 0.33 on
    assert call(VLLM, "pause_generation", "abort", True, version="0.33.0")
    assert refusal(VLLM, "pause_scheduler", "abort", True, version="0.16.0").parameter == "args"
    for version in ("0.12.0", "0.20.2", "0.33.0"):
        dialect = dialect_for(version)
        for name in METHODS:
            if (arity := dialect.utility_arity(name)) is not None and name != "handle_fault_tolerance":
                first = "x" if name in ("collective_rpc", "set_weight_version") else None
                args = [first, *[None] * 9][:arity]
                assert call(VLLM, name, *args, version=version)


def test_engines_with_methods_of_their_own() -> None:
    assert call(OTHERS, "whatever it has", 1, 2, 3)
    assert call(VLLM, "get_engine_statistics")  # our engine core's, behind a remote address
    assert call(VLLM, "no_such_method", unchecked=True)
    assert call(EngineLimits(32, fault_tolerance=True, known_methods_only=True), "handle_fault_tolerance", {})


def test_no_harmful_name_is_a_method_that_clients_call() -> None:
    assert not HARMFUL.keys() & METHODS.keys()
    assert all(NEWEST.utility_arity(name) is None for name in HARMFUL)
