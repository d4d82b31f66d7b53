from hypothesis import settings


def examples(number: int) -> int:
    """A number of examples for a property, scaled with the profile (100 is the full one)."""
    return max(1, number * settings().max_examples // 100)
