"""What a client may send, and what Envoy tells of it."""
