"""Files of made-up APIs, for the tests of how one is added."""
