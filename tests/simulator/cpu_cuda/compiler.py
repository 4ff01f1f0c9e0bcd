"""From CUDA sources to a shared library, by g++; kept on disk by contents."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from .errors import CudaError

HERE = Path(__file__).parent
HEADERS = ("cuda_on_cpu.h", "scheduler.h", "nv/target")
RUNTIME = ("scheduler.cpp", "races.cpp")

FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden"),
    # Contracted or reassociated arithmetic would round unlike the device.
    *("-ffp-contract=off", "-frounding-math", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Wno-unused", "-Wno-unknown-pragmas", "-Wno-attributes"),
]
# For kernels, and for linking.
CHECKS = {
    # Sanitizers confuse this warning.
    "": (["-Werror=uninitialized"], []),
    # Ends the process where the language leaves undefined what happens.
    "undefined": (["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"], []),
    # Shared memory is copied as a whole, what lies between its variables too.
    "address": (
        [
            *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
            *("--param", "asan-globals=0"),
        ],
        ["-fsanitize=address,undefined"],
    ),
    # The sanitizer's calls only: races.cpp stands in for its library.
    "race": (["-fsanitize=thread", "-fno-threadsafe-statics"], []),
}

ENTRY = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?'
    r"(\w+)\s*\(([^)]*)\)\s*\{"
)


def cuda_include() -> Path | None:
    """Return the folder of CUDA's headers: of a toolkit, or of NVIDIA's wheels."""
    site = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    candidates = [
        Path(os.environ.get("CUDA_PATH") or "/usr/local/cuda", "include"),
        Path("/usr/local/cuda/include"),
        *(Path(each, "nvidia", "cu13", "include") for each in sorted(site)),
    ]
    # crt/ is a wheel of its own.
    needed = ("cuda_fp16.h", "cuda_bf16.h", "crt/host_defines.h")
    for folder in candidates:
        if all((folder / name).is_file() for name in needed):
            return folder
    return None


def missing() -> str:
    """Return what is missing to build kernels for the CPU; empty if nothing is."""
    if absent := [each for each in ("g++", "objcopy") if not shutil.which(each)]:
        return f"{' and '.join(absent)} missing"
    if cuda_include() is None:
        return (
            "CUDA's headers are missing: "
            "pip install 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*'"
        )
    return ""


def entry_points(source: str, options: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Return the kernels' names and those of their parameters, macros expanded."""
    without_includes = re.sub(r"(?m)^\s*#\s*include\b.*$", "", source)
    command = ["g++", "-E", "-P", "-x", "c++", *_known(options), "-"]
    text = _run(command, stdin=without_includes)
    return {
        name: [re.findall(r"\w+", each)[-1] for each in parameters.split(",")]
        for name, parameters in ENTRY.findall(text)
    }


def library(source: str, options: tuple[str, ...], checks: str) -> Path:
    """Return the path of the library of one source, built if it is not there yet."""
    if problem := missing():
        raise CudaError(problem)
    entries = "".join(f"CPU_CUDA_KERNEL({each})\n" for each in entry_points(source))
    # An unnamed namespace: variables of templates get no linkage that would keep them
    # out of the section of shared memory.
    text = (
        f'namespace {{\n#line 1 "kernel.cu"\n{source}\n}}\n#line 1 "entries"\n{entries}'
    )
    flags = [*FLAGS, *CHECKS[checks][0], *_known(options)]

    def make(target: Path) -> None:
        unit = target.with_suffix(".cpp")
        unit.write_text(text)
        parts = [_runtime(checks, each) for each in RUNTIME]
        before = ["-include", "cuda_on_cpu.h"]
        _compile(unit, target.with_suffix(".o"), [*flags, *before])
        shared = ".bss=cuda_shared,alloc,load,data,contents"
        _run(["objcopy", "--rename-section", shared, str(target.with_suffix(".o"))])
        objects = [str(each) for each in [target.with_suffix(".o"), *parts]]
        link = ["g++", "-shared", *CHECKS[checks][1], *objects, "-o", str(target)]
        _run(link)

    return _kept("kernel.so", [text, *flags], make)


def _runtime(checks: str, file: str) -> Path:
    """Return an object file of the scheduler: without the race check's calls."""
    extra = ["-DCPU_CUDA_RACES"] if checks == "race" else CHECKS[checks][0]
    flags = [*FLAGS, "-O2", *extra]
    path = HERE / file
    return _kept(f"{path.stem}.o", flags, lambda target: _compile(path, target, flags))


def _compile(unit: Path, target: Path, flags: list[str]) -> None:
    include = ["-isystem", str(cuda_include()), f"-I{HERE}"]
    _run(["g++", "-c", *flags, *include, str(unit), "-o", str(target)])


def _known(options: tuple[str, ...]) -> list[str]:
    """The options of NVRTC that g++ has too."""
    kept = [each for each in options if each.startswith(("-D", "-U"))]
    standard = [each for each in options if each.lstrip("-").startswith("std=")]
    return [*kept, *("-" + each.lstrip("-") for each in standard)]


def _kept(name: str, contents: list[str], make) -> Path:
    """Return a file of the cache, made in a folder of its own and moved there."""
    key = hashlib.sha256("\0".join([_version(), *contents]).encode()).hexdigest()
    path = _cache() / f"{key[:20]}-{name}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, name)
            make(made)
            made.replace(path)
    return path


@functools.cache
def _version() -> str:
    """What every file of the cache depends on."""
    files = [(HERE / each).read_text() for each in (*HEADERS, *RUNTIME)]
    return "\0".join([_run(["g++", "--version"]), str(cuda_include()), *files])


@functools.cache
def _cache() -> Path:
    default = Path(tempfile.gettempdir(), f"hpcaccum-cpu-cuda-{os.getuid()}")
    folder = Path(os.environ.get("CPU_CUDA_CACHE") or default)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise CudaError(f"{folder} belongs to another user; set CPU_CUDA_CACHE")
    return folder


def _run(command: list[str], stdin: str | None = None) -> str:
    # A sanitizer of ours would slow the compiler down.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=False, env=env
    )
    if result.returncode:
        raise CudaError(f"{' '.join(command[:2])} ... failed:\n{result.stderr[:4000]}")
    return result.stdout
