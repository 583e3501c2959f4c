"""``python -m anyengine.cli``: the same as the command ``anyengine``, where no script is installed."""

from __future__ import annotations

import sys

from anyengine.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
