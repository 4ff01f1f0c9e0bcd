"""The one error type."""


class CudaError(RuntimeError):
    """Raised where a kernel does not compile, cannot be launched or goes wrong."""
