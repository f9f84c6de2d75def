"""Replays a serving trace through a small continuous-batching loop: `plait replay`.

trace.py reads traces, pages.py owns the pages of the KV cache, engine.py decides which requests run
in a step, model.py draws queries, keys and values, memory.py puts them on a device, session.py does
the step: append, plan, run, check.
"""
