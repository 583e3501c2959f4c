"""Users see complete types: pyright knows the type of everything public."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import anyengine

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


@pytest.mark.slow
@pytest.mark.feature("L34")
@pytest.mark.parametrize("checker", [["pyright"], ["mypy", "--strict", "--no-incremental"]], ids=["pyright", "mypy"])
def test_a_users_program_is_understood(checker: list[str]) -> None:
    program = Path(__file__).with_name("public_use.py")
    environment = {**os.environ, "MYPYPATH": str(Path(anyengine.__file__).parents[1])}
    if checker == ["pyright"]:
        checker = ["pyright", "--pythonpath", sys.executable]
        environment["PYTHONPATH"] = environment["MYPYPATH"]
    done = subprocess.run(
        [sys.executable, "-m", *checker, str(program)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
