"""A certificate for the tests to forge."""

import pytest

from tests.verify.forge import write_tight


@pytest.fixture(scope="session")
def tight(tmp_path_factory):
    return write_tight(tmp_path_factory.mktemp("certificate"))
