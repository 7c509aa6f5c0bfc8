"""Shared parts of the command lines."""

import io

import pytest

from studies.program import progress


@pytest.mark.parametrize("done", [0, 50])
def test_progress_excludes_compilation_time(monkeypatch, done):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with progress(150 + done, done) as bar:
        clock = bar.start_t
        monkeypatch.setattr(bar, "_time", lambda: clock)
        monkeypatch.setattr("time.time", lambda: clock)
        clock += 100.0  # compiling
        bar.update(50)
        clock += 2.0
        bar.update(50)
        with bar.compiling():
            clock += 100.0
        clock += 2.0
        bar.update(25)
        assert bar.n == done + 125
        assert bar.format_dict["elapsed"] == 4.0
