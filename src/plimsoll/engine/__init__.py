"""What each vLLM version does, as data with its evidence; the one place every other part asks.

data/*.json     read from the wheels by `python -m lab.catalogue`; nobody edits them
flag_notes.py   what the wheels do not say: what replaces a flag, what it does to memory
metrics.py      our names for vLLM's figures, their units and their traps
log_lines.py    the lines we recognise in a log
endpoints.py    what each HTTP endpoint does and needs
behaviours.py   what changed without a flag changing
"""
