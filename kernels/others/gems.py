"""FlagGems, with its tuning cache in memory: results tuned in an interpreter must not reach the disk."""

import os

os.environ.setdefault("FLAGGEMS_DB_URL", "sqlite:///:memory:")

import flag_gems

__all__ = ["flag_gems"]
