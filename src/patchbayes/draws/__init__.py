"""Draws as values: what a draw consists of (layout), how draws are made (schemes), and where randomness comes from."""

from .draws import Draws

__all__ = ["Draws"]
