"""`loopguard replay`: runs recorded traffic through the engine, by the recorded clock."""
