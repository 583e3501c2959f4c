"""A mark means something: without its feature, the test that has the mark fails. Shown for ten of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import feature_index
import pytest
from disabled_features import DISABLED

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_without_its_feature_a_marked_test_fails(tmp_path: Path) -> None:
    tests = [test for test, _ in DISABLED.values()]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ["-p", "disabled_features", "-p", "no:cacheprovider", "-q", "-rf", "--tb=no", "--show-capture=no"]
    options.append(f"--basetemp={tmp_path / 'inner'}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = set(re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE))
    assert failed == set(tests), done.stdout[-3000:] + done.stderr[-1000:]


def test_these_tests_have_the_marks() -> None:
    for row, (node, _) in DISABLED.items():
        path, _, name = node.partition("::")
        shown = {(row_, test) for _, row_, test in feature_index.marks((ROOT / path).read_text())}
        assert (row, name.partition("[")[0]) in shown
