"""Keeps a vLLM engine alive when a step runs out of device memory: PLIMSOLL_SURVIVE=1.

plugin.py    arms it: vLLM loads it as a general plugin in each of its processes; names the reason of aborts
support.py   where it can be armed, by release and by the engine's features, and why not elsewhere
contain.py   in the engine core: catches the failed step, preempts all requests, tries again in smaller steps
sizes.py     how small the next steps are, when they grow again, which request is aborted (pure)
failures.py  which errors are surely "the device is out of memory", and where in the step it happened
worker.py    in the worker: forgets the failed step and gives memory back
report.py    tells the API servers, through a small file
"""
