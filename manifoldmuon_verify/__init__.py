"""Verifies certificates of robustness, and trusts nothing but NumPy and the standard library.

    python -m manifoldmuon_verify DIRECTORY

A certificate is written by `manifoldmuon.robustness.export`. What it claims is derived anew here
from the weights and the images alone, with every rounding bounded; docs/certificates.md has the
format and what is proved.
"""

from manifoldmuon_verify._refusal import Refused
from manifoldmuon_verify._singular import SingularValues, singular_values
from manifoldmuon_verify._verify import Report, verify

__all__ = ["verify", "Report", "Refused", "singular_values", "SingularValues"]
