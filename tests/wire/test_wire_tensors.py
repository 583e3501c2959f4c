"""Tensors beside and inside the payload: numbering, both forms, contradictions, arrays of numpy and torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import anyengine._wire as wire
from anyengine._wire import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, LogprobsLists, Tensor, UtilityOutput
from anyengine.exceptions import DecodeError, EncodeError

RAW = 3


def embeds(nbytes: int) -> Tensor:
    return Tensor("uint8", (1, nbytes), bytes(range(256))[:nbytes] if nbytes <= 256 else bytes(nbytes))


def add(**fields: Any) -> list[Any]:
    return wire.NEWEST.encode_add(EngineCoreRequest("r", None, sampling_params=wire.WireSamplingParams(), **fields))


def received(tensor: Any, *aux: Any) -> Tensor:
    """``tensor`` as the pooling output of a message with these auxiliary frames."""
    payload = msgspec.msgpack.encode([0, [["r", [], None, None, tensor]]])
    output = wire.NEWEST.decode_outputs([payload, *aux]).outputs[0].pooling_output
    assert output is not None
    return output


@pytest.mark.parametrize(("nbytes", "num_frames"), [(0, 2), (1, 2), (255, 2), (256, 3), (5000, 3)])
def test_the_threshold(nbytes: int, num_frames: int) -> None:
    frames = add(prompt_embeds=embeds(nbytes))
    assert len(frames) == num_frames
    request = wire.NEWEST.decode_input(frames)
    assert isinstance(request, EngineCoreRequest)
    assert request.prompt_embeds == embeds(nbytes)


def test_frames_are_numbered_in_the_order_of_encoding() -> None:
    big = [Tensor("<i4", (100,), bytes([index]) * 400) for index in range(5)]
    small = Tensor("<i8", (1,), bytes(8))
    outputs = [
        EngineCoreOutput("r-0", [1], new_logprobs=LogprobsLists(big[0], big[1], small), pooling_output=big[2]),
        EngineCoreOutput("r-1", [1], new_logprobs=LogprobsLists(small, big[3], big[4])),
    ]
    frames = wire.NEWEST.encode_outputs(EngineCoreOutputs(outputs=outputs))
    assert [frame[0] for frame in frames[1:]] == [0, 1, 2, 3, 4]
    assert wire.NEWEST.decode_outputs(frames).outputs == outputs


def test_nothing_is_copied() -> None:
    memory = bytearray(1000)
    frames = add(prompt_embeds=Tensor("uint8", (1000,), memory))
    memory[0] = 7
    assert frames[2][0] == 7
    sent = bytes(255)
    inline = received(["uint8", [255], msgspec.msgpack.Ext(RAW, sent)])
    assert isinstance(inline.data, memoryview)
    frame = memoryview(bytearray(300))
    assert received(["uint8", [300], 1], frame).data is frame


def test_readers_take_both_forms_at_any_size() -> None:
    large, small = bytes(5000), b"abcd"
    assert received(["uint8", [5000], msgspec.msgpack.Ext(RAW, large)]).nbytes == 5000
    assert bytes(received(["uint8", [4], 2], b"unused", small).data) == small


@pytest.mark.parametrize(
    ("triple", "aux", "why"),
    [
        (["<f4", [1], 1], (), "has 0"),
        (["<f4", [1], 2], (b"abcd",), "auxiliary frame 2, but the message has 1"),
        (["<f4", [1], 0], (b"abcd",), "auxiliary frame 0"),
        (["<f4", [1], -1], (b"abcd",), "auxiliary frame -1"),
        (["<f4", [1], True], (b"abcd",), "bool"),
        (["<f4", [2], 1], (b"abcd",), "cannot have 4 bytes"),
        (["<f4", [], 1], (b"abcdefgh",), "cannot have 8 bytes"),
        (["bfloat16", [3], 1], (b"abcd",), "cannot have 4 bytes"),
        (["<f4", [-1], 1], (b"",), "none negative"),
        (["<f4", [-1, -1], 1], (b"abcd",), "none negative"),
        (["<f4", [1.0], 1], (b"abcd",), "ints"),
        (["<f4", [True], 1], (b"abcd",), "ints"),
        (["<f4", [2**62, 2**62], 1], (b"abcd",), "cannot have"),
        (["<f4", [1] * 65, 1], (b"abcd",), "at most 64"),
        (["<f4", 1, 1], (b"abcd",), "array of ints"),
        ([4, [1], 1], (b"abcd",), "str"),
        (["<f4", [1]], (), "expected a tensor"),
        ("<f4", (), "expected a tensor"),
        (["<f4", [1], b"abcd"], (), "bytes"),
        (["<f4", [1], {"sender_id": "a", "message_id": 1, "tensor_id": 2}], (), "torch_shm"),
    ],
)
def test_contradictions_are_refused(triple: Any, aux: tuple[bytes, ...], why: str) -> None:
    with pytest.raises(DecodeError, match=why) as caught:
        received(triple, *aux)
    assert caught.value.path is not None
    assert caught.value.path.startswith("$[1]")


def test_a_dtype_of_the_future_is_carried() -> None:
    tensor = received(["float4_e2m1fn_x2", [3], 1], b"abcdef")
    assert (tensor.dtype, tensor.shape, tensor.data) == ("float4_e2m1fn_x2", (3,), b"abcdef")
    with pytest.raises(TypeError, match="float4"):
        tensor.numpy()


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1", ">i4", "<c8"])
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5), (2, 0)])
def test_numpy_arrays_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    tensor = Tensor.from_array(array)
    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


def test_numpy_arrays_that_are_not_contiguous_are_sent_row_major() -> None:
    array = np.arange(12).reshape(3, 4).T
    np.testing.assert_array_equal(Tensor.from_array(array).numpy(), array)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 4)])
def test_torch_tensors_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = (torch.arange(12)[: int(np.prod(shape))].reshape(shape) / 2).to(dtype)
    tensor = Tensor.from_array(source)
    assert (tensor.dtype, tensor.shape) == (str(dtype).removeprefix("torch."), shape)
    expected = source.float() if dtype is torch.bfloat16 else source
    np.testing.assert_array_equal(tensor.numpy(), expected.numpy(), strict=True)


def test_torch_tensors_that_are_strided_or_need_a_gradient() -> None:
    source = torch.arange(12.0).reshape(3, 4).T.requires_grad_()
    np.testing.assert_array_equal(Tensor.from_array(source).numpy(), source.detach().numpy())


def test_contiguous_memory_is_shared() -> None:
    array, source = np.zeros(4, dtype="<i4"), torch.zeros(4)
    views = Tensor.from_array(array), Tensor.from_array(source)
    array[0], source[0] = 1, 1.0
    assert [view.numpy()[0] for view in views] == [1, 1]


@pytest.mark.parametrize("bad", [np.array([object()]), np.array(["a"]), [1.0], torch.zeros(1, device="meta")])
def test_what_is_no_tensor_is_refused(bad: Any) -> None:
    with pytest.raises(EncodeError) as caught:
        Tensor.from_array(bad)
    assert caught.value.type_name is not None


def test_eight_bit_floats_are_carried_but_numpy_has_none() -> None:
    tensor = Tensor.from_array(torch.zeros(4).to(torch.float8_e4m3fn))
    assert tensor.nbytes == 4
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        tensor.numpy()


def test_tensors_in_the_result_of_a_utility_call() -> None:
    result = {"small": Tensor("float32", (2,), bytes(8)), "large": [Tensor("float32", (100,), bytes(400))]}
    frames = wire.NEWEST.encode_outputs(EngineCoreOutputs(utility_output=UtilityOutput(7, None, result)))
    decoded = wire.NEWEST.decode_outputs(frames).utility_output
    assert decoded is not None
    assert decoded.result == result


def test_lists_that_only_look_like_tensors_stay_lists() -> None:
    result = [["bool", [1], 1], ["float32", 2, 3], ["int8", [2], 9]]
    frames = wire.NEWEST.encode_outputs(EngineCoreOutputs(utility_output=UtilityOutput(7, None, result)))
    decoded = wire.NEWEST.decode_outputs([*frames, b"an unrelated frame"]).utility_output
    assert decoded is not None
    assert decoded.result == result


def test_importing_the_wire_does_not_import_numpy() -> None:
    code = "import sys, anyengine._wire; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})
