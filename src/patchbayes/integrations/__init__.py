"""Patched networks in the tools that people already use; each module needs the package it is named after."""
