"""What operators see and order, on running servers."""
