"""Runs the command line as `python -m kvcap`."""

import sys

# Python puts the working folder first; in a checkout its folders (kernels, export, ...) would
# shadow packages of the same name.
if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and PYTHONSAFEPATH already do
    del sys.path[0]

from kvcap.cli import main

main()
