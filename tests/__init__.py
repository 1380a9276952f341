"""Test suite; `tests.ranks` starts the ranks that tests need."""
