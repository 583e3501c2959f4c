"""``reading_weights.py MODEL_DIR DTYPE THREADS``: no engine at all, but what memory allows any engine.

A step reads every weight once, whatever is computed with it. This reads as many bytes, once for each token of an
answer, with the loop of torch that does least else.
"""

from __future__ import annotations

import json
import struct
import sys
from math import prod
from pathlib import Path

from anyengine.bench.contestants.protocol import answer_lines


def num_weights_read(model_dir: Path) -> int:
    """Of one step. A table of embeddings that is not the head's as well is not read but looked up."""
    config = json.loads((model_dir / "config.json").read_text())
    tied = config.get("tie_word_embeddings", True)
    total = 0
    for path in model_dir.glob("*.safetensors"):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        for name, tensor in header.items():
            looked_up = name.endswith("embed_tokens.weight") and not tied
            stored_twice = name == "lm_head.weight" and tied
            if name != "__metadata__" and not looked_up and not stored_twice:
                total += prod(tensor["shape"])
    return total


def main(model_dir: str, dtype: str, num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)
    num_bytes = num_weights_read(Path(model_dir)) * getattr(torch, dtype).itemsize
    weights = torch.zeros(num_bytes // 4).fill_(1.0)  # written, since zeros that never were take no memory

    def read(prompts: list[list[int]], output_tokens: int) -> int:
        for _ in range(output_tokens):
            weights.sum()
        return len(prompts) * output_tokens

    answer_lines(read, {"num_bytes": num_bytes})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
