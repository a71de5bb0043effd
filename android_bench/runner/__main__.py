"""Runs `python -m kvcap.android_bench.runner`."""

import sys

from kvcap.android_bench.runner.cli import main

sys.exit(main())
