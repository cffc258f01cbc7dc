"""Drivers: what is below the seam. `base` is the seam itself."""
