"""FlagGems, which keeps what its tuning found on disk: of an interpreter, that is worth nothing."""

import os

os.environ.setdefault("FLAGGEMS_DB_URL", "sqlite:///:memory:")

import flag_gems

__all__ = ["flag_gems"]
