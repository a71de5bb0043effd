"""Runs `python -m kvcap.android_bench.runner`."""

import sys

from .cli import main

sys.exit(main())
