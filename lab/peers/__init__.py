"""Runs kvcap and other programs for timed requests, each in an interpreter of its own.

`run_kvcap.py` runs kvcap; the others run programs that users could choose instead. A program is
started with only the folder above this one on its path. So it imports its own library, `serve.py`
and Python's modules only (`run_kvcap.py` alone imports kvcap). `process.py` starts the programs and
asks them; `http_servers.py` runs other servers that benchmarks ask beside kvcap's.
"""
