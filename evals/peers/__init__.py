"""Programs that run a model and answer timed requests, each in an interpreter of its own.

`run_kvcap.py` is ours, the others run what users would otherwise pick. A program is started with
the folder above this one on its path and nothing else of kvcap, so it imports its own library,
`serve.py` and Python's modules only (`run_kvcap.py` alone imports kvcap); `process.py` is the side
that asks.
"""
