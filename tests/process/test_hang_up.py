"""The end of a child's standard input, without the end of its host."""

from __future__ import annotations

import anyio
import pytest
from child_scripts import PATIENCE_S, Transcript, watching

pytestmark = pytest.mark.anyio


async def test_a_child_sees_its_standard_input_end() -> None:
    said = Transcript()
    with watching() as start:
        child = start("import sys; sys.stdin.readline(); print('up', flush=True); print(sys.stdin.read() == '')")
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(said.watch, child)
                await said.until(lambda: said.stdout == [b"up"])
                child.hang_up()
                child.hang_up()
    assert said.stdout == [b"up", b"True"]
