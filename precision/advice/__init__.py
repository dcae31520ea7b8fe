"""What an audit reports besides its errors: findings, each with a remedy, and where not to trust a prediction.

detectors (findings, their kinds, order and detectors) · routers (mixtures of experts) · reliability (reasons to
measure).
"""

from assay.precision.advice.detectors import KINDS, Finding, findings
from assay.precision.advice.reliability import reasons

__all__ = ["KINDS", "Finding", "findings", "reasons"]
