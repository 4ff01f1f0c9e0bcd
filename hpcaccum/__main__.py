"""``python -m hpcaccum`` is the command ``hpcaccum``."""

from __future__ import annotations

import sys

from hpcaccum.cli import main

sys.exit(main())
