"""Files that a command may write: which are refused, and what a check leaves behind."""

from __future__ import annotations

import os
import select
from pathlib import Path

from hpcaccum.files import check_new, check_writable


def test_only_files_that_exist_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    check_new({"--json": Path("/dev/null"), "--csv": tmp_path / "pipe"})
    check_new({"--json": tmp_path / "new", "--csv": None})
    assert not (tmp_path / "new").exists()


def test_the_reader_of_a_pipe_does_not_notice_the_check(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    check_writable("--csv", tmp_path / "pipe")
    waiting = select.poll()
    waiting.register(reader)
    events = waiting.poll(0)
    os.close(reader)

    assert events == []  # else a writer has come and gone
