"""Tests of the repository: what is built, installed, charted and written down."""
