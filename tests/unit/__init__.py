"""Tests that call the code in their own process, by folder of the package; no server, no Envoy."""
