"""Code of labs 10 to 13: one package each, outside of the installed packages."""
