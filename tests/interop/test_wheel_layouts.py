"""Every row of the layout and method tables, against the sources of real releases."""

from __future__ import annotations

import re

from extract_layouts import Wheel, differences
from vllm_codec import VLLMCodec


def test_the_tables_know_all_of_this_release(vllm_codec: VLLMCodec) -> None:
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", vllm_codec.version)
    assert version is not None
    release = (int(version[1]), int(version[2]), int(version[3]))
    assert list(differences(Wheel(vllm_codec.path.parents[1]), release)) == []
