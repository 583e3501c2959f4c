"""Kernels compiled for this processor compute what a naive computation in float64 does, for any shape and company."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from anyengine.engine.runner.kernels import DecodeRows, load_kernels
from anyengine.engine.runner.kernels.decode_attention import DecodeAttention, HeadShape
from anyengine.engine.runner.kernels.elementwise import Gate, Norm, Rotation
from anyengine.engine.runner.kernels.few_rows import BLOCK_COLUMNS, FewRows
from anyengine.engine.runner.kernels.library import Kernels
from anyengine.engine.runner.kernels.threads import _parallel, can_run_on_threads
from anyengine.engine.runner.paged_cache import BLOCK_TOKENS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NUM_BLOCKS = 44


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype is torch.float32 else 2e-2


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    limit = tolerance(dtype)
    torch.testing.assert_close(found.double(), expected.double(), rtol=limit, atol=limit)


def attended(queries: Tensor, cache: Tensor, rows: DecodeRows, scale: float, softcap: float | None) -> Tensor:
    """Row by row, head by head."""
    num_seqs, num_heads, head_dim = queries.shape
    num_kv_heads = cache.shape[2]
    found = torch.empty(queries.shape, dtype=torch.float64)
    for row in range(num_seqs):
        stored = cache[torch.from_numpy(rows.table[row])].double().permute(1, 2, 0, 3, 4)
        keys, values = stored.reshape(2, num_kv_heads, -1, head_dim)[:, :, rows.starts[row] : rows.ends[row]]
        for head in range(num_heads):
            of = head * num_kv_heads // num_heads
            scores = keys[of] @ queries[row, head].double() * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            found[row, head] = torch.softmax(scores, 0) @ values[of]
    return found


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "softcap"),
    [(9, 3, 64, None), (4, 4, 16, None), (8, 1, 128, None), (3, 1, 256, 4.0), (6, 2, 80, 30.0), (14, 2, 48, None)],
)
def test_attention_follows_the_block_table(
    num_heads: int, num_kv_heads: int, head_dim: int, softcap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    kernel = DecodeAttention(HeadShape(num_heads, num_kv_heads, head_dim, dtype.itemsize, softcap))
    ends = np.array([7 * BLOCK_TOKENS, 97, 96, 17, 16, 1])
    starts = np.array([0, 60, 80, 3, 15, 0])
    rows = DecodeRows(torch.randperm(NUM_BLOCKS)[: 6 * 7].view(6, 7).numpy().copy(), starts, ends)
    cache = torch.randn(NUM_BLOCKS, 2, num_kv_heads, BLOCK_TOKENS, head_dim).to(dtype)
    for row, end in enumerate(ends):  # what lies behind an end is nobody's business, nor what it is
        for position in range(end, 7 * BLOCK_TOKENS):
            cache[rows.table[row, position // BLOCK_TOKENS], :, :, position % BLOCK_TOKENS] = torch.nan
    qkv = torch.randn(6, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    queries = qkv[:, :num_heads]
    keys_values = qkv[:, num_heads:].view(6, 2, num_kv_heads, head_dim)
    before, found = cache.clone(), torch.empty(queries.shape, dtype=dtype)
    kernel(rows, queries, keys_values, cache, found, 0.3)
    for row, last in enumerate(ends - 1):
        before[rows.table[row, last // BLOCK_TOKENS], :, :, last % BLOCK_TOKENS] = keys_values[row]
    assert torch.equal(cache.nan_to_num(7), before.nan_to_num(7)), "the new keys and values are stored, nothing else is"
    close(found, attended(queries, cache, rows, 0.3, softcap), dtype)


SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=32, element_bytes=4)
ATTENTION = DecodeAttention(SHAPE)


@given(
    spans=st.lists(st.tuples(st.integers(1, 5 * BLOCK_TOKENS), st.integers(0, 80)), min_size=1, max_size=7),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.01, 0.2, 1.0]),
)
def test_attention_is_the_same_alone_and_in_any_company(spans: list[tuple[int, int]], seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    ends = np.array([end for end, _ in spans])
    starts = np.array([max(0, end - 1 - window) for end, window in spans])
    table = torch.randperm(NUM_BLOCKS)[: 5 * len(spans)].view(-1, 5).numpy().copy()
    cache = torch.randn(NUM_BLOCKS, 2, 2, BLOCK_TOKENS, 32)
    queries, new = torch.randn(len(spans), 4, 32), torch.randn(len(spans), 2, 2, 32)
    found = torch.empty(queries.shape)
    rows = DecodeRows(table, starts, ends)
    ATTENTION(rows, queries, new, cache, found, scale)
    close(found, attended(queries, cache, rows, scale, None), torch.float32)
    for row in range(len(spans)):
        alone = torch.empty(1, 4, 32)
        one = slice(row, row + 1)
        ATTENTION(DecodeRows(table[one], starts[one], ends[one]), queries[one], new[one], cache, alone, scale)
        assert torch.equal(alone[0], found[row])


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 13, 40, 128])
@pytest.mark.parametrize("shape", [(192, 48), (64, 2), (128, 576)], ids=str)
def test_few_rows_are_multiplied_as_alone(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_columns, num_lines = shape
    if not FewRows.fits(num_lines, num_columns, dtype.itemsize):
        pytest.skip("this processor does not multiply pairs of bfloat16")
    torch.manual_seed(num_rows)
    kernel = FewRows(dtype.itemsize)
    weight, x = torch.randn(shape).to(dtype) / num_lines**0.5, torch.randn(num_rows, num_lines).to(dtype)
    bias = torch.randn(num_columns).to(dtype)
    pair = 4 // dtype.itemsize
    packed = weight.view(-1, BLOCK_COLUMNS, num_lines // pair, pair).transpose(1, 2).contiguous()
    found, alone = torch.empty(num_rows, num_columns, dtype=dtype), torch.empty(1, num_columns, dtype=dtype)
    kernel(x, packed, bias, found)
    close(found, x.double() @ weight.double().T + bias.double(), dtype)
    for row in range(num_rows):
        kernel(x[row : row + 1], packed, bias, alone)
        assert torch.equal(alone[0], found[row])


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 7, 33])
def test_a_norm_is_that_of_the_sum(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = Norm(80, 1e-5, dtype.itemsize)
    x, more, weight = torch.randn(num_rows, 80), torch.randn(num_rows, 80), torch.randn(80)
    x, more, weight = (10 * x).to(dtype), more.to(dtype), weight.to(dtype)
    total = x + more
    found = norm(x, more, weight)
    assert torch.equal(x, total)
    wide = total.double()
    close(found, wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), dtype)
    assert torch.equal(norm(x, None, weight), found)


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 33])
def test_a_rotation_turns_the_heads_it_is_given(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(num_rows, 7, 64).to(dtype)
    cos, sin = torch.randn(num_rows, 1, 64).to(dtype), torch.randn(num_rows, 1, 64).to(dtype)
    heads, others = rows[:, :5], rows[:, 5:].clone()
    expected = heads.double() * cos.double() + heads.double().roll(32, -1) * sin.double()
    Rotation(5, 64, dtype.itemsize)(heads, cos, sin)
    close(heads, expected, dtype)
    assert torch.equal(rows[:, 5:], others)


@DTYPES
def test_a_gate_is_right_for_every_number(dtype: torch.dtype) -> None:
    """Also for those that are none, and for those beyond what the exponential function can say."""
    numbers = [0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 200.0, -200.0, 3e38, -3e38, torch.inf, torch.nan]
    gate = torch.cat([torch.tensor(numbers), torch.linspace(-30, 30, 180)]).to(dtype)
    both = torch.stack([torch.cat([gate, torch.ones_like(gate)])] * 9)
    found = Gate(len(gate), dtype.itemsize)(both)
    expected = functional.silu(gate.double())
    expected[torch.isinf(expected)] = torch.inf
    torch.testing.assert_close(
        found.double(), expected.expand(9, -1), rtol=tolerance(dtype) / 5, atol=1e-30, equal_nan=True
    )


def test_a_query_that_is_no_number_finds_none() -> None:
    queries = torch.full((1, 4, 32), torch.nan)
    found = torch.zeros(1, 4, 32)
    cache = torch.zeros(NUM_BLOCKS, 2, 2, BLOCK_TOKENS, 32)
    rows = DecodeRows(np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))
    ATTENTION(rows, queries, torch.ones(1, 2, 2, 32), cache, found, 1.0)
    assert found.isnan().all()


def test_a_kernel_may_run_in_several_threads_at_once() -> None:
    torch.manual_seed(0)
    weight = torch.randn(640, 64)
    packed = weight.view(-1, BLOCK_COLUMNS, 64, 1).transpose(1, 2).contiguous()
    kernel, bias, wrong = FewRows(4), torch.zeros(640), []

    def multiply(seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x, found = torch.randn(9, 64, generator=source), torch.empty(9, 640)
            kernel(x, packed, bias, found)
            if (found - x @ weight.T).abs().max() > 1e-3:
                wrong.append(seed)

    threads = [threading.Thread(target=multiply, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_kernel_is_made_once() -> None:
    kernels = Kernels(torch.float32)
    assert kernels.gate(64) is kernels.gate(64) is not None
    assert kernels.decode_attention(4, 2, 32, None) is kernels.decode_attention(4, 2, 32, None)
    assert kernels.decode_attention(4, 2, 32, None) is not kernels.decode_attention(4, 2, 32, 30.0)


def test_shapes_that_no_kernel_can_do_are_left_to_torch() -> None:
    kernels = Kernels(torch.float32)
    assert kernels.gate(65) is kernels.norm(8, 1e-5) is kernels.rotation(4, 48) is None
    assert kernels.decode_attention(4, 2, 20, None) is kernels.few_rows(64, 100) is None
    assert kernels.decode_attention(34, 2, 16, None) is None


def test_kernels_run_on_the_threads_of_torch() -> None:
    """A second pool would take the processors from the first."""
    function = _parallel()
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.count("/")]
    pools = {fields[-1] for fields in maps if "omp" in Path(fields[-1]).name}
    (found,) = (
        fields[-1] for fields in maps if int(fields[0].split("-")[0], 16) <= address < int(fields[0].split("-")[1], 16)
    )
    assert pools == {found}


def test_what_has_no_kernels_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_run_on_threads()
    assert load_kernels(torch.empty(0)) is not None
    assert load_kernels(torch.empty(0, dtype=torch.float16)) is None
    assert load_kernels(torch.empty(0, device="meta")) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert load_kernels(torch.empty(0)) is None, "there is no compiler"
