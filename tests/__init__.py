"""The test suite; `harness.py` runs the real parts."""
