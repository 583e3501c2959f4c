"""The client's own request desk and stream, without an engine, a socket or a task: a test feeds and takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from anyengine import CommandEngine, OutputKind, RequestOutput, RequestStream, SamplingParams, Tensor
from anyengine._client.engines.engine_limits import limits_of
from anyengine._client.inputs.request_builder import RequestBuilder
from anyengine._client.requests.admission import AdmissionSettings
from anyengine._client.requests.desk import RequestDesk
from anyengine._protocol import Connection
from anyengine._text import Tokenizer
from anyengine._wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    LogprobsLists,
    LogprobsTensors,
    dialect_for,
)


class OfflineClient:
    """One request at a time, of vLLM 0.32.0's dialect; keeps the frames that would have been sent."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        facts = tokenizer._facts
        ready = EngineCoreReadyResponse(max_model_len=max_model_len, vllm_version="0.32.0")
        limits = limits_of(ready, CommandEngine(argv=("x",)), facts)
        self.connection = Connection({0: dialect_for("0.32.0")}, call_id_prefix=1, limits={0: limits})
        self.sent: dict[str, list[bytes]] = {}
        self.aborted: list[str] = []
        session = SimpleNamespace(
            connection=self.connection,
            fences=SimpleNamespace(look_at_late_outputs=lambda: None),
            on_room=None,
            received_s=0.0,
            settings=SimpleNamespace(restart=None),
        )
        core: Any = SimpleNamespace(session=session, add=self._add, abort=self._abort)
        self.desk = RequestDesk(core, AdmissionSettings())
        self.desk.open(RequestBuilder((facts, tokenizer, None), limits, "p"))

    def close(self) -> None:
        self.desk.dropped.close()

    def _add(self, request: Any, consumer: Any) -> int:
        self.sent[request.request_id] = [bytes(frame) for frame in self.connection.add(request, 0, consumer)[1:]]
        return 0

    def _abort(self, request_ids: list[str]) -> tuple[str, ...]:
        self.aborted += [one for one in request_ids if one in self.connection.requests.live]
        self.connection.abort(request_ids)
        return ()

    def run(self, case: dict[str, Any]) -> list[Any]:
        """What is seen at each take of ``case``, in the form of ``vllm_text_child.py``."""
        self.sent.clear()
        self.aborted.clear()
        params = SamplingParams(**case["params"] | {"output_kind": OutputKind(case["params"]["output_kind"])})
        prompt = case["prompt"]
        tokens = self.desk.builder.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        stream = RequestStream(lambda: self.desk, tokens, params, "label", {})
        stream._desk, stream._completions = self.desk, self.desk.send(tokens, params, "label", {})
        ids = list(self.sent)
        seen = []
        for event in case["events"]:
            if event["do"] == "take":
                seen.append([_taken(stream), [ids.index(one) for one in self.aborted]])
            elif event["do"] == "abort":
                stream.abort()
            else:
                outputs = [_output(ids[row[0]], *row[1:]) for row in event["outputs"]]
                self.desk._processor.take(EngineCoreOutputs(outputs=outputs))
        stream.close_nowait()
        return seen


def _taken(stream: RequestStream) -> list[RequestOutput]:
    completions = stream._completions
    assert completions is not None
    found: list[RequestOutput] = []
    while not stream._over and completions.ready(gather=stream._gather):
        found.append(stream._take(completions))
    return found


def _output(wire_id: str, token_ids: list[int], reason: Any, stop: Any, rows: Any, prompt: Any) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=wire_id,
        new_token_ids=list(token_ids),
        new_logprobs=None if rows is None else LogprobsLists(*_tensors(rows)),
        new_prompt_logprobs_tensors=None if prompt is None else LogprobsTensors(*_tensors(prompt)),
        finish_reason=reason,
        stop_reason=stop,
    )


def _tensors(rows: Any) -> list[Tensor]:
    token_ids, logprobs, ranks = rows
    arrays = [np.array(token_ids, np.int64), np.array(logprobs, np.float32), np.array(ranks, np.int64)]
    return [Tensor.from_array(array) for array in arrays]
