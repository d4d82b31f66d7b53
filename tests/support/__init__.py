"""What tests share: the real parts, and what speaks to them. Nothing here is collected."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
"""The checkout."""
