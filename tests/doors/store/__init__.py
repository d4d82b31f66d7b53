"""The shared store on real Valkey servers."""
