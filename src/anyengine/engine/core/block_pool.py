"""The blocks of the KV cache: who uses each, which content each holds, and which is given away next.

Owns reference counts, the map from content to block and the order of eviction. Knows numbers and digests only: where
a block's keys and values lie is the model runner's business, which sequence uses it the cache manager's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """``num_blocks`` blocks, each in exactly one state: used (by one sequence or more), or free.

    A free block may still hold content that a later sequence can use again; it loses it when it is allocated for
    something else. Invariants: a block is free exactly when nobody refers to it; no two blocks hold the same content.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_references = [0] * num_blocks
        self._contents: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # given away from the front

    @property
    def num_blocks(self) -> int:
        return len(self._contents)

    @property
    def num_free(self) -> int:
        """Those that nobody uses, whether they hold content or not."""
        return len(self._free)

    @property
    def num_contents(self) -> int:
        """Blocks that can be found by their content."""
        return len(self._block_of)

    def find(self, content: bytes) -> int | None:
        """The block that holds ``content``."""
        return self._block_of.get(content)

    def is_free(self, block_id: int) -> bool:
        return not self._num_references[block_id]

    def share(self, block_ids: Sequence[int]) -> None:
        """One more user of blocks that were found."""
        for block_id in block_ids:
            if not self._num_references[block_id]:
                del self._free[block_id]
            self._num_references[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks for new content, the least recently used first. The caller has made sure that there are so many."""
        block_ids: list[int] = []
        for _ in range(num_blocks):
            block_id, _none = self._free.popitem(last=False)
            self._forget_content(block_id)
            self._num_references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def label(self, block_id: int, content: bytes) -> None:
        """``block_id`` is full and holds ``content``. If another block does already, that one stays the known one."""
        if self._contents[block_id] is None and content not in self._block_of:
            self._contents[block_id] = content
            self._block_of[content] = block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """One user less, of the blocks of one sequence in order. Its end is evicted before its beginning: more
        sequences may have the beginning in common. What holds no content goes first of all."""
        for block_id in reversed(block_ids):
            self._num_references[block_id] -= 1
            if not self._num_references[block_id]:
                self._free[block_id] = None
                if self._contents[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def forget_contents(self) -> None:
        """Nothing can be found any more. Blocks in use keep their users."""
        self._block_of.clear()
        self._contents = [None] * self.num_blocks

    def _forget_content(self, block_id: int) -> None:
        content = self._contents[block_id]
        if content is not None:
            del self._block_of[content]
            self._contents[block_id] = None
