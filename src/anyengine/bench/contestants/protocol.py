"""What all contestants have in common: lines in, lines out, the prompts, the clock.

Owns the measurement. Imports nothing but the standard library, and nothing of ours: it runs in the environments of
others too.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["answer_lines", "make_prompts", "tree_cpu_s"]

Generate = Callable[[list[list[int]], int], int]
"""Prompts and the number of tokens for each; how many tokens came in all."""


def make_prompts(num_seqs: int, input_tokens: int, seed: int) -> list[list[int]]:
    """Random token ids, so that no two prompts begin alike; ids that any vocabulary has."""
    source = random.Random(seed)  # noqa: S311  # the same prompts for all contestants
    return [[source.randrange(100, 30_000) for _ in range(input_tokens)] for _ in range(num_seqs)]


def tree_cpu_s(pid: int) -> float:
    """Processor time of a process and all below it that live, in s."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        child = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(child)
        ticks[child] = int(fields[11]) + int(fields[12])
    total, todo = 0, [pid]
    while todo:
        parent = todo.pop()
        total += ticks.get(parent, 0)
        todo += children.get(parent, [])
    return total / os.sysconf("SC_CLK_TCK")


def answer_lines(generate: Generate, facts: dict[str, Any]) -> None:
    """Say ``facts``, then run what each line asks for until there are no more lines."""
    _say(facts)
    for line in sys.stdin:
        task = json.loads(line)
        prompts = make_prompts(task["num_seqs"], task["input_tokens"], task["seed"])
        cpu_s, started_s = tree_cpu_s(os.getpid()), time.perf_counter()
        num_tokens = generate(prompts, task["output_tokens"])
        wall_s = time.perf_counter() - started_s
        _say({"wall_s": wall_s, "cpu_s": tree_cpu_s(os.getpid()) - cpu_s, "num_tokens": num_tokens})


def _say(message: dict[str, Any]) -> None:
    sys.__stdout__.write(json.dumps(message) + "\n")  # type: ignore[union-attr]  # a child of ours has one
    sys.__stdout__.flush()  # type: ignore[union-attr]
