"""What Envoy shows of one HTTP request: its parts, its body, its caller and its fingerprint."""
