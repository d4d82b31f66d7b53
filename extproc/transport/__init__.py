"""Transports: each speaks gRPC over HTTP/2 and hands bytes to `ext_proc`."""
