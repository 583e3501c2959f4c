"""Users see complete types: pyright knows the type of everything public."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VERIFY = ["--verifytypes", "anyengine", "--ignoreexternal", "--outputjson"]


@pytest.mark.slow
@pytest.mark.feature("P01")
def test_public_types_are_complete() -> None:
    # --verifytypes takes its search paths from the python on PATH, whatever --pythonpath says.
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(
        [sys.executable, "-m", "pyright", *VERIFY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    report = json.loads(done.stdout)["typeCompleteness"]
    assert report["packageName"] == "anyengine"
    found = [
        f"{symbol['name']}: {'; '.join(diagnostic['message'].splitlines()[0] for diagnostic in symbol['diagnostics'])}"
        for symbol in report["symbols"]
        if symbol["isExported"] and not symbol["isTypeKnown"]
    ]
    assert not found, "\n".join(found)
    assert report["completenessScore"] == 1
