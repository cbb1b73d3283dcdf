#!/bin/sh
# Prints the newest Python of 3.13, 3.12, 3.11 that runs and can make a virtual environment.
# A version manager's shim may be on PATH and fail, so each candidate is really started.
for version in 3.13 3.12 3.11; do
  for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python python3; do
    if "$candidate" -c "import ensurepip, ssl, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
      command -v "$candidate"
      exit 0
    fi
  done
done
