"""What a job imports so that its workers have the poisoned spec."""

from tests.golden.jobs import poison

poison.define()
