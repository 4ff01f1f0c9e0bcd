"""The simulated CuPy has nothing that CuPy has not: names and parameters."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import cupy
import cupyx
import pytest

MODULES = {
    "cupy": cupy,
    "cupyx": cupyx,
    **{
        f"cupy.{name}": importlib.import_module(f"cupy.{name}")
        for name in (
            "cuda",
            "cuda.compiler",
            "cuda.device",
            "cuda.driver",
            "cuda.memory",
            "cuda.nccl",
            "cuda.nvrtc",
            "cuda.pinned_memory",
            "cuda.runtime",
            "cuda.stream",
            "linalg",
            "random",
        )
    },
}
# Of Python's and NumPy's protocols.
PROTOCOLS = re.compile(r"__(array|cuda|dlpack|[ri]?[a-z]+)[a-z_]*__")
# Attributes of every class.
COMMON = {*dir(object), "__del__", "__module__", "__dict__", "__weakref__", "__slots__"}

# Run by a Python that finds the true CuPy: prints for each name whether it exists, its
# parameters by inspect, and the beginning of its documentation.
ASK = r"""
import importlib, inspect, json, sys

def find(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
            break
        except ImportError:
            continue
    for part in parts[length:]:
        found = getattr(found, part)
    return found

def describe(name):
    try:
        found = find(name)
    except AttributeError:
        return None
    try:
        parameters = list(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        parameters = None
    if inspect.isclass(found):
        first = str(found.__init__.__doc__).replace("__init__", found.__name__)
    else:
        first = ""
    texts = [first, found.__doc__ if isinstance(found.__doc__, str) else ""]
    return parameters, [each.split("\n\n")[0].replace("\n", " ") for each in texts]

import cupy, warnings
warnings.simplefilter("ignore")
from cupy.cuda import nccl
answers = {name: describe(name) for name in json.load(sys.stdin)}
true = {"version": cupy.__version__, "nccl": nccl.available, "answers": answers}
print(json.dumps(true))
"""


def public_names():
    """Return dotted names of all that a program might use."""
    names = []
    for module_name, module in MODULES.items():
        for name in module.__all__:
            names.append(f"{module_name}.{name}")
            value = getattr(module, name)
            if inspect.isclass(value) and value.__module__.startswith("cupy"):
                names += [f"{module_name}.{name}.{each}" for each in members(value)]
    return names


def members(kind):
    return [
        name
        for name in dir(kind)
        if name not in COMMON
        and (PROTOCOLS.fullmatch(name) or not name.startswith("_"))
    ]


def found(name):
    module = max((each for each in MODULES if name.startswith(f"{each}.")), key=len)
    parts = name.removeprefix(f"{module}.").split(".")
    return functools.reduce(getattr, parts, MODULES[module])


@functools.cache
def true_cupy():
    """Return what the true CuPy says of all names, or why it is not to be had."""
    path = [
        each
        for each in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if each and not (Path(each) / "cupy" / "_queues.py").exists()
    ]
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps(public_names()),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        cwd=Path(sys.executable).parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return json.loads(done.stdout)


@pytest.fixture
def answers():
    true = true_cupy()
    if isinstance(true, str):
        if os.environ.get("HPCACCUM_REQUIRE_NVRTC") == "1":
            pytest.fail(f"HPCACCUM_REQUIRE_NVRTC=1, but CuPy is missing: {true}")
        pytest.skip(f"needs the true CuPy: {true}")
    assert true["version"] != cupy.__version__
    # Without NCCL, CuPy's module of it is empty.
    return {
        name: answer
        for name, answer in true["answers"].items()
        if true["nccl"] or not name.startswith("cupy.cuda.nccl.")
    }


def parameters(answer, name):
    """Return the names of the true parameters; None if CuPy does not say."""
    given, texts = answer
    if given is None or {"args", "kwargs"} & set(given):
        call = re.compile(rf"\s*(?:\w+\.)*{re.escape(name)}\((.*?)\)(?: ->| |$)")
        calls = [found[1] for text in texts if (found := call.match(text))]
        calls = [each for each in calls if "*args" not in each]
        if not calls:
            return None
        # "int device_id=-1" of Cython; "/" and "\\*" of ufuncs
        given = [
            re.split(r"[=:]", each)[0].split()[-1].lstrip("*\\")
            for each in re.split(r",(?![^(\[]*[)\]])", calls[0])
            if each.strip()
        ]
    return [each for each in given if each not in ("self", "cls", "", "/")]


def own_parameters(value):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        given = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        each.name for each in given if each.kind not in kinds and each.name[0] != "_"
    ]


def is_own(value):
    # A ufunc's documentation leaves `where` out.
    if isinstance(value, cupy.ufunc):
        return False
    return callable(value) and str(getattr(value, "__module__", "")).startswith("cupy")


def in_order(few, many):
    rest = iter(many)
    return all(each in rest for each in few)


def test_all_names_exist_in_cupy(answers):
    missing = sorted(name for name, answer in answers.items() if answer is None)

    assert missing == []
    assert len(answers) > 300


def test_parameters_are_those_of_cupy(answers):
    compared, wrong = 0, []
    for name, answer in answers.items():
        value = found(name)
        last = name.rsplit(".", 1)[-1]
        if not is_own(value) or last.startswith("__") or answer is None:
            continue
        true, own = parameters(answer, last), own_parameters(value)
        if true is None or own is None:
            continue
        own = [each for each in own if each != "self"]
        compared += 1
        if not in_order(own, true):
            wrong.append(f"{name}: {own}, CuPy has {true}")

    assert wrong == []
    assert compared > 150


def test_parameters_in_another_order_are_noticed():
    assert in_order(["a", "out"], ["a", "axis", "out"])
    assert not in_order(["out", "a"], ["a", "axis", "out"])
    assert parameters((None, ["dot(self, _ndarray b, int out=None)"]), "dot") == [
        "b",
        "out",
    ]
    assert parameters((None, ["", "Returns nothing."]), "dot") is None
