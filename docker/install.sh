#!/bin/sh
# install.sh SOURCE ENVIRONMENT: kvcap's server in a Python environment, which is made if need be.
# TORCH_INDEX names the package index that torch comes from; by default it is pip's own.
set -eu
source=$1 environment=$2
[ -x "$environment/bin/pip" ] || python3 -m venv "$environment"
pip() { "$environment/bin/python" -P -m pip install --quiet --no-cache-dir --disable-pip-version-check "$@"; }
pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --requirement "$source/constraints.txt"
pip --constraint "$source/constraints.txt" "kvcap[serve,json,onnx] @ file://$source"
"$environment/bin/kvcap" serve --help >/dev/null
