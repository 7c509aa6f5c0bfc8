"""Verify robustness certificates, using only NumPy and the standard library.

    python -m manifoldmuon_verify DIRECTORY

`manifoldmuon.robustness.export` writes certificates. The verifier recomputes their claims from the
weights and the images, with bounds on all rounding errors; docs/certificates.md describes the
format and the proofs.
"""

from manifoldmuon_verify._refusal import Refused
from manifoldmuon_verify._singular import SingularValues, singular_values
from manifoldmuon_verify._verify import Report, verify

__all__ = ["verify", "Report", "Refused", "singular_values", "SingularValues"]
