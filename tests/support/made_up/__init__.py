"""Files of APIs that nobody has, for the tests of how one is added."""
