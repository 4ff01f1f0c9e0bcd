"""Options that the commands refuse: one rank says so, once, and all end with 2."""

from __future__ import annotations

import argparse

import pytest

from hpcaccum import InvalidArgumentError
from hpcaccum.train.options import add_arguments, resolve

TRAIN = [
    ("", "one of the arguments --strategy --compare is required"),
    ("--strategy x", "invalid choice: 'x'"),
    ("--strategy agn --straggler 2:5", "--straggler 2:... must be a rank of 0 to 1"),
    ("--strategy agn --straggler 5", "RANK:MILLISECONDS, got '5'"),
    ("--strategy agn --straggler 0:inf", "at most 3600000 milliseconds, got"),
    ("--strategy sync-replicas --quorum 3", "must be at most 2"),
    ("--strategy agn --quorum 2", "is for sync-replicas and local-s"),
    ("--strategy agn --staleness 0", "--staleness is for drop-stale, not"),
    ("--strategy drop-stale --period 1", "--period is for agn and local-"),
    ("--strategy cross-shard --dedicated", "be used with cross-shard"),
    ("--strategy cross-shard --servers 1", "--servers cannot be used with"),
    ("--strategy agn --servers 2", "different ranks of 0 to 1, got 2"),
    ("--strategy agn --servers 1,1", "different ranks of 0 to 1, got 1,1"),
    ("--strategy agn --servers a", "an integer of at least 0, got 'a'"),
    ("--strategy agn --servers 0,1 --dedicated", "needs more than 2 ranks"),
    ("--strategy agn --nodes 4", "hpcaccum train: error: unrecognized arg"),
    ("--strategy agn --data no.npz", "no.npz: No such file"),
    ("--strategy agn --trace no/t.json", "no/t.json: No such file"),
    ("--strategy agn --trace t --log t", "is the same file as --log"),
    ("--strategy agn --resume", "--resume needs --save DIR"),
    ("--strategy agn --every 5", "--every needs --save DIR"),
    ("--strategy agn --save s --every 5x", "got '5x'"),
    ("--strategy agn --save s --every 0s", "got '0s'"),
    ("--strategy agn --save /dev/null/s", "/dev/null/s: Not a directory"),
    ("--compare --save s", "--save is for one run: use --strategy"),
    ("--strategy agn --time-limit 5", "90s, 5m or 1h, got '5'"),
]
QUICK = "allreduce --sizes 4K --seconds 0.01"
BENCH = [
    ("", "the following arguments are required: benchmark"),
    ("x", "invalid choice: 'x'"),
    ("allreduce --sizes 4X", "got '4X'"),
    ("allreduce --sizes 100", "a multiple of 128 bytes, got '100'"),
    ("allreduce --seconds 0", "must be more than 0, got '0'"),
    ("allreduce --plot rows.txt", "must end in one of .png"),
    ("step --against gloo", "bench step: error: unrecognized arguments: -"),
    (f"{QUICK} --json script.py", "script.py: the file exists; use --force"),
    (f"{QUICK} --csv script.py", "script.py: the file exists; use --force"),
    ("allreduce --csv no/rows.csv", "no/rows.csv: No such file"),
]
# Without a launcher.
ALONE = [
    ("--strategy agn --straggler 3:20", "a rank of 0 to 0; there is only"),
    ("--strategy agn --dedicated", "would train; there is only 1"),
    ("--strategy sync-replicas --quorum 3", "got 3; there is only 1 rank"),
]


@pytest.mark.parametrize(
    ("command", "cases"),
    [("train", TRAIN), ("bench", BENCH)],
    ids=["train", "bench"],
)
def test_bad_options_are_reported_once(command, cases, refused):
    lines = [[command, *options.split()] for options, _ in cases]
    for (options, message), shown in zip(cases, refused(*lines), strict=True):
        assert message in shown, options


def test_options_for_several_ranks_name_the_launcher():
    for options, message in ALONE:
        args = parsed(options)
        with pytest.raises(InvalidArgumentError) as caught:
            resolve(args, 1)
        assert message in str(caught.value)
        assert "only 1 rank; start several: mpiexec -n 4 hpcaccum tr" in str(
            caught.value
        )
    with pytest.raises(InvalidArgumentError, match="cannot be used with cross-shard"):
        resolve(parsed("--strategy cross-shard --dedicated"), 1)


def parsed(words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words.split())


@pytest.mark.parametrize("name", ["HPCACCUM_TIMEOUT", "HPCACCUM_HEARTBEAT"])
def test_a_limit_that_is_no_number_is_one_line(name, mpirun, tmp_path):
    words = "-m", "hpcaccum", "train", "--compare"
    result = mpirun(2, *words, cwd=tmp_path, env={name: "soon"}, status=2)

    assert result.stdout == (
        f"hpcaccum train: error: {name} must be a number of seconds above 0, got "
        f"'soon'\n"
    )


AGN = "train --strategy agn"
EXAMPLES = "pip install scikit-learn matplotlib"


@pytest.mark.parametrize(
    ("module", "words", "cure"),
    [
        ("sklearn", AGN, EXAMPLES),
        ("matplotlib", f"{AGN} --plot x.png", EXAMPLES),
        ("matplotlib", "bench allreduce --plot p.png", "pip install matplotlib"),
        ("torch", "bench allreduce --against gloo", "pip install torch"),
        ("torch", "bench torch", "bench torch needs PyTorch"),
    ],
)
def test_missing_packages_are_named_with_the_cure(
    module, words, cure, patched, tmp_path
):
    hide = f"sys.modules[{module!r}] = sys.modules['{module}.datasets'] = None"
    shown = patched(2, hide, *words.split(), cwd=tmp_path, status=2).stdout

    assert shown.count(cure) == 1
    assert "Traceback" not in shown
