"""Code of the labs, notebooks 10 to 13: one module each, beside the package and not part of it."""
