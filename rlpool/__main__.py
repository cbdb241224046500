"""``python -m rlpool``: see ``rlpool.doctor``."""

from __future__ import annotations

import sys

from rlpool.doctor import main

if __name__ == "__main__":
    sys.exit(main())
