"""Checkpoints: what is saved is loaded, and damaged files are found."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import logging
import os
import shutil
import socket
import stat
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from safetensors.numpy import load_file, save_file

import hpcaccum as hpc
from hpcaccum import CheckpointError, InvalidArgumentError, checkpoint

from ..common import same_bits


def same(one, other):
    if isinstance(one, np.ndarray):
        same_bits(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    else:
        assert type(one) is type(other)
        assert one == other or (one != one and other != other)


def names(directory):
    """Return the names of the files, without that which names the owner."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".owner")


@pytest.fixture
def another_process(monkeypatch):
    """Do something as another process would, with modules of its own."""
    taken = set()

    def act(call, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_TOKEN", "another")
            patch.setattr(checkpoint, "_taken", taken)
            return call(*args, **options)

    return act


@pytest.fixture
def while_it_saves(monkeypatch):
    """Do something once while a file is complete and has not got its name."""
    synchronize = checkpoint._synchronize

    def prepare(act):
        def once(path):
            monkeypatch.setattr(checkpoint, "_synchronize", synchronize)
            act()
            synchronize(path)

        monkeypatch.setattr(checkpoint, "_synchronize", once)

    return prepare


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st_numpy.arrays(
        st.sampled_from(["?", "i1", "u8", "f2", "f4", "f8", "i8"]),
        st_numpy.array_shapes(min_dims=0, min_side=0),
    )
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
)


@given(STATES)
def test_what_is_saved_is_loaded(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("states")
    checkpoint.save(directory, state)
    same(state, checkpoint.load(directory))


def trained(value):
    """Return an optimizer after an update, and its variable."""
    w = hpc.Variable(np.full(3, value), "w")
    opt = hpc.Momentum(0.5, 0.5)
    opt.initialize([w])
    opt.apply_gradients([(np.ones(3), w)])
    return opt, w


def test_objects_are_saved_and_restored_by_name(tmp_path):
    opt, w = trained(1.0)
    b, c = hpc.Variable(np.arange(2.0), "b"), np.arange(4)
    checkpoint.save(tmp_path, optimizer=opt, bias=b, count=c, epoch=3, keep=1)
    found = checkpoint.load(tmp_path)
    assert sorted(found) == ["bias", "count", "epoch", "optimizer"]
    same(found["optimizer"], opt.snapshot())
    assert found["epoch"] == 3

    other, v = trained(5.0)
    d, e = hpc.Variable(np.zeros(2, "f4"), "b"), np.zeros(4, int)
    same(checkpoint.load(tmp_path, optimizer=other, bias=d, count=e), found)
    same(other.snapshot(), opt.snapshot())
    same_bits(v.value, w.value)
    same_bits(d.value, np.arange(2, dtype="f4"))
    same_bits(e, c)


def test_nothing_is_restored_if_there_is_no_checkpoint(tmp_path):
    opt, w = trained(5.0)
    assert checkpoint.load(tmp_path) is None
    assert checkpoint.load(tmp_path / "none", optimizer=opt, w=w) is None
    assert (w.value == 4.5).all()


MISFITS = {
    "missing": ({"z": np.zeros(3)}, "no 'z', it has ."),
    "shape": ({"count": np.zeros(3)}, "saved 'count' must have shape"),
    "dtype": (
        {"bias": np.zeros(4), "count": np.zeros(4, int)},
        "saved 'count' is an array of float64, which cannot be copied to one of",
    ),
    "read-only": (
        {"bias": np.zeros(4), "count": np.broadcast_to(0.0, 4)},
        "'count' is an array that cannot be written to",
    ),
    "mask": (
        {"bias": np.zeros(4), "count": np.ma.zeros(4)},
        "'count' must have no mask",
    ),
    "number": ({"epoch": 3}, "'epoch', of type int, cannot be restored in place"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_objects_that_do_not_fit_change_nothing(tmp_path, case):
    objects, text = MISFITS[case]
    error = TypeError if case == "number" else InvalidArgumentError
    opt, w = trained(1.0)
    ones = np.ones(4)
    checkpoint.save(tmp_path, optimizer=opt, bias=ones, count=ones, epoch=3)
    other, v = trained(5.0)
    with pytest.raises(error, match=text):
        checkpoint.load(tmp_path, optimizer=other, **objects)
    assert (v.value == 4.5).all()
    assert not np.any(objects.get("bias", 0))
    checkpoint.save(tmp_path, [w.value])
    with pytest.raises(InvalidArgumentError, match="no 'optimizer', it has list"):
        checkpoint.load(tmp_path, optimizer=other)


def test_a_state_and_objects_are_not_mixed(tmp_path):
    with pytest.raises(InvalidArgumentError, match="a state, or objects by name"):
        checkpoint.save(tmp_path, {"epoch": 3}, count=np.zeros(4))


def test_arrays_of_any_kind(tmp_path):
    big_endian = np.arange(3, dtype=">f4")
    strided = np.arange(12.0).reshape(3, 4).T[::2]
    state = {
        "bfloat16": np.arange(4).astype(ml_dtypes.bfloat16),
        "big endian": big_endian,
        "strided": strided,
        "scalar": np.float32(3),
        "tuple": (1, 2),
    }
    checkpoint.save(tmp_path, state)
    found = checkpoint.load(tmp_path)

    same_bits(found["bfloat16"], state["bfloat16"])
    same_bits(found["big endian"], big_endian.astype("f4"))
    same_bits(found["strided"], np.ascontiguousarray(strided))
    same_bits(found["scalar"], np.array(3, np.float32))
    assert found["tuple"] == [1, 2]
    # The result belongs to the caller.
    assert all(found[name].flags.writeable for name in found if name != "tuple")


def test_other_programs_read_the_arrays(tmp_path):
    path = checkpoint.save(tmp_path, {"a": {"b": np.arange(3.0)}})

    assert {name: list(array) for name, array in load_file(path).items()} == {
        "0: state.a.b": [0, 1, 2]
    }


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ({"a": [1, object()]}, TypeError, "state.a[1] has type object, which cannot"),
        ({"a": b"bytes"}, TypeError, "state.a has type bytes"),
        ({"a": {1: 2}}, TypeError, "keys must be strings: state.a has 1"),
        ({"a": np.array(["text"])}, InvalidArgumentError, "state.a is an array of <U4"),
        ({"a": np.ma.ones(2)}, InvalidArgumentError, "state.a must have no mask"),
        ({"a": np.ones(1, complex)}, InvalidArgumentError, "array of complex128"),
        ({"a": np.array([object()])}, InvalidArgumentError, "array of object"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, state, error, text):
    directory = tmp_path / "new"
    with pytest.raises(error) as caught:
        checkpoint.save(directory, state)

    assert text in str(caught.value)
    assert not directory.exists()


@pytest.mark.parametrize("keep", [0, 1.5, None])
def test_keep_must_be_a_count(tmp_path, keep):
    with pytest.raises((TypeError, InvalidArgumentError), match="keep must be"):
        checkpoint.save(tmp_path, {}, keep=keep)


# The files of a directory


def test_the_last_ones_are_kept_and_other_files(tmp_path):
    directory = tmp_path / "some" / "directory"
    first = checkpoint.save(directory, 0)
    others = ["checkpoint-1.safetensors.old", "checkpoint-x.safetensors", "notes.txt"]
    for name in others:
        (directory / name).write_text("mine")
    paths = [first, *(checkpoint.save(directory, n, keep=2) for n in range(1, 12))]

    assert names(directory) == sorted([*others, *(path.name for path in paths[-2:])])
    assert checkpoint.load(directory) == 11
    assert checkpoint.load(paths[-2]) == 10
    checkpoint.save(directory, 12, keep=1)
    assert names(directory) == sorted([*others, "checkpoint-13.safetensors"])


def test_a_file_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkpoint-7"):
        checkpoint.load(tmp_path / "checkpoint-7.safetensors")


def test_the_file_has_the_permissions_of_the_user(tmp_path):
    before = os.umask(0o027)
    try:
        path = checkpoint.save(tmp_path, 1)
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_interrupted_save_leaves_the_earlier_ones(tmp_path, while_it_saves):
    # What a job left that was killed.
    (tmp_path / ".unfinished-1").mkdir()
    (tmp_path / ".unfinished-1" / "half").write_bytes(b"x")
    path = checkpoint.save(tmp_path, 1)

    def interrupted():
        raise KeyboardInterrupt

    while_it_saves(interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2)

    assert names(tmp_path) == [path.name]
    assert checkpoint.load(tmp_path) == 1
    checkpoint.save(tmp_path, 3)
    assert checkpoint.load(tmp_path) == 3


def test_files_are_on_the_disk_before_they_are_renamed(tmp_path, monkeypatch):
    calls = []
    synchronize = checkpoint._synchronize

    def watched(path):
        calls.append((path.name, names(tmp_path)))
        synchronize(path)

    checkpoint.save(tmp_path, 1, keep=1)
    monkeypatch.setattr(checkpoint, "_synchronize", watched)
    checkpoint.save(tmp_path, 2, keep=1)
    one, two = "checkpoint-1.safetensors", "checkpoint-2.safetensors"
    folder = f".unfinished-{checkpoint._TOKEN}-2"

    assert calls == [
        (two, [folder, one]),
        (tmp_path.name, [folder, one, two]),
    ]
    assert names(tmp_path) == [two]


def test_a_signal_handler_may_save_while_a_checkpoint_is_written(
    tmp_path, while_it_saves
):
    while_it_saves(lambda: checkpoint.save(tmp_path, "later"))
    path = checkpoint.save(tmp_path, "earlier")
    assert checkpoint.load(path) == "earlier"
    assert checkpoint.load(tmp_path) == "later"
    assert len(names(tmp_path)) == 2


def test_threads_save_to_one_directory(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda n: checkpoint.save(tmp_path, n, keep=90), range(60))
        )
    assert [checkpoint.load(path) for path in found] == list(range(60))


def test_a_directory_may_be_named_like_a_file(tmp_path):
    place = tmp_path / "run.safetensors"
    checkpoint.save(place, 1)
    assert checkpoint.load(place) == 1


# What may be in the place of a file.
OTHERS = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a directory": lambda path: path.symlink_to(".."),
}


def replace(path, make):
    path.unlink()
    make(path)


# Two processes with one directory


def test_the_last_process_that_began_to_save_goes_on(
    tmp_path, another_process, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    checkpoint.save(tmp_path, "first")
    another_process(checkpoint.save, tmp_path, "second")
    with pytest.raises(CheckpointError, match="another run saves here now") as caught:
        checkpoint.save(tmp_path, "late")

    name = f"process {os.getpid()} on {socket.gethostname()}, job 123, since "
    assert name in str(caught.value)
    assert checkpoint.load(tmp_path) == "second"
    assert len(names(tmp_path)) == 2


def test_a_process_that_lost_its_directory_while_it_saved_is_told(
    tmp_path, another_process, while_it_saves
):
    checkpoint.save(tmp_path, "first")
    while_it_saves(lambda: another_process(checkpoint.save, tmp_path, "second"))
    with pytest.raises(CheckpointError, match="another run saves here now"):
        checkpoint.save(tmp_path, "late")

    assert checkpoint.load(tmp_path) == "second"
    assert len(names(tmp_path)) == 2


def test_the_files_of_the_owner_are_not_removed(
    tmp_path, another_process, while_it_saves
):
    def another_tries():
        with pytest.raises(CheckpointError):
            another_process(checkpoint.save, tmp_path, "late", keep=1)

    another_process(checkpoint.save, tmp_path, "first")
    while_it_saves(another_tries)
    checkpoint.save(tmp_path, "second")

    assert checkpoint.load(tmp_path) == "second"
    assert len(names(tmp_path)) == 2


OWNERS = {
    **OTHERS,
    "no text": lambda path: path.write_bytes(b"\xff\xfe\n"),
    "a link": lambda path: path.symlink_to("checkpoint-1.safetensors"),
}


@pytest.mark.parametrize("kind", OWNERS)
def test_what_is_not_the_file_of_the_owner_is_left_alone(tmp_path, kind):
    checkpoint.save(tmp_path, "before")
    replace(tmp_path / ".owner", OWNERS[kind])
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path, "after")

    assert names(tmp_path) == ["checkpoint-1.safetensors"]
    assert checkpoint.load(tmp_path) == "before"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, "before")

    assert not [*tmp_path.iterdir()]


def test_a_directory_that_was_removed_is_made_again(tmp_path):
    directory = tmp_path / "saved"
    checkpoint.save(directory, 1)
    shutil.rmtree(directory)
    checkpoint.save(directory, 2)
    (directory / ".owner").unlink()
    checkpoint.save(directory, 3)

    assert checkpoint.load(directory) == 3


def test_a_checkpoint_that_is_removed_while_it_is_read(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, "first")
    files = checkpoint.files

    def outdated(directory):
        found = files(directory)
        monkeypatch.setattr(checkpoint, "files", files)
        checkpoint.save(directory, "second", keep=1)
        return found

    monkeypatch.setattr(checkpoint, "files", outdated)

    assert checkpoint.load(tmp_path) == "second"


def test_a_link_that_leads_nowhere_is_an_error(tmp_path):
    (tmp_path / "checkpoint-1.safetensors").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path)


# Damaged files

STATE = {"step": 7, "weights": np.arange(1000.0)}


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def craft(path, state, **arrays):
    """Replace a file by one with a right checksum."""
    checksum = checkpoint._checksum(state, arrays)
    header = {"format": checkpoint._FORMAT, "state": state, "checksum": checksum}
    save_file(arrays, path, header)


def describe(path, **entry):
    """Replace a file by one with an array of a byte that NumPy would not write."""
    about = {"format": checkpoint._FORMAT, "state": "1", "checksum": ""}
    entry.setdefault("data_offsets", [0, 1])
    text = json.dumps({"__metadata__": about, "a": entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"x")


ARRAY = '{{"array of hpcaccum": {}}}'.format

DAMAGE = {
    "nested too deeply": lambda path: craft(path, "[" * 10**5 + "]" * 10**5),
    "nested mappings": lambda path: craft(path, '{"a":' * 5000 + "1" + "}" * 5000),
    "digits": lambda path: craft(path, "9" * 5000),
    "no JSON": lambda path: craft(path, "{"),
    "an unknown array": lambda path: craft(path, ARRAY('"none"'), a=np.ones(1)),
    "a number of an array": lambda path: craft(path, ARRAY(1), a=np.ones(1)),
    "names of arrays": lambda path: craft(path, ARRAY('["a"]'), a=np.ones(1)),
    "complex numbers": lambda path: craft(path, ARRAY('"a"'), a=np.ones(1, "c8")),
    "float8": lambda path: describe(path, dtype="F8_E4M3", shape=[1]),
    "an unknown type": lambda path: describe(path, dtype="F" * 10**6, shape=[1]),
    "a large shape": lambda path: describe(
        path, dtype="F32", shape=[0, 2**64 - 1], data_offsets=[0, 0]
    ),
    **{
        kind: lambda path, make=make: replace(path, make)
        for kind, make in OTHERS.items()
    },
    "an element": lambda path: flip(path, -8),
    "the header": lambda path: flip(path, path.read_bytes().index(b"step") + 2),
    "a shape": lambda path: flip(path, path.read_bytes().index(b"1000") + 3),
    "cut short": lambda path: os.truncate(path, 600),
    "empty": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("hello, this is some text"),
    "foreign": lambda path: save_file({"a": np.ones(3)}, path),
    "a later format": lambda path: save_file(
        {}, path, {"format": "hpcaccum checkpoint 2"}
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_the_one_before_is_used(tmp_path, caplog, kind):
    checkpoint.save(tmp_path, "before")
    path = checkpoint.save(tmp_path, STATE)
    DAMAGE[kind](path)
    with caplog.at_level(logging.WARNING, "hpcaccum"):
        assert checkpoint.load(tmp_path) == "before"
    [record] = caplog.records
    assert str(path) in record.message
    assert "checkpoint-1.safetensors is used instead" in record.message
    assert len(record.message) < 999
    # A directory with the name of a file may have checkpoints itself.
    if not path.is_dir():
        with pytest.raises(CheckpointError, match="checkpoint-2") as caught:
            checkpoint.load(path)
        known = kind not in ("foreign", "a later format", *OTHERS)
        assert ("damaged" if known else "is not a checkpoint") in str(caught.value)
    checkpoint.save(tmp_path, "after", keep=1)
    assert checkpoint.load(tmp_path) == "after"


def test_every_bit_of_a_small_file_counts(tmp_path):
    path = checkpoint.save(tmp_path, {"a": np.ones(1, np.uint8), "b": "text"})
    size = path.stat().st_size
    for place in range(size):
        flip(path, place)
        try:
            found = checkpoint.load(path)
        except CheckpointError:
            pass
        else:
            # White space of the header, or the order of its entries.
            assert found == {"a": np.ones(1, np.uint8), "b": "text"}, place
        flip(path, place)


def test_if_all_are_damaged_all_are_named(tmp_path):
    for step in range(2):
        flip(checkpoint.save(tmp_path, {"weights": np.ones(5), "step": step}), -1)
    with pytest.raises(CheckpointError, match=r"checkpoint-2.*; .*checkpoint-1"):
        checkpoint.load(tmp_path)


# Snapshots of optimizers without ranks


RULES = {
    "SGD": lambda: hpc.SGD(lambda step: 0.5 / (step + 1)),
    "Momentum": lambda: hpc.Momentum(0.1, 0.9),
    "Adagrad": lambda: hpc.Adagrad(0.1),
    "Adam": lambda: hpc.Adam(0.1),
}


def variables(dtype, value=1.0):
    return [
        hpc.Variable(np.full(3, value, dtype), "w"),
        hpc.Variable(np.array(value, dtype), "s"),
    ]


def train(opt, own, steps):
    for step in steps:
        grads = [np.full(var.shape, 1.0 + step, var.dtype) for var in own]
        opt.minimize(lambda grads=grads: (0.0, grads), var_list=own)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_continues_from_a_file(tmp_path, rule, dtype):
    own = variables(dtype)
    opt = RULES[rule]()
    train(opt, own, range(3))
    checkpoint.save(tmp_path, {"optimizer": opt.snapshot()})
    train(opt, own, range(3, 5))
    new = variables(dtype, 7.0)
    other = RULES[rule]()
    other.restore(checkpoint.load(tmp_path)["optimizer"], new)
    train(other, new, range(3, 5))

    same(other.snapshot(), opt.snapshot())
    assert [v.name for v in other.variables()] == [v.name for v in opt.variables()]


def test_a_snapshot_is_a_copy_of_all_variables():
    own = variables(np.float32)
    opt = hpc.Momentum(0.1, 0.9)
    with pytest.raises(InvalidArgumentError, match="no variables are known"):
        opt.snapshot()
    opt.apply_gradients([(np.ones(3, np.float32), own[0])])
    found = opt.snapshot()
    found["variables"]["w"][:] = 7
    found["state"]["w"]["momentum"][:] = 7

    assert own[0].value[0] == np.float32(0.9)
    assert found["state"]["w"]["step"] == 1
    assert opt.get_slot(own[0], "momentum").value[0] == 1


def test_a_snapshot_of_other_variables_changes_nothing():
    own = variables(np.float32)
    opt = hpc.Momentum(0.1, 0.9)
    opt.initialize(own)
    snapshot = opt.snapshot()
    snapshot["variables"]["w"][:] = 7
    for part in ("w", "s"):
        snapshot["state"][part]["momentum"] = np.ones(9, np.float32)
    with pytest.raises(InvalidArgumentError, match="slot 'momentum' of 'w' is float32"):
        opt.restore(snapshot)

    assert (own[0].value == 1).all()


class Counting(hpc.Optimizer):
    """An optimizer of the user, whose slot exists from `initialize` on, or later."""

    def initialize(self, var_list):
        super().initialize(var_list)
        self.sums = {}
        if self.get_name() != "late":
            for var in self._variables:
                self.sums[var] = hpc.Variable(np.zeros(var.shape), f"{var.name}/sum")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        for grad, var in grads_and_vars:
            self.sums[var].value += grad
            var.value -= grad

    def get_slot_names(self):
        return ["sum"]

    def get_slot(self, var, name):
        return getattr(self, "sums", {}).get(var)


def test_optimizers_of_the_user_are_restored_by_their_slots():
    own = variables(np.float64)
    opt = Counting("counting")
    train(opt, own, range(2))
    snapshot = opt.snapshot()
    other = Counting("counting")
    new = variables(np.float64, 7.0)
    other.restore(snapshot, new)

    same(other.snapshot(), snapshot)
    assert snapshot["state"] == {"w": {"sum": pytest.approx(3)}, "s": {"sum": 3.0}}
    with pytest.raises(InvalidArgumentError, match="no slot 'sum' of 'w' before"):
        Counting("late").restore(opt.snapshot(), own)
