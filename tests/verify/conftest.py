"""A certificate for the tests to forge."""

import numpy as np
import pytest

from tests.verify.forge import IMAGES, SCALE, SHIFT, case, export_radii


@pytest.fixture(scope="session")
def tight(tmp_path_factory):
    """Write a certificate with the largest radii that the verifier accepts."""
    folder = tmp_path_factory.mktemp("certificate") / "tight"
    options = {"shift": SHIFT, "scale": SCALE, "at": (0.01, 0.05, 0.1), "pixels": (0.0, 1.5)}
    return export_radii(folder, *case(), np.full(IMAGES, 1e6), **options).parent
