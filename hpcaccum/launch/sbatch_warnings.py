"""What may keep a batch job from its work, found where it is submitted.

The nodes of the job may have other files, other packages and GPUs without a request.
So these are warnings, unlike what is wrong wherever the job runs.
"""

from __future__ import annotations

import difflib
import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

_NO_GPUS = "no GPUs are requested: add --gpus-per-node, unless the nodes give them all"


def of_training(train: argparse.Namespace, job: argparse.Namespace) -> Iterator[str]:
    """Yield warnings about the options of a training and of its job."""
    if not train.no_plot:
        yield from _package("matplotlib", "draws the picture", ", or add --no-plot")
    if train.data is None:
        name = "scikit-learn"
        yield from _package("sklearn", "provides the digits", ", or add --data", name)
    elif not train.data.exists():
        yield f"--data {train.data}: no such file here"
    if train.device == "cuda":
        yield from _device(job)
    elif job.gpus_per_node:
        yield "GPUs are requested, which the training does not use: add --device cuda"


def of_benchmark(bench: argparse.Namespace, job: argparse.Namespace) -> Iterator[str]:
    """Yield warnings about the options of a benchmark and of its job."""
    if getattr(bench, "plot", None) or job.sweep:
        yield from _package("matplotlib", "draws the picture")
    if bench.benchmark == "torch" or getattr(bench, "against", None):
        yield from _package("torch", "is measured", name="PyTorch")
    if bench.benchmark == "device":
        yield from _device(job)


def of_program(words: Sequence[str], commands: Sequence[str]) -> Iterator[str]:
    """Yield warnings about a program; ``commands`` are what it may have been meant."""
    word, *arguments = words
    if word.startswith("python"):
        file = next((each for each in arguments if not each.startswith("-")), "")
        if file.endswith(".py") and not Path(file).exists():
            yield f"{file}: no such file here"
    elif not shutil.which(word) and not Path(word).exists():
        near = difflib.get_close_matches(word, commands, 1)
        yield f"{word}: no such program here" + (
            f"; did you mean {near[0]}?" if near else ""
        )


def _device(job: argparse.Namespace) -> Iterator[str]:
    # --gres=gpu:4, --gpus=4, -G 4, --partition=gpu.
    asked = any("gpu" in each or each.startswith("-G") for each in job.sbatch)
    if not job.gpus_per_node and not asked:
        yield _NO_GPUS
    yield from _package("cupy", "uses the device", name="CuPy")


def _package(
    module: str, what: str, otherwise: str = "", name: str | None = None
) -> Iterator[str]:
    if importlib.util.find_spec(module) is None:
        yield (
            f"{name or module}, which {what}, is not installed here: install it where "
            f"the job runs{otherwise}"
        )
