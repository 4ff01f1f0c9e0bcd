"""Puts a driver that does nothing under the true CuPy, before it is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_READ, _WRITE, _RUN = 1, 2, 4
_PAGE = 4096


def missing() -> str:
    """Return what is missing for it, or nothing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is for Linux on x86-64, this is {sys.platform} {platform.machine()}"
    for program in ("gcc", "nm"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if importlib.util.find_spec("cupy_backends") is None:
        return "CuPy is not installed"
    return ""


def install(folder: Path) -> ctypes.CDLL:
    """Build the driver in a folder; load it, and let CuPy's runtime jump to it."""
    path = folder / "libcuda.so.1"
    command = ["gcc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{path.name}"]
    subprocess.run([*command, "-o", path, HERE / "driver.c"], check=True)
    driver = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    runtime = _runtime()
    ctypes.CDLL(str(runtime))
    base, places = _base(runtime), _functions(runtime, "-a")
    for name in _functions(path, "-D"):
        if name in places:
            target = ctypes.cast(getattr(driver, name), ctypes.c_void_p).value
            assert target is not None
            _jump(base + places[name], target)
    return driver


def _runtime() -> Path:
    """Return CuPy's library into which the CUDA runtime is linked."""
    spec = importlib.util.find_spec("cupy_backends")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    [root] = spec.submodule_search_locations
    [path] = (Path(root) / "cuda" / "api").glob("runtime.*.so")
    return path


def _functions(path: Path, table: str) -> dict[str, int]:
    """Return the functions of the CUDA runtime in a library, with their addresses."""
    command = ["nm", table, "--defined-only", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(\w+) [tT] (cuda[A-Z]\w+)$", text, re.MULTILINE)
    return {name: int(address, 16) for address, name in found}


def _base(path: Path) -> int:
    """Return where a library was loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(int(each.split("-")[0], 16) for each in lines if str(path) in each)


def _jump(place: int, target: int) -> None:
    """Write "mov rax, target; jmp rax" over the beginning of a function."""
    code = b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0"
    libc = ctypes.CDLL(None, use_errno=True)
    page = place // _PAGE * _PAGE
    size = place + len(code) - page
    failed = libc.mprotect(ctypes.c_void_p(page), size, _READ | _WRITE | _RUN)
    if failed:
        raise OSError(ctypes.get_errno(), "code cannot be made writable")
    ctypes.memmove(place, code, len(code))
