"""A pytest plugin for memory checkers: CuPy allocates every array separately.

By default arrays are parts of larger blocks, and a checker sees no access beside one.
"""

from __future__ import annotations

import cupy

cupy.cuda.set_allocator(None)
