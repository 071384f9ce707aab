"""From the records of evaluated runs to one self-contained HTML page, and to Markdown, LaTeX and CSV tables."""

from .writing import SUFFIXES, findings, write_report

__all__ = ["SUFFIXES", "findings", "write_report"]
