"""What an audit reports beside its errors: findings, each with a remedy, and where not to trust a prediction.

finding (kinds, their order, errors of one site alone) · detectors (overflow, underflow, outliers, scales) · routers
(mixtures of experts) · reliability (reasons to measure).
"""

from assay.precision.advice.detectors import findings
from assay.precision.advice.finding import KINDS, Finding
from assay.precision.advice.reliability import reasons

__all__ = ["KINDS", "Finding", "findings", "reasons"]
