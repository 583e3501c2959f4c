"""Which dialect an engine gets, and how it becomes known where the engine does not say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import anyengine._wire as wire
from anyengine._wire.methods import METHODS, arity_at
from anyengine.exceptions import LocalProtocolError, RemoteProtocolError

Release = tuple[int, int, int]


def ready(**keys: Any) -> wire.EngineCoreReadyResponse | None:
    return wire.decode_ready(msgspec.msgpack.encode({"max_model_len": 8, **keys}))


def registered(version: str) -> wire.Dialect:
    return wire.select_dialect(ready(vllm_version=version))


@pytest.mark.feature("F08")
@pytest.mark.parametrize(
    ("version", "since"),
    [
        (None, wire.NEWEST.since),
        ("0.12.0.post2", (0, 12, 0)),
        ("0.15.1", (0, 15, 0)),
        ("0.20.0", (0, 20, 0)),
        ("0.20.2", (0, 20, 1)),
        ("0.32.0", (0, 32, 0)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.32.9", (0, 32, 0)),
        ("0.33.0", (0, 33, 0)),
        ("v0.33.1.dev3+g1234", (0, 33, 0)),
        ("1.0", wire.NEWEST.since),
        ("0.1.dev12+gabc", wire.NEWEST.since),
        ("dev", wire.NEWEST.since),
        ("", wire.NEWEST.since),
    ],
)
def test_the_dialect_for_a_version(version: str | None, since: Release) -> None:
    assert wire.dialect_for(version).since == since
    if version is not None:
        assert registered(version) is wire.dialect_for(version)


@pytest.mark.feature("F08")
def test_a_version_that_is_too_old_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"0\.11\.2.*speaks 0\.12\.0 and later"):
        registered("0.11.2")


@pytest.mark.feature("F08")
@pytest.mark.parametrize(
    ("response", "since", "until"),
    [
        (None, (0, 12, 0), (0, 20, 0)),
        (ready(num_gpu_blocks=1, dp_stats_address=None), (0, 20, 0), (0, 22, 0)),
        (ready(num_gpu_blocks=1, dp_stats_address=None, dtype=None), (0, 22, 0), (0, 23, 0)),
        (ready(), wire.NEWEST.since, None),
        (ready(num_gpu_blocks=1, dp_stats_address=None, other=1), wire.NEWEST.since, None),
    ],
)
def test_an_engine_that_does_not_say_is_told_by_its_keys(
    response: wire.EngineCoreReadyResponse | None, since: Release, until: Release | None
) -> None:
    dialect = wire.select_dialect(response)
    assert (dialect.since, dialect.until) == (since, until)
    assert wire.select_dialect(response, version="0.19.1").since == (0, 19, 0), "what a launcher knows counts more"


def test_what_the_engine_says_counts_more_than_what_a_launcher_knows() -> None:
    assert wire.select_dialect(ready(vllm_version="0.31.0"), version="0.19.1").since == (0, 31, 0)


@pytest.mark.feature("F08")
def test_a_newer_release_is_warned_of() -> None:
    warning = wire.newer_than_known(ready(vllm_version="0.34.0"))
    assert warning is not None and "0.34.0" in warning and "0.33" in warning
    assert registered("0.34.0") is wire.NEWEST
    for version in ("0.33.7", "0.12.0", "dev", "0.1.dev1"):
        assert wire.newer_than_known(ready(vllm_version=version)) is None
    assert wire.newer_than_known(None) is None
    assert wire.newer_than_known(ready()) is None


def test_dialects_cover_every_release_without_a_gap() -> None:
    for dialect, following in zip(wire.DIALECTS, wire.DIALECTS[1:], strict=False):
        assert dialect.until == following.since
        assert dialect.probe is None
    assert wire.NEWEST.until is None


@pytest.mark.parametrize(
    ("positions", "until", "range_found"),
    [
        (12, (0, 20, 0), ((0, 12, 0), (0, 14, 0))),
        (13, (0, 20, 0), ((0, 14, 0), (0, 16, 0))),
        (14, (0, 20, 0), ((0, 16, 0), (0, 20, 0))),
        (14, (0, 17, 0), ((0, 16, 0), (0, 17, 0))),
        (15, (0, 20, 0), ((0, 12, 0), (0, 20, 0))),
    ],
)
def test_the_length_of_an_output_narrows(
    positions: int, until: Release, range_found: tuple[Release, Release | None]
) -> None:
    silent = wire.select_dialect(None)
    dialect = silent if until == silent.until else silent.probed(found=False)
    output = ["r", [1], *[None] * (positions - 2)]
    narrowed = dialect.narrowed([msgspec.msgpack.encode([0, [output]])])
    assert (narrowed.since, narrowed.until) == range_found


def test_what_has_no_outputs_narrows_nothing() -> None:
    silent = wire.select_dialect(None)
    for payload in (
        msgspec.msgpack.encode([0, []]),
        msgspec.msgpack.encode([0]),
        b"\xc1",
        msgspec.msgpack.encode([0, [1]]),
    ):
        assert silent.narrowed([payload]) is silent


def test_a_probe_tells_what_requests_look_like() -> None:
    silent = wire.select_dialect(None)
    assert silent.probe == "is_scheduler_paused"
    assert [silent.probed(found=found).since for found in (False, True)] == [(0, 12, 0), (0, 17, 0)]
    request = wire.EngineCoreRequest(
        "r", [1], sampling_params=wire.WireSamplingParams(eos_token_id=2), arrival_time=1.5
    )
    with pytest.raises(LocalProtocolError, match="is_scheduler_paused"):
        silent.encode_add(request)
    older, newer = (msgspec.msgpack.decode(silent.probed(found=f).encode_add(request)[1]) for f in (False, True))
    assert (older[5:7], len(older)) == ([2, 1.5], 15)
    assert (newer[5], len(newer)) == (1.5, 17)
    with pytest.raises(LocalProtocolError, match="no probe"):
        wire.NEWEST.probed(found=True)


def test_short_forms_while_the_release_is_unknown() -> None:
    lora = wire.WireLoRARequest("a", 3, "/a")
    request = wire.EngineCoreRequest(
        "r", [1], sampling_params=wire.WireSamplingParams(), lora_request=lora, current_wave=4
    )
    ambiguous = wire.select_dialect(ready(num_gpu_blocks=1, dp_stats_address=None))
    array = msgspec.msgpack.decode(ambiguous.encode_add(request)[1])
    assert len(array) == 10
    older = msgspec.msgpack.decode(wire.select_dialect(None).probed(found=False).encode_add(request)[1])
    assert older[7] == ["a", 3, "/a"]


# --- utility methods ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "arities"),
    [
        (
            "0.12.0",
            {"profile": 1, "sleep": 1, "reset_prefix_cache": 1, "pause_scheduler": None, "is_scheduler_paused": None},
        ),
        ("0.16.0", {"pause_scheduler": 0, "reset_prefix_cache": 2, "sleep": 1}),
        ("0.30.0", {"profile": 2, "sleep": 2, "pause_scheduler": 2, "get_kv_cache_group_metadata": None}),
        ("0.32.0", {"profile": 4, "pause_generation": None, "compute_weight_checksums": 0}),
        ("0.33.0", {"profile": 5, "pause_generation": 2, "collective_rpc": 4, "no_such_method": None}),
    ],
)
def test_utility_methods_by_release(version: str, arities: dict[str, int | None]) -> None:
    dialect = wire.dialect_for(version)
    assert {method: dialect.utility_arity(method) for method in arities} == arities


def test_utility_methods_while_the_release_is_unknown() -> None:
    silent = wire.select_dialect(None)
    assert silent.utility_arity("sleep") == 1, "what all of them take"
    assert silent.utility_arity("is_scheduler_paused") is None
    assert silent.probed(found=True).utility_arity("sleep") == 2


@pytest.mark.parametrize("dialect", wire.DIALECTS, ids=repr)
def test_arities_do_not_change_within_a_dialect(dialect: wire.Dialect) -> None:
    for method in METHODS:
        assert dialect.utility_arity(method) == arity_at(method, dialect.since)
