"""Long runs under random kills; not part of the test suite."""
