"""Helpers that tests share."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
