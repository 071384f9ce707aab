"""Making sites of a network random, in place: selection, patching, the patched network at work, its report and its files."""
