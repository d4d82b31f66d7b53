"""What depends on the version of Envoy: `make test-envoys` runs it on each supported one."""
