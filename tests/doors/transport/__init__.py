"""The port itself: HTTP/2, gRPC, TLS, floods."""
