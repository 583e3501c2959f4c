"""The other end of ``vllm_codec_child.py``: a process in vLLM's environment that decodes and encodes for us."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

CHILD = Path(__file__).parent / "vllm_codec_child.py"
BATCH = 250  # examples in one round trip


class VLLMCodec:
    """One release of vLLM. ``source`` is a directory with its unpacked wheel; ``None``: the one that is installed."""

    def __init__(self, python: str, source: Path | None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        self._process = subprocess.Popen(
            [python, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        greeting = self._ask("hello", None)
        self.version: str = greeting["version"]
        self.path = Path(greeting["path"])
        self.fields: dict[str, list[str]] = greeting["fields"]
        self.finish_reasons: list[int] = greeting["finish_reasons"]

    def decode_requests(self, messages: Sequence[list[bytes]]) -> list[Any]:
        """What vLLM makes of requests (payload and auxiliary frames each); ``{"$refused": why}`` where it raises."""
        return self._in_batches("decode", messages)

    def encode_outputs(self, descriptions: Sequence[Any]) -> list[list[bytes]]:
        return self._in_batches("encode", descriptions)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)

    def _in_batches(self, name: str, items: Sequence[Any]) -> list[Any]:
        batches = (items[start : start + BATCH] for start in range(0, len(items), BATCH))
        return [answer for batch in batches for answer in self._ask(name, batch)]

    def _ask(self, name: str, argument: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        command = msgspec.msgpack.encode((name, argument))
        stdin.write(len(command).to_bytes(4, "big") + command)
        stdin.flush()
        head = stdout.read(4)
        if len(head) < 4:
            raise RuntimeError(f"vLLM's codec process ended with code {self._process.wait(timeout=60)}: see its stderr")
        return msgspec.msgpack.decode(stdout.read(int.from_bytes(head, "big")))
