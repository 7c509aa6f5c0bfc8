"""A training that is killed while it writes a checkpoint resumes bit for bit."""

import subprocess

import pytest

from benchmarks import kills


@pytest.mark.slow
def test_killed_job_resumes_bit_for_bit(tmp_path):
    whole, other = tmp_path / "whole", tmp_path / "killed"
    (kill,) = kills.killed(other, 1, chunks=12, seed=1)
    assert 0 < kill["saved"] < 12 * kills.CHUNK
    assert kill["lost"] <= 1
    for folder in (whole, other):
        subprocess.run(kills.line(folder, 12), check=True)
    assert kills.ending(other) == kills.ending(whole)
