"""Every test here that asks for ``links`` runs on every implementation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transport_links
from transport_links import Links


@pytest.fixture(params=transport_links.IMPLEMENTATIONS)
def links(request: pytest.FixtureRequest, private_temp_dir: Path) -> Iterator[Links]:
    with transport_links.open_links(request.param, private_temp_dir) as links:
        yield links
