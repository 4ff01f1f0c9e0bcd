"""The error of a kernel that does not compile."""

from __future__ import annotations


class CompileException(Exception):
    """Raised with the compiler's text."""

    def __init__(self, msg, source, name, options, backend="nvrtc"):
        self.source, self.name = source, name
        self.options, self.backend = options, backend
        super().__init__(msg)
