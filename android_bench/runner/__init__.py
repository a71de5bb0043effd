"""Runs a plan and writes what was measured: `python runner.pyz DIR/plan.json -o result.json`.

Needs numpy and onnxruntime (Termux has both): `android_bench/archive.py` makes one file of this
folder and of kvcap's loop over a decoder, which is copied to a device. The C runner and the page do
the same. It does not judge: statistics, tables and doubts are made of its samples later. A run that
is stopped leaves no result.
"""
