"""Runs a plan in this process: `python -m kvcap.android_bench.runner DIR RESULT OPTIONS`.

OPTIONS are those of `RunOptions`, in JSON.
"""

import json
import sys
from pathlib import Path

from kvcap.android_bench.runner.device import Refused
from kvcap.android_bench.runner.measure import RunOptions, measured

folder, out, options = sys.argv[1:]
try:
    document = measured(Path(folder), RunOptions(**json.loads(options)))
except Refused as error:
    sys.exit(f"runner: {error}")
except KeyboardInterrupt:
    sys.exit(130)
Path(out).write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
