"""What a user gets: the wheel's contents."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.mark.feature("P01")
def test_the_wheel_ships_types_and_licences(repo_root: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=repo_root,
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "anyengine/py.typed" in names
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in names if "/licenses/" in name}
    assert {name.partition("/")[0] for name in names} == {
        "anyengine",
        next(n for n in names if "dist-info" in n).partition("/")[0],
    }
