"""Tests of the repository: builds, chart, documentation."""
