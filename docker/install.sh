#!/bin/sh
# install.sh SOURCE ENVIRONMENT: kvcap's server in a Python environment, which is made if need be.
# TORCH_INDEX names the package index that torch comes from; by default it is pip's own. With
# ENGINE=llamacpp neither torch nor transformers is installed: GGUF files alone can be run. With
# EDITABLE=--editable the code is that of SOURCE, as it will be.
set -eu
source=$1 environment=$2
[ -x "$environment/bin/pip" ] || python3 -m venv "$environment"
pip() { "$environment/bin/python" -P -m pip install --quiet --no-cache-dir --disable-pip-version-check "$@"; }
if [ "${ENGINE:-}" = llamacpp ]; then
  pip --no-deps ${EDITABLE:-} "$source"
  "$environment/bin/python" -P -c '
from importlib.metadata import requires
import re
for line in requires("kvcap"):
    needed, _, marker = line.partition(";")
    extra = re.search(r"extra == .([\w-]+)", marker)
    if (extra is None or extra[1] in ("serve", "json")) and not re.match("torch|transformers", needed):
        print(f"{needed}; {marker}" if marker and extra is None else needed)
' >"$environment/needed.txt"
  pip --no-warn-conflicts --requirement "$environment/needed.txt" huggingface_hub
else
  pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --requirement "$source/constraints.txt"
  pip --constraint "$source/constraints.txt" "kvcap[serve,json,onnx] @ file://$source"
fi
"$environment/bin/kvcap" serve --help >/dev/null
