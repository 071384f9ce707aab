"""Independent float64 NumPy implementations of what the paper defines. Nothing here imports patchbayes or torch."""
