"""Runs a plan and writes the measurements: `python runner.pyz DIR/plan.json -o result.json`.

Needs only numpy and onnxruntime, which Termux has. `android_bench/archive.py` packs this folder and
kvcap's loop over a decoder into one file, which is copied to a device. The C runner and the page do
the same work. It does not judge: statistics, tables and doubts are computed from its samples later.
A run that is stopped leaves no result.
"""
